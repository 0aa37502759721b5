"""The functions of ``serving`` from the native library: chunk by chunk in the cache, without a vector in between."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from thinwire.kernels import cpu
from thinwire.kernels.cpu import _int64s, _pointers, _ready, _threads
from thinwire.kernels.reference import Runs


@lru_cache(maxsize=256)
def _table(runs: Runs) -> tuple[int, Any, Any]:
    """How many runs, their lengths and their counts, as the library reads them."""
    return len(runs), _int64s([length for length, _ in runs]), _int64s([count for _, count in runs])


def sign_scales(x: Tensor, runs: Runs) -> Tensor:
    x = _ready(x, torch.float32)
    scales = torch.empty(sum(count for _, count in runs))
    cpu._lib().tw_blockwise_sign(x.data_ptr(), *_table(runs), None, scales.data_ptr(), _threads())
    return scales


def pack_signs(parts: Sequence[Tensor], out: Tensor) -> None:
    parts = [_ready(part, torch.float32) for part in parts]
    assert out.is_contiguous() and out.numel() == -(-sum(part.numel() for part in parts) // 8)
    cpu._lib().tw_pack_signs(len(parts), *_pointers(parts), out.data_ptr(), _threads())


def subtract_own_signs(x: Tensor, scales: Tensor, runs: Runs) -> None:
    assert x.dtype == torch.float32 and x.is_contiguous()
    scales = _ready(scales, torch.float32)
    cpu._lib().tw_subtract_own_signs(x.data_ptr(), scales.data_ptr(), *_table(runs), _threads())


def add_mean_of_signs(out: Tensor, frames: Sequence[tuple[Tensor, Tensor]], runs: Runs) -> None:
    assert out.dtype == torch.float32 and out.is_contiguous()
    bits = [own.contiguous() for own, _ in frames]  # held until the call is done
    scales = [_ready(own, torch.float32) for _, own in frames]
    cpu._lib().tw_add_mean_of_signs(
        out.data_ptr(), len(frames), _pointers(bits)[0], _pointers(scales)[0], *_table(runs), _threads()
    )  # fmt: skip


def write_signs(parts: Sequence[Tensor], packed: Tensor, scales: Tensor, runs: Runs) -> None:
    _check_outputs(parts)
    packed, scales = packed.contiguous(), _ready(scales, torch.float32)
    cpu._lib().tw_write_signs(
        len(parts), *_pointers(parts), packed.data_ptr(), scales.data_ptr(), *_table(runs), _threads()
    )


def sum_trits(frames: Sequence[Tensor], count: int, bits: int, out: Tensor) -> None:
    assert out.is_contiguous() and out.numel() == -(-count * bits // 8)
    frames = [frame.contiguous() for frame in frames]  # held until the call is done
    cpu._lib().tw_sum_trits(len(frames), _pointers(frames)[0], count, bits, out.data_ptr(), _threads())


def write_levels(parts: Sequence[Tensor], scales: Tensor, packed: Tensor, bits: int, ranks: int) -> bool:
    _check_outputs(parts)
    packed, scales = packed.contiguous(), _ready(scales, torch.float32)
    right: int = cpu._lib().tw_write_levels(
        len(parts), *_pointers(parts), scales.data_ptr(), packed.data_ptr(), bits, ranks, _threads()
    )
    return right == 1


def _check_outputs(parts: Sequence[Tensor]) -> None:
    assert all(part.dtype == torch.float32 and part.is_contiguous() for part in parts)
