"""Lists of entries, rising indices with their values: added to vectors, taken from them, merged and compared."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def scatter_add(
    parts: Sequence[Tensor], starts: Sequence[int], lists: Sequence[tuple[Tensor, Tensor]], scale: float
) -> None:
    """parts[flat index] += value * scale for every list of (k,) int64 indices, rising, and their (k,) float32 values.

    Part i is at starts[i] of the flat space. The lists are added in their order, so every element's sum has one order.
    """
    if not parts or not lists:
        return
    ends = [*starts, starts[-1] + parts[-1].numel()]
    bounds = torch.tensor(ends, dtype=torch.int64, device=lists[0][0].device)
    for indices, values in lists:
        cuts = torch.searchsorted(indices, bounds).tolist()
        for place, (part, start) in enumerate(zip(parts, starts, strict=True)):
            inside = slice(cuts[place], cuts[place + 1])
            if inside.stop > inside.start:
                part.index_add_(0, indices[inside] - start, values[inside] * scale)


def remaining(x: Tensor, sent: Tensor) -> Tensor:  # (k,) float32 both -> (k,) float32
    """x - sent. An inf or nan that was sent has been seen and is gone; a finite x of which a nan was sent is kept."""
    rest = x - sent
    return torch.where(torch.isfinite(rest), rest, torch.where(torch.isfinite(x), x, 0.0))


def subtract_at(x: Tensor, indices: Tensor, values: Tensor) -> None:  # (n,) float32, (k,) int64, (k,) float32
    """x[indices] = remaining(x[indices], values), in place; no index twice."""
    x[indices] = remaining(x[indices], values)


def union_add(a: Tensor, a_values: Tensor, b: Tensor, b_values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the union of two rising lists of indices, and the sums of their values; the same bits in either order."""
    indices, place = torch.unique(torch.cat([a, b]), sorted=True, return_inverse=True)
    values = torch.zeros(indices.numel(), dtype=torch.float32, device=indices.device)
    values.index_add_(0, place, torch.cat([a_values, b_values]))
    return indices, values


def contained(wanted: Tensor, indices: Tensor) -> Tensor:  # (m,), (k,) int64 rising -> (m,) bool
    """Which of ``wanted`` are among ``indices``."""
    if not indices.numel():
        return torch.zeros_like(wanted, dtype=torch.bool)
    place = torch.searchsorted(indices, wanted).clamp_(max=indices.numel() - 1)
    return indices[place] == wanted


def zero_at(x: Tensor, indices: Tensor) -> None:  # (n,), (k,) int64
    """x[indices] = 0, in place."""
    x.index_fill_(0, indices, 0.0)
