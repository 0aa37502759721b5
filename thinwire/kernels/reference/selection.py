"""The largest magnitudes of a vector, of several scopes of it, or about so: ties go to the lower index."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


def _magnitude(x: Tensor) -> Tensor:  # (n,) float32 -> (n,) float32, nan counts as the largest
    return torch.nan_to_num(x.abs(), nan=float("inf"), posinf=float("inf"))


def select_topk(x: Tensor, k: int) -> Tensor:  # (n,) float32 -> (k,) int64, rising
    """Return the indices of the k largest magnitudes in rising order; ties go to the lower index.

    A nan counts as larger than everything, so that it is sent and seen instead of hiding in a residual.
    """
    n = x.numel()
    if k >= n or k == 0:
        return torch.arange(min(k, n), dtype=torch.int64, device=x.device)
    magnitude = _magnitude(x)
    threshold = torch.topk(magnitude, k, sorted=True).values[-1]
    above = torch.nonzero(magnitude > threshold).flatten()
    level = torch.nonzero(magnitude == threshold).flatten()[: k - above.numel()]
    return torch.cat([above, level]).sort().values


def select_sampled(x: Tensor, k: int, key: int) -> Tensor:  # (n,) float32 -> (<= k,) int64, rising
    """Return about the k largest magnitudes by DGC's hierarchical threshold (section 4 of the paper).

    A strided sample (1 %, or more when that would hold fewer than 32 of the wanted elements) estimates a threshold
    that lets a few more than k pass; when more than k do, the exact top-k of those that passed is taken, which is the
    exact answer unless the estimate was too high. Never more than k are returned.
    """
    n = x.numel()
    sample_size = max(n // 100, (32 * n + k - 1) // max(k, 1))
    if k >= n or 2 * sample_size >= n:
        return select_topk(x, k)
    stride = n // sample_size
    sample = _magnitude(x[key % stride :: stride])
    wanted = sample.numel() * k / n
    rank = min(sample.numel(), int(wanted + 2.0 * wanted**0.5) + 1)
    threshold = torch.topk(sample, rank, sorted=True).values[-1]
    passed = torch.nonzero(_magnitude(x) >= threshold).flatten()
    if passed.numel() <= k:
        return passed
    return passed[select_topk(x[passed], k)]


def select_among(x: Tensor, candidates: Tensor, k: int) -> Tensor:  # (n,), (c,) int64 rising -> (min(c, k),) int64
    """Return the k largest magnitudes among the candidates, by the rules of select_topk."""
    return candidates[select_topk(x[candidates], k)]


_SLAB = 1 << 22  # elements that are looked at together


def select_chunks(
    x: Tensor, bounds: Sequence[int], chunk: int, k: int, lasts: Sequence[int], out: Tensor | None = None
) -> Tensor:  # (n,) float32 -> (c,) int64, rising
    """Return the k largest magnitudes of every ``chunk`` consecutive elements, by the rules of select_topk.

    The chunks of scope s begin at ``bounds[s]``; of what is left before ``bounds[s + 1]``, fewer than ``chunk``
    elements, come the ``lasts[s]`` largest. ``out``, (c,) int32, is memory offered for the indices.
    """
    chosen = [torch.zeros(0, dtype=torch.int64, device=x.device)]
    for (start, stop), last in zip(pairwise(bounds), lasts, strict=True):
        rest = stop - (stop - start) % chunk
        step = max(1, _SLAB // chunk) * chunk
        for first in range(start, rest, step):
            rows = x[first : min(first + step, rest)].reshape(-1, chunk)
            chosen.append(_largest_of_rows(rows, min(k, chunk)) + first)
        chosen.append(select_topk(x[rest:stop], last) + rest)
    return torch.cat(chosen)


def _largest_of_rows(rows: Tensor, k: int) -> Tensor:  # (r, c) float32 -> (r * k,) int64, rising
    magnitude = _magnitude(rows)
    edge = torch.topk(magnitude, k, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    above, level = magnitude > edge, magnitude == edge
    missing = k - above.sum(dim=1, keepdim=True)
    return torch.nonzero((above | level & (level.cumsum(dim=1, dtype=torch.int32) <= missing)).flatten()).flatten()


def select_scopes(
    x: Tensor,
    bounds: Sequence[int],
    ks: Sequence[int],
    candidates: Tensor | None,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
) -> tuple[Tensor, list[int], Tensor]:  # -> (sum of k,) int64, candidates, (S,) float32
    """Return the ks[s] largest magnitudes of every scope x[bounds[s]:bounds[s + 1]], by the rules of select_topk.

    ``candidates`` are the rising indices of all elements that reach their scope's threshold, or None: where a scope has
    at least k of them only those are looked at. Besides the chosen indices, one scope behind the other, come the number
    of candidates and the smallest chosen magnitude of each scope (0 where none is chosen).

    ``out``, (sum of k,) int32, is memory offered for the indices; ``scratch``, int32, an entry a candidate at least,
    for what is looked at on the way.
    """
    chosen: list[Tensor] = []
    cuts = [0] * len(bounds)
    if candidates is not None:
        edges = torch.tensor(bounds, dtype=torch.int64, device=x.device)
        cuts = torch.searchsorted(candidates, edges).tolist()
    for place, k in enumerate(ks):
        start, stop = bounds[place], bounds[place + 1]
        if candidates is not None and cuts[place + 1] - cuts[place] >= k:
            chosen.append(select_among(x, candidates[cuts[place] : cuts[place + 1]], k))
        else:
            chosen.append(select_topk(x[start:stop], k) + start)
    smallest = [x[picked].abs().min() if picked.numel() else x.new_zeros(()) for picked in chosen]
    return (
        torch.cat(chosen) if chosen else torch.zeros(0, dtype=torch.int64, device=x.device),
        [cuts[place + 1] - cuts[place] for place in range(len(ks))],
        torch.stack(smallest) if smallest else x.new_zeros(0),
    )
