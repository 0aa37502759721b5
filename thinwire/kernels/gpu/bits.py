"""Small device functions on the bits of floats and masks."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def bits_of(x):
    """The magnitude as an integer that is ordered in the same way; a nan is the largest."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def popcount(w):
    w = w.to(tl.uint32, bitcast=True)
    w = w - ((w >> 1) & 0x55555555)
    w = (w & 0x33333333) + ((w >> 2) & 0x33333333)
    w = (w + (w >> 4)) & 0x0F0F0F0F
    return ((w * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def pack(mask, TILE: tl.constexpr):
    bits = tl.reshape(mask.to(tl.uint32), (TILE // 32, 32)) << tl.arange(0, 32)[None, :].to(tl.uint32)
    return tl.sum(bits, axis=1).to(tl.int32, bitcast=True)
