"""Float values on the wire: fp32, fp16, bf16, int8 with a scale per chunk, int4 and int2 with two numbers per chunk.

What rounding loses stays in the residual.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.codecs.frame import Body, as_bytes
from thinwire.kernels import (
    INT2_CHUNK,
    INT4_CHUNK,
    INT8_CHUNK,
    four_bit_decode,
    four_bit_encode,
    int8_dequantize,
    int8_quantize,
    two_bit_decode,
    two_bit_encode,
)

VALUE_CODES = {"fp32": 0, "fp16": 1, "bf16": 2, "int8": 3, "int4": 4, "int2": 5}
SHARED_SCALES = ("int8", "int4", "int2")
"""Codings whose chunks run across tensors, so that a value depends on what it travels with."""

_HALF_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def value_sections_nbytes(coding: str, count: int) -> list[int]:
    """Return the lengths of the sections that ``encode_values`` makes of ``count`` values."""
    if coding == "int8":
        return [4 * -(-count // INT8_CHUNK), count]
    if coding == "int4":
        return [4 * -(-count // INT4_CHUNK), -(-count // 2)]
    if coding == "int2":
        return [4 * -(-count // INT2_CHUNK), -(-count // 4)]
    return [(4 if coding == "fp32" else 2) * count]


def saturating_half(values: Tensor, dtype: torch.dtype) -> Tensor:  # (k,) float32 -> (k,) fp16 or bf16
    """Round to 16 bits; a finite value beyond the range becomes the largest finite one, inf and nan stay."""
    limit = torch.finfo(dtype).max
    return torch.where(torch.isfinite(values), values.clamp(-limit, limit), values).to(dtype)


def encode_values(
    coding: str, values: Tensor, room: Tensor | None = None
) -> list[Tensor]:  # (k,) float32 -> uint8 sections
    """``room``, (k,) int8, is memory for 8-bit values."""
    if coding == "fp32":
        return [as_bytes(values)]
    if coding == "int8":
        codes, scales = int8_quantize(values, room)
        return [as_bytes(scales), as_bytes(codes)]
    if coding == "int4":
        return [as_bytes(section) for section in four_bit_encode(values)]
    if coding == "int2":
        return [as_bytes(section) for section in two_bit_encode(values)]
    return [as_bytes(saturating_half(values, _HALF_TYPES[coding]))]


def decode_values(coding: str, count: int, body: Body, room: Tensor | None = None) -> Tensor:  # -> (count,) float32
    """``room``, (count,) float32, is memory for 8-bit values; 32-bit ones stay in the frame."""
    sizes = value_sections_nbytes(coding, count)
    if coding == "fp32":
        return body.take(sizes[0], "values").view(torch.float32)
    if coding == "int8":
        scales = body.take(sizes[0], "value scales").view(torch.float32)
        return int8_dequantize(body.take(sizes[1], "values").view(torch.int8), scales, room)
    if coding == "int4":
        ends = body.take(sizes[0], "value ends").view(torch.bfloat16).view(-1, 2)
        return four_bit_decode(ends, body.take(sizes[1], "values"), count)
    if coding == "int2":
        levels = body.take(sizes[0], "value levels").view(torch.bfloat16).view(-1, 2)
        return two_bit_decode(levels, body.take(sizes[1], "values"), count)
    return body.take(sizes[0], "values").view(_HALF_TYPES[coding]).to(torch.float32)
