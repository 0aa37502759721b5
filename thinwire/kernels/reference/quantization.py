"""Values in few bits: ternary with TernGrad's scalers, signs with a scale per block, and eight bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.kernels.reference.counters import uniform
from thinwire.kernels.reference.packing import pack_trits, unpack_bits
from thinwire.kernels.uploads import once_a_thread, upload

Runs = tuple[tuple[int, int], ...]
"""Consecutive blocks of a vector, run-length coded: (length of a block, how many such blocks follow each other)."""


def moments(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:  # T vectors of float32 -> (T,) float32 both
    """Return each part's population standard deviation and largest magnitude: what TernGrad's clipping and scaler need.

    Both are zero of an empty part; a nan shows in both, an infinity as no deviation (nan) and an infinite magnitude.
    """
    zero = torch.zeros((), dtype=torch.float32, device=parts[0].device if parts else None)
    deviations = [part.std(correction=0) if part.numel() else zero for part in parts]
    largest = [part.abs().max() if part.numel() else zero for part in parts]
    return (torch.stack(deviations), torch.stack(largest)) if parts else (zero[None][:0], zero[None][:0])


ROUNDING = 1e-5  # of the largest magnitude: less than this is no deviation


def scalers_of(deviations: Tensor, largest: Tensor, clip_sigma: float | None) -> tuple[Tensor, Tensor | None]:
    """TernGrad's scaler and clipping limit of every tensor (Eq. 2 and 21), from its moments."""
    if clip_sigma is None:
        return largest, None
    limits = (clip_sigma * deviations).to(torch.float32)
    # One element, or equal ones, deviate by nothing but rounding: clipped at that they would never move.
    limits = torch.where(limits > ROUNDING * largest, limits, largest)
    return torch.minimum(largest, limits), limits


def clipped_scalers(parts: Sequence[Tensor], clip_sigma: float | None) -> tuple[Tensor, Tensor | None]:
    """Return each part's scaler (T,), and its clipping limit (T,) or None where nothing is clipped."""
    return scalers_of(*moments(parts), clip_sigma)


def ternarize(
    x: Tensor, scale: Tensor, key: int, limit: Tensor | None = None, counter: int = 0
) -> Tensor:  # (n,) float32 -> (n,) int8
    """Return sign(x) * b with P(b = 1) = min(|x|, limit) / scale (TernGrad, Eq. 1, 3 and 21), as -1, 0, 1.

    ``counter`` is where x begins in its stream of random numbers: the place of x[0] in its tensor.
    """
    magnitude = x.abs() if limit is None else torch.minimum(x.abs(), limit)
    keep = uniform(key, x.numel(), x.device, counter) * scale < magnitude
    return torch.where(keep, torch.sign(x), 0.0).to(torch.int8)  # a nan is never kept: it shows in the scale


def ternarize_packed(
    parts: Sequence[Tensor],
    scales: Tensor,
    keys: Sequence[int],
    limits: Tensor | None = None,
    counters: Sequence[int] | None = None,
    out: Tensor | None = None,
) -> Tensor:  # T vectors, (T,) float32 -> (ceil(n/5),) uint8
    """``ternarize`` every part with its own scale, random stream and limit, and pack them one behind the other.

    ``counters``, zeros unless given, say where each part begins in its stream; the result goes to ``out`` where given.
    """
    trits = [
        ternarize(
            part, scales[place], keys[place], limits[place] if limits is not None else None,
            counters[place] if counters is not None else 0,
        )
        for place, part in enumerate(parts)
    ]  # fmt: skip
    packed = pack_trits(torch.cat(trits) if trits else torch.zeros(0, dtype=torch.int8, device=scales.device))
    return packed if out is None else out.copy_(packed)


def block_means(x: Tensor, runs: Runs) -> Tensor:  # (n,) float32 -> (B,) float32
    """Return the mean of every block; ``runs`` lists (length, how many blocks of it) in order."""
    means, start = [], 0
    for length, count in runs:
        stop = start + length * count
        means.append(x[start:stop].view(count, length).mean(dim=1))
        start = stop
    return torch.cat(means) if means else x.new_zeros(0)


@once_a_thread(most=1024)
def _block_lengths(runs: Runs, device: torch.device) -> Tensor:  # -> (B,) int64
    lengths = [torch.full((count,), length, dtype=torch.int64) for length, count in runs]
    return upload(torch.cat(lengths) if lengths else torch.zeros(0, dtype=torch.int64), device)


def block_expand(scales: Tensor, runs: Runs) -> Tensor:  # (B,) -> (n,)
    """Return every block's scale repeated over the block."""
    if scales.device.type != "cpu":  # one kernel, where each run's own would cost its launch
        numel = sum(length * count for length, count in runs)
        lengths = _block_lengths(runs, scales.device)
        return torch.repeat_interleave(scales, lengths, output_size=numel)
    parts, start = [], 0
    for length, count in runs:
        parts.append(scales[start : start + count, None].expand(count, length).reshape(-1))
        start += count
    return torch.cat(parts) if parts else scales.new_zeros(0)


def blockwise_sign(x: Tensor, runs: Runs) -> tuple[Tensor, Tensor]:  # (n,) float32 -> (n,) bool, (B,) float32
    """Return (x < 0) and the scales ||x_b||_1 / d_b of consecutive blocks (dist-EF-blockSGDM, section 3.2)."""
    return x < 0, block_means(x.abs(), runs)


def add_signs(
    out: Tensor, bits: Tensor, scales: Tensor, runs: Runs, factor: float
) -> None:  # (n,) float32, (n,) bool or (ceil(n/8),) uint8, (B,) float32
    """out += factor * (-scale where negative, +scale elsewhere), in place; ``bits`` are bool, or packed in bytes."""
    negative = bits if bits.dtype == torch.bool else unpack_bits(bits, out.numel())
    magnitude = block_expand(scales * factor, runs)
    out.add_(torch.where(negative, -magnitude, magnitude))


INT8_CHUNK = 256
_INT8_LARGEST_SCALE = 2.67938838e36  # the largest float32 that 127 times is still finite


def int8_quantize(
    values: Tensor, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:  # (k,) float32 -> (k,) int8, (ceil(k/256),) float32
    """Round each chunk of 256 values to multiples of its largest magnitude / 127.

    A chunk that holds an inf or a nan gets a nan scale, so that it decodes to nan and is seen. ``out``, (k,) int8, is
    memory offered for the codes.
    """
    count = values.numel()
    chunks = -(-count // INT8_CHUNK)
    padded = torch.nn.functional.pad(values, (0, chunks * INT8_CHUNK - count)).view(chunks, INT8_CHUNK)
    # Divided by a tensor: by a plain number, a GPU multiplies with the reciprocal, which rounds differently.
    steps = values.new_full((), 127.0)
    scales = padded.abs().amax(dim=1) / steps if chunks else values.new_zeros(0)
    scales = torch.where(torch.isfinite(scales), scales, float("nan")).clamp(max=_INT8_LARGEST_SCALE)
    # A denormal scale makes the quotient overflow; the clamp keeps such a chunk within +-127.
    divisor = torch.where(scales > 0, scales, torch.ones_like(scales))
    codes = (padded / divisor[:, None]).round_().clamp_(-127, 127)
    return torch.nan_to_num(codes, nan=0.0).to(torch.int8).flatten()[:count], scales


def int8_dequantize(
    codes: Tensor, scales: Tensor, out: Tensor | None = None
) -> Tensor:  # (k,) int8, (ceil(k/256),) float32 -> (k,) float32
    """Undo int8_quantize; ``out``, (k,) float32, is memory offered for the values."""
    return codes.to(torch.float32) * scales.repeat_interleave(INT8_CHUNK)[: codes.numel()]
