"""Golomb-Rice codes of gaps between rising indices, natively."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.kernels.native import library
from thinwire.kernels.native.library import I32, narrow, pointers
from thinwire.kernels.reference import RiceStream


def rice_indices(
    streams: Sequence[RiceStream], numel: int, outs: Sequence[Tensor] | None = None
) -> list[tuple[Tensor, int]]:
    low = [stream.low.contiguous() for stream in streams]  # held until the call is done
    unary = [stream.unary.contiguous() for stream in streams]
    (lows, low_nbytes), (unaries, unary_nbytes) = pointers(low), pointers(unary)
    wide = outs is None
    indices = [torch.empty(stream.count, dtype=torch.int64) for stream in streams] if outs is None else outs
    assert [out.numel() for out in indices] == [stream.count for stream in streams]
    places, counts = pointers(indices)
    parameters, faults = (I32 * len(streams))(*(stream.parameter for stream in streams)), (I32 * len(streams))()
    library.lib().tw_rice_indices(
        len(streams), lows, low_nbytes, unaries, unary_nbytes, counts, parameters, numel, places, wide, faults,
        library.threads(),
    )  # fmt: skip
    return list(zip(indices, faults, strict=True))


def rice_unary_bits_of(indices: Tensor, parameters: range) -> list[int]:
    places, out = narrow(indices), (ctypes.c_int64 * len(parameters))()
    assert parameters.step == 1, "the library takes neighbours"
    library.lib().tw_rice_unary_bits_of(places.data_ptr(), places.numel(), parameters.start, len(parameters), out)
    return list(out)


def rice_write(indices: Tensor, parameter: int, low: Tensor, unary: Tensor) -> None:
    places = narrow(indices)
    assert low.numel() == -(-places.numel() * parameter // 8) and unary.is_contiguous() and low.is_contiguous()
    unary.zero_()
    library.lib().tw_rice_encode_of(places.data_ptr(), places.numel(), parameter, low.data_ptr(), unary.data_ptr())
