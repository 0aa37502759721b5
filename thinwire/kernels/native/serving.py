"""What a server does with signs and trits, natively: chunk by chunk in the cache, without a vector in between."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.kernels.native import library
from thinwire.kernels.native.library import pointers, ready, run_table
from thinwire.kernels.reference import Runs


def sign_scales(x: Tensor, runs: Runs) -> Tensor:
    x = ready(x, torch.float32)
    scales = torch.empty(sum(count for _, count in runs), dtype=torch.float32)
    library.lib().tw_blockwise_sign(x.data_ptr(), *run_table(runs), None, scales.data_ptr(), library.threads())
    return scales


def pack_signs(parts: Sequence[Tensor], out: Tensor) -> None:
    parts = [ready(part, torch.float32) for part in parts]
    assert out.is_contiguous() and out.numel() == -(-sum(part.numel() for part in parts) // 8)
    library.lib().tw_pack_signs(len(parts), *pointers(parts), out.data_ptr(), library.threads())


def subtract_own_signs(x: Tensor, scales: Tensor, runs: Runs) -> None:
    assert x.dtype == torch.float32 and x.is_contiguous()
    scales = ready(scales, torch.float32)
    library.lib().tw_subtract_own_signs(x.data_ptr(), scales.data_ptr(), *run_table(runs), library.threads())


def add_mean_of_signs(out: Tensor, frames: Sequence[tuple[Tensor, Tensor]], runs: Runs) -> None:
    assert out.dtype == torch.float32 and out.is_contiguous()
    bits = [own.contiguous() for own, _ in frames]  # held until the call is done
    scales = [ready(own, torch.float32) for _, own in frames]
    library.lib().tw_add_mean_of_signs(
        out.data_ptr(), len(frames), pointers(bits)[0], pointers(scales)[0], *run_table(runs), library.threads()
    )  # fmt: skip


def write_signs(parts: Sequence[Tensor], packed: Tensor, scales: Tensor, runs: Runs) -> None:
    _check_outputs(parts)
    packed, scales = packed.contiguous(), ready(scales, torch.float32)
    library.lib().tw_write_signs(
        len(parts), *pointers(parts), packed.data_ptr(), scales.data_ptr(), *run_table(runs), library.threads()
    )


def sum_trits(frames: Sequence[Tensor], count: int, bits: int, out: Tensor) -> None:
    assert out.is_contiguous() and out.numel() == -(-count * bits // 8)
    frames = [frame.contiguous() for frame in frames]  # held until the call is done
    library.lib().tw_sum_trits(len(frames), pointers(frames)[0], count, bits, out.data_ptr(), library.threads())


def write_levels(parts: Sequence[Tensor], scales: Tensor, packed: Tensor, bits: int, ranks: int) -> bool:
    _check_outputs(parts)
    packed, scales = packed.contiguous(), ready(scales, torch.float32)
    right: int = library.lib().tw_write_levels(
        len(parts), *pointers(parts), scales.data_ptr(), packed.data_ptr(), bits, ranks, library.threads()
    )
    return right == 1


def _check_outputs(parts: Sequence[Tensor]) -> None:
    assert all(part.dtype == torch.float32 and part.is_contiguous() for part in parts)
