"""The functions of ``lists`` from the native library, which reads and writes 32-bit indices; int64 are converted."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from thinwire.kernels import native
from thinwire.kernels.lists import Entries
from thinwire.kernels.native import narrow, ready, widened
from thinwire.kernels.reference import INT8_CHUNK


def _room(room: Entries | None, capacity: int) -> Entries:
    return room if room is not None else Entries(torch.empty(2 * capacity, dtype=torch.int32))


def _cut(room: Entries, count: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """The first so many entries, with indices of the type of the given ones."""
    return widened(room.indices[:count], like), room.values[:count]


def take_at(x: Tensor, indices: Tensor, out: Tensor | None = None) -> Tensor:
    x, places = ready(x, torch.float32), narrow(indices)
    out = out if out is not None else torch.empty(places.numel(), dtype=torch.float32)
    assert out.numel() == places.numel()
    native.lib().tw_take_at(x.data_ptr(), places.data_ptr(), places.numel(), out.data_ptr())
    return out


def keep_largest(indices: Tensor, values: Tensor, k: int, room: Entries | None = None) -> tuple[Tensor, Tensor]:
    count = indices.numel()
    if k >= count:
        return indices, values
    places, values, room = narrow(indices), ready(values, torch.float32), _room(room, k)
    assert room.capacity >= k
    native.lib().tw_keep_largest(
        places.data_ptr(), values.data_ptr(), count, k, room.indices.data_ptr(), room.values.data_ptr()
    )
    return _cut(room, k, indices)


def keep_masked(indices: Tensor, values: Tensor, mask: Tensor, room: Entries | None = None) -> tuple[Tensor, Tensor]:
    places, values, mask = narrow(indices), ready(values, torch.float32), ready(mask, torch.bool)
    room = _room(room, places.numel())
    assert room.capacity >= places.numel() == mask.numel()
    count = native.lib().tw_keep_masked(
        places.data_ptr(), values.data_ptr(), mask.data_ptr(), places.numel(), room.indices.data_ptr(),
        room.values.data_ptr(),
    )  # fmt: skip
    return _cut(room, count, indices)


def mask_contained(mask: Tensor, wanted: Tensor, indices: Tensor) -> None:
    assert mask.dtype == torch.bool and mask.is_contiguous() and mask.numel() == wanted.numel()
    wanted, indices = narrow(wanted), narrow(indices)
    native.lib().tw_mask_contained(
        wanted.data_ptr(), wanted.numel(), indices.data_ptr(), indices.numel(), mask.data_ptr()
    )


def merge_topk(
    a: Tensor, a_values: Tensor, b: Tensor, b_values: Tensor, k: int, room: Entries | None = None
) -> tuple[Tensor, Tensor]:
    like, both = a, a.numel() + b.numel()
    a, b = narrow(a), narrow(b)
    a_values, b_values = ready(a_values, torch.float32), ready(b_values, torch.float32)
    room = _room(room, max(min(k, both), -(-both // 2)))
    assert room.capacity >= min(k, both) and 2 * room.capacity >= both
    count = native.lib().tw_merge_topk(
        a.data_ptr(), a_values.data_ptr(), a.numel(), b.data_ptr(), b_values.data_ptr(), b.numel(), k,
        room.memory.data_ptr(), room.indices.data_ptr(), room.values.data_ptr(),
    )  # fmt: skip
    return _cut(room, count, like)


def int8_quantize(values: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    values, count = ready(values, torch.float32), values.numel()
    codes = out if out is not None else torch.empty(count, dtype=torch.int8)
    assert codes.numel() == count
    scales = torch.empty(-(-count // INT8_CHUNK), dtype=torch.float32)
    native.lib().tw_int8_quantize(values.data_ptr(), count, codes.data_ptr(), scales.data_ptr())
    return codes, scales


def int8_dequantize(codes: Tensor, scales: Tensor, out: Tensor | None = None) -> Tensor:
    codes, scales = ready(codes, torch.int8), ready(scales, torch.float32)
    out = out if out is not None else torch.empty(codes.numel(), dtype=torch.float32)
    assert out.numel() == codes.numel() <= INT8_CHUNK * scales.numel()
    native.lib().tw_int8_dequantize(codes.data_ptr(), scales.data_ptr(), codes.numel(), out.data_ptr())
    return out


def rice_unary_bits_of(indices: Tensor, parameters: range) -> list[int]:
    places, out = narrow(indices), (ctypes.c_int64 * len(parameters))()
    assert parameters.step == 1, "the library takes neighbours"
    native.lib().tw_rice_unary_bits_of(places.data_ptr(), places.numel(), parameters.start, len(parameters), out)
    return list(out)


def rice_write(indices: Tensor, parameter: int, low: Tensor, unary: Tensor) -> None:
    places = narrow(indices)
    assert low.numel() == -(-places.numel() * parameter // 8) and unary.is_contiguous() and low.is_contiguous()
    unary.zero_()
    native.lib().tw_rice_encode_of(places.data_ptr(), places.numel(), parameter, low.data_ptr(), unary.data_ptr())
