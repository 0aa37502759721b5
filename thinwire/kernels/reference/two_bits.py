"""Values in two bits: a sign, and whether the magnitude reaches the mean of its chunk.

What travels of a chunk besides is the mean of the magnitudes below that mean, and of those that reach it. Chunks are
short because the levels must fit them: with 64 of every 4,096 elements, each chunk of the choice has levels of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

INT2_CHUNK = 64
_NAN = 0x7FC0  # as a bfloat16
_SIGN = -(1 << 31)  # as a float32


def two_bit_encode(values: Tensor) -> tuple[Tensor, Tensor]:  # (k,) float32 -> (C, 2) bfloat16, (ceil(k/4),) uint8
    """Return every chunk's two levels, the lower one first, and four codes a byte, the first in the lowest bits.

    A code's lower bit says that the magnitude reaches the mean, the higher one that the value is negative. The level of
    none is 0. A chunk that holds an inf or a nan gets levels of nan, so that it decodes to nan and is seen.
    """
    count = values.numel()
    chunks = -(-count // INT2_CHUNK)
    if not chunks:
        return values.new_zeros(0, 2, dtype=torch.bfloat16), values.new_zeros(0, dtype=torch.uint8)
    padded = torch.nn.functional.pad(values, (0, chunks * INT2_CHUNK - count)).view(chunks, INT2_CHUNK)
    magnitude = padded.abs()
    exact = magnitude.to(torch.float64)
    sizes = exact.new_full((chunks,), INT2_CHUNK)
    sizes[-1:].fill_(count - INT2_CHUNK * (chunks - 1))
    mean = (_sum_by_halves(exact) / sizes).to(torch.float32)
    high = magnitude >= mean[:, None]
    reached = high.sum(dim=1)
    counts = torch.stack([sizes - reached, reached], dim=1).clamp(min=1)  # filling counts only where all values are 0
    none = torch.zeros_like(exact)
    sums = torch.stack(
        [_sum_by_halves(torch.where(high, none, exact)), _sum_by_halves(torch.where(high, exact, none))], dim=1
    )
    levels = (sums / counts).to(torch.float32)
    levels = levels.clamp(max=torch.finfo(torch.bfloat16).max).to(torch.bfloat16)  # beyond it they would be infinite
    # As bits: torch's own conversions make nans of several kinds.
    levels = torch.where(mean.isfinite()[:, None], levels.view(torch.int16), _NAN).view(torch.bfloat16)
    codes = (high.to(torch.uint8) | (padded < 0).to(torch.uint8) << 1).flatten()[:count]
    fours = torch.nn.functional.pad(codes, (0, -count % 4)).view(-1, 4)
    return levels, fours[:, 0] | fours[:, 1] << 2 | fours[:, 2] << 4 | fours[:, 3] << 6


def two_bit_decode(levels: Tensor, packed: Tensor, count: int) -> Tensor:  # (C, 2), (ceil(k/4),) uint8 -> (k,) float32
    """Undo two_bit_encode: the level that the lower bit names, negative where the higher bit is set."""
    # As bits: devices differ in which nan they make of a negated one.
    chunks, wide = levels.shape[0], levels.contiguous().view(torch.int16).to(torch.int32) << 16
    codes = packed.new_zeros(chunks * INT2_CHUNK // 4, 4, dtype=torch.int64)
    for place in range(4):
        codes[: packed.numel(), place] = packed >> (2 * place) & 3
    both = torch.cat([wide, wide ^ _SIGN], dim=1)
    return both.gather(1, codes.view(chunks, INT2_CHUNK)).flatten()[:count].view(torch.float32)


def _sum_by_halves(x: Tensor) -> Tensor:  # (C, 64) float64 -> (C,)
    """The sum in an order that rounds alike everywhere: the second half is added to the first until one is left."""
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        x = x[:, :half] + x[:, half:]
    return x[:, 0]
