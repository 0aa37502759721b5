"""Lists of entries, rising indices with their values: added to vectors, taken from them, merged and compared.

Where ``room`` is a parameter it is memory offered for the entries of the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.kernels.reference.selection import select_topk


@dataclass(frozen=True)
class Entries:
    """Memory for so many entries: first all indices, then all values, without a gap between."""

    memory: Tensor  # (2 * capacity,) int32

    @property
    def capacity(self) -> int:
        return self.memory.numel() // 2

    @property
    def indices(self) -> Tensor:  # (capacity,) int32
        return self.memory[: self.capacity]

    @property
    def values(self) -> Tensor:  # (capacity,) float32
        return self.memory[self.capacity :].view(torch.float32)


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


def take_at(x: Tensor, indices: Tensor, out: Tensor | None = None) -> Tensor:  # (n,), (k,) -> (k,)
    """x[indices]; ``out`` is memory offered for it."""
    return x[indices]


def keep_largest(
    indices: Tensor, values: Tensor, k: int, room: Entries | None = None
) -> tuple[Tensor, Tensor]:  # (n,) both -> (k,) both
    """The k <= n entries of largest magnitude, by the rules of select_topk."""
    kept = select_topk(values, k)
    return indices[kept], values[kept]


def keep_masked(
    indices: Tensor, values: Tensor, mask: Tensor, room: Entries | None = None
) -> tuple[Tensor, Tensor]:  # (n,) all
    """The entries where the mask, bool, is set."""
    return indices[mask], values[mask]


def mask_contained(mask: Tensor, wanted: Tensor, indices: Tensor) -> None:  # (m,) bool, (m,), (k,)
    """Clear the mask where ``wanted`` is not among ``indices``, in place."""
    mask &= contained(wanted, indices)


def merge_topk(
    a: Tensor, a_values: Tensor, b: Tensor, b_values: Tensor, k: int, room: Entries | None = None
) -> tuple[Tensor, Tensor]:
    """The k entries of largest magnitude of a + b, all where they are fewer (gTop-k, Definition 1); the same bits in
    either order. ``room`` has memory for all entries of both lists in all, and is none of their own."""
    indices, values = union_add(a, a_values, b, b_values)
    return keep_largest(indices, values, min(k, indices.numel()))
