"""Work on rising lists of indices with values, in plain torch.

The specification of ``cpu_lists``, and what runs on every other device.
Indices are int64; the native library also takes int32 and then answers in int32. ``room`` is memory that an answer may
lie in, ``Entries``, and only the native library uses it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.kernels import reference


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


def take_at(x: Tensor, indices: Tensor, out: Tensor | None = None) -> Tensor:  # (n,), (k,) -> (k,)
    """x[indices]"""
    return x[indices]


def keep_largest(
    indices: Tensor, values: Tensor, k: int, room: Entries | None = None
) -> tuple[Tensor, Tensor]:  # (n,) both -> (k,) both
    """The k <= n entries of largest magnitude, by the rules of select_topk."""
    kept = reference.select_topk(values, k)
    return indices[kept], values[kept]


def keep_masked(
    indices: Tensor, values: Tensor, mask: Tensor, room: Entries | None = None
) -> tuple[Tensor, Tensor]:  # (n,) all
    """The entries where the mask, bool, is set."""
    return indices[mask], values[mask]


def mask_contained(mask: Tensor, wanted: Tensor, indices: Tensor) -> None:  # (m,) bool, (m,), (k,)
    """Clear the mask where ``wanted`` is not among ``indices``, in place."""
    mask &= reference.contained(wanted, indices)


def merge_topk(
    a: Tensor, a_values: Tensor, b: Tensor, b_values: Tensor, k: int, room: Entries | None = None
) -> tuple[Tensor, Tensor]:
    """The k entries of largest magnitude of a + b, all where they are fewer (gTop-k, Definition 1); the same bits in
    either order. ``room`` has memory for all entries of both lists in all, and is none of their own."""
    indices, values = reference.union_add(a, a_values, b, b_values)
    return keep_largest(indices, values, min(k, indices.numel()))


def int8_quantize(values: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``reference.int8_quantize``; the codes lie in ``out``, (k,) int8, where that is given and used."""
    return reference.int8_quantize(values)


def int8_dequantize(codes: Tensor, scales: Tensor, out: Tensor | None = None) -> Tensor:
    """``reference.int8_dequantize``, in ``out``, (k,) float32, where that is given and used."""
    return reference.int8_dequantize(codes, scales)


def gaps_between(indices: Tensor) -> Tensor:  # (k,) rising -> (k,) int64 >= 0
    indices = indices.to(torch.int64)
    before = torch.nn.functional.pad(indices[:-1], (1, 0), value=-1) if indices.numel() else indices
    return indices - before - 1


def rice_unary_bits_of(indices: Tensor, parameters: range) -> list[int]:  # (k,)
    """``reference.rice_unary_bits`` of the gaps between rising indices."""
    return reference.rice_unary_bits(gaps_between(indices), parameters)


def rice_write(indices: Tensor, parameter: int, low: Tensor, unary: Tensor) -> None:  # (k,), uint8, uint8
    """``reference.rice_encode`` of the gaps between rising indices, into memory of the right lengths."""
    for out, stream in zip((low, unary), reference.rice_encode(gaps_between(indices), parameter), strict=True):
        out.copy_(stream)
