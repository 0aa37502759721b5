"""Values in few bits, natively."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.kernels.native import library
from thinwire.kernels.native.library import U32, int64s, pointers, ready, run_table
from thinwire.kernels.native.packing import unpack_bits
from thinwire.kernels.reference import INT8_CHUNK, Runs, scalers_of


def moments(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:  # -> (T,) float32 both
    parts = [ready(part, torch.float32) for part in parts]
    deviations, largest = (torch.empty(len(parts), dtype=torch.float32) for _ in range(2))
    library.lib().tw_moments(len(parts), *pointers(parts), deviations.data_ptr(), largest.data_ptr(), library.threads())
    return deviations, largest


def clipped_scalers(parts: Sequence[Tensor], clip_sigma: float | None) -> tuple[Tensor, Tensor | None]:
    return scalers_of(*moments(parts), clip_sigma)


def ternarize_packed(
    parts: Sequence[Tensor],
    scales: Tensor,
    keys: Sequence[int],
    limits: Tensor | None = None,
    counters: Sequence[int] | None = None,
    out: Tensor | None = None,
) -> Tensor:  # T vectors, (T,) float32 -> (ceil(n/5),) uint8
    parts = [ready(part, torch.float32) for part in parts]
    scales = ready(scales, torch.float32)
    if limits is None:
        limits = torch.full((len(parts),), float("inf"), dtype=torch.float32)
    caps = ready(limits, torch.float32)
    nbytes = -(-sum(part.numel() for part in parts) // 5)
    if out is None:
        out = torch.empty(nbytes, dtype=torch.uint8)
    assert out.numel() == nbytes and out.is_contiguous()
    library.lib().tw_ternarize_packed(
        len(parts), *pointers(parts), scales.data_ptr(), caps.data_ptr(), (U32 * len(keys))(*keys),
        int64s(counters if counters is not None else [0] * len(parts)), out.data_ptr(), library.threads(),
    )  # fmt: skip
    return out


def blockwise_sign(x: Tensor, runs: Runs) -> tuple[Tensor, Tensor]:  # (n,) float32 -> (n,) bool, (B,) float32
    x = ready(x, torch.float32)
    negative = torch.empty(x.numel(), dtype=torch.bool)
    scales = torch.empty(sum(count for _, count in runs), dtype=torch.float32)
    library.lib().tw_blockwise_sign(
        x.data_ptr(), *run_table(runs), negative.data_ptr(), scales.data_ptr(), library.threads()
    )
    return negative, scales


def add_signs(out: Tensor, bits: Tensor, scales: Tensor, runs: Runs, factor: float) -> None:
    negative = bits if bits.dtype == torch.bool else unpack_bits(bits, out.numel())
    negative, scales = ready(negative, torch.bool), ready(scales, torch.float32)
    library.lib().tw_add_signs(
        out.data_ptr(), negative.data_ptr(), scales.data_ptr(), *run_table(runs), factor, library.threads()
    )


def int8_quantize(values: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    values, count = ready(values, torch.float32), values.numel()
    codes = out if out is not None else torch.empty(count, dtype=torch.int8)
    assert codes.numel() == count
    scales = torch.empty(-(-count // INT8_CHUNK), dtype=torch.float32)
    library.lib().tw_int8_quantize(values.data_ptr(), count, codes.data_ptr(), scales.data_ptr())
    return codes, scales


def int8_dequantize(codes: Tensor, scales: Tensor, out: Tensor | None = None) -> Tensor:
    codes, scales = ready(codes, torch.int8), ready(scales, torch.float32)
    out = out if out is not None else torch.empty(codes.numel(), dtype=torch.float32)
    assert out.numel() == codes.numel() <= INT8_CHUNK * scales.numel()
    library.lib().tw_int8_dequantize(codes.data_ptr(), scales.data_ptr(), codes.numel(), out.data_ptr())
    return out
