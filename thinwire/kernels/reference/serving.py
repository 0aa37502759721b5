"""What a server does with everybody's signs and trits, and how answers reach the gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.kernels.reference.packing import pack_bits, pack_uints, unpack_bits, unpack_trits, unpack_uints
from thinwire.kernels.reference.quantization import Runs, add_signs, block_expand, block_means


def _write(parts: Sequence[Tensor], values: Tensor) -> None:
    if parts:
        torch._foreach_copy_(list(parts), list(values.split([part.numel() for part in parts])))


def sign_scales(x: Tensor, runs: Runs) -> Tensor:  # (n,) float32 -> (B,) float32
    """Return ||x_b||_1 / d_b of consecutive blocks (dist-EF-blockSGDM, section 3.2)."""
    return block_means(x.abs(), runs)


def pack_signs(parts: Sequence[Tensor], out: Tensor) -> None:  # vectors of float32, (ceil(n/8),) uint8
    """Write a one bit where an element is below zero, the parts one behind the other."""
    if parts:
        out.copy_(pack_bits(torch.cat([part < 0 for part in parts])))


def subtract_own_signs(x: Tensor, scales: Tensor, runs: Runs) -> None:  # (n,), (B,) float32
    """x -= scale * sign(x), in place; sign(0) = 1."""
    add_signs(x, x < 0, scales, runs, -1.0)


def add_mean_of_signs(out: Tensor, frames: Sequence[tuple[Tensor, Tensor]], runs: Runs) -> None:  # (n,) float32
    """out += the mean of all frames' scale * sign; a frame is its packed bits and its (B,) scales, added in order."""
    total = torch.zeros_like(out)
    for packed, scales in frames:
        add_signs(total, packed, scales, runs, 1.0)
    out.add_(total.div_(len(frames)))


def write_signs(parts: Sequence[Tensor], packed: Tensor, scales: Tensor, runs: Runs) -> None:
    """The parts, one behind the other, become -scale where the bit is one, else +scale."""
    magnitude = block_expand(scales, runs)
    _write(parts, torch.where(unpack_bits(packed, magnitude.numel()), -magnitude, magnitude))


def sum_trits(frames: Sequence[Tensor], count: int, bits: int, out: Tensor) -> None:  # (ceil(count/5),) uint8 each
    """Write the sums of N frames' trits as sum + N, ``bits`` bits each, without gaps."""
    total = torch.zeros(count, dtype=torch.int64, device=out.device)
    for packed in frames:
        total += unpack_trits(packed, count)
    out.copy_(pack_uints(total + len(frames), bits))


def write_levels(parts: Sequence[Tensor], scales: Tensor, packed: Tensor, bits: int, ranks: int) -> bool:
    """The parts become scale * (level - N) / N with one scale each; return whether all levels are at most 2 N."""
    numels = [part.numel() for part in parts]
    levels = unpack_uints(packed, sum(numels), bits)
    _write(parts, block_expand(scales, tuple((numel, 1) for numel in numels)) * (levels - ranks) / ranks)
    return not bool((levels > 2 * ranks).any())
