"""Values in two bits, one launch each way."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.reference import INT2_CHUNK

_CHUNKS = 4  # that one program codes
_BLOCK = 1024  # values that one program reads


@triton.jit
def _sum_by_halves(x, CHUNKS: tl.constexpr):  # (CHUNKS, 64) -> (CHUNKS,)
    x = tl.sum(tl.reshape(x, (CHUNKS, 2, 32)), axis=1)
    x = tl.sum(tl.reshape(x, (CHUNKS, 2, 16)), axis=1)
    x = tl.sum(tl.reshape(x, (CHUNKS, 2, 8)), axis=1)
    x = tl.sum(tl.reshape(x, (CHUNKS, 2, 4)), axis=1)
    x = tl.sum(tl.reshape(x, (CHUNKS, 2, 2)), axis=1)
    return tl.sum(x, axis=1)


@triton.jit
def _to_bfloat(x, finite):
    bits = x.to(tl.uint32, bitcast=True)
    rounded = tl.minimum((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7F7F)
    return tl.where(finite, rounded, 0x7FC0).to(tl.int16)


@triton.jit
def _encode(values, count, levels, packed, CHUNKS: tl.constexpr):
    first = tl.program_id(0) * CHUNKS
    place = tl.reshape(first * 64 + tl.arange(0, CHUNKS * 64), (CHUNKS, 64))
    inside = place < count
    value = tl.load(values + place, mask=inside, other=0.0)
    magnitude = tl.abs(value)
    exact = magnitude.to(tl.float64)
    chunk = first + tl.arange(0, CHUNKS)
    size = tl.maximum(tl.minimum(count - chunk * 64, 64), 1)
    mean = (_sum_by_halves(exact, CHUNKS) / size.to(tl.float64)).to(tl.float32)
    high = magnitude >= mean[:, None]
    reached = tl.sum(high.to(tl.int32), axis=1)
    below = _sum_by_halves(tl.where(high, 0.0, exact), CHUNKS) / tl.maximum(size - reached, 1).to(tl.float64)
    above = _sum_by_halves(tl.where(high, exact, 0.0), CHUNKS) / tl.maximum(reached, 1).to(tl.float64)
    finite = (mean.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000
    here = chunk * 64 < count
    tl.store(levels + 2 * chunk, _to_bfloat(below.to(tl.float32), finite), mask=here)
    tl.store(levels + 2 * chunk + 1, _to_bfloat(above.to(tl.float32), finite), mask=here)
    code = tl.where(inside, high.to(tl.int32) | ((value < 0).to(tl.int32) << 1), 0)
    fours = tl.reshape(code, (CHUNKS * 16, 4)) << (2 * tl.arange(0, 4))[None, :]
    byte = first * 16 + tl.arange(0, CHUNKS * 16)
    tl.store(packed + byte, tl.sum(fours, axis=1).to(tl.uint8), mask=byte < (count + 3) // 4)


@triton.jit
def _decode(levels, packed, count, out, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    code = tl.load(packed + (i >> 2), mask=inside, other=0).to(tl.int32) >> (2 * (i & 3))
    level = tl.load(levels + 2 * (i >> 6) + (code & 1), mask=inside, other=0).to(tl.int32) << 16
    tl.store(out + i, level ^ ((code & 2) << 30), mask=inside)


def two_bit_encode(values: Tensor) -> tuple[Tensor, Tensor]:  # (k,) float32 -> (C, 2) bfloat16, (ceil(k/4),) uint8
    count, device = values.numel(), values.device
    levels = torch.empty(-(-count // INT2_CHUNK), 2, dtype=torch.int16, device=device)
    packed = torch.empty(-(-count // 4), dtype=torch.uint8, device=device)
    if count:
        grid = (triton.cdiv(count, _CHUNKS * INT2_CHUNK),)
        _encode[grid](values.contiguous(), count, levels, packed, _CHUNKS)
    return levels.view(torch.bfloat16), packed


def two_bit_decode(levels: Tensor, packed: Tensor, count: int) -> Tensor:  # (C, 2), (ceil(k/4),) uint8 -> (k,) float32
    out = torch.empty(count, dtype=torch.int32, device=packed.device)
    if count:
        words = levels.contiguous().view(torch.int16)
        _decode[(triton.cdiv(count, _BLOCK),)](words, packed.contiguous(), count, out, _BLOCK)
    return out.view(torch.float32)
