"""Frames that hold one number an element: signs, trits, levels or floats, each with the dense tail in front."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs.frame import (
    HEADER_NBYTES,
    Decoded,
    Header,
    as_bytes,
    build,
    check_numbers,
    frame_size,
    header_words,
    open_frame,
)
from thinwire.engine.context import ExchangeContext
from thinwire.engine.nonfinite_alarm import QUIET, Alarm
from thinwire.engine.payloads import Signs, SignsOf, Ternary, TernaryDraw
from thinwire.errors import FrameError
from thinwire.kernels import Runs, encode_ternary_frame, on_gpu, sum_trits, write_levels


def count_blocks(blocks: Runs) -> int:
    return sum(count for _, count in blocks)


def count_elements(blocks: Runs) -> int:
    return sum(length * count for length, count in blocks)


def _header(
    context: ExchangeContext, kind: str, numel: int, count: int, tail: Tensor, alarm: Alarm, parameter: int = 0
) -> Header:
    return Header(
        kind,
        numel,
        count,
        tail.numel(),
        context.layout.fingerprint,
        context.step,
        parameter=parameter,
        alarm=alarm.rings,
    )


def _check_count(origin: str, count: int, expected: int) -> None:
    if count != expected:
        raise FrameError(f"bad frame from {origin}: it holds {count} scales, expected {expected}")


class SignsCodec:
    """One bit per element, one fp32 scale per block (none for plain votes)."""

    def nbytes(self, numel: int, num_scales: int, tail: int) -> int:
        return frame_size(4 * tail, 4 * num_scales, -(-numel // 8))

    def encode(
        self,
        context: ExchangeContext,
        payload: Signs | SignsOf,
        tail: Tensor,
        nbytes: int | None = None,
        out: Tensor | None = None,
        alarm: Alarm = QUIET,
    ) -> Tensor:
        header = _header(context, "signs", payload.numel, payload.scales.numel(), tail, alarm)
        bits = payload.packed if isinstance(payload, Signs) else payload
        return build(header, [as_bytes(tail), as_bytes(payload.scales), bits], nbytes, alarm.flag, out)

    def decode(
        self,
        context: ExchangeContext,
        frame: Tensor,
        blocks: Runs,
        num_scales: int,
        tail: int,
        device: torch.device,
        origin: str,
    ) -> Decoded[Signs]:
        numel = count_elements(blocks)
        header, body = open_frame(frame, context, "signs", numel, tail, device, origin)
        _check_count(origin, header.count, num_scales)
        tail_values = body.take_floats(tail, "dense tail")
        scales = body.take_floats(num_scales, "scales")
        packed = body.take(-(-numel // 8), "sign bits")
        body.finish()
        check_numbers([(origin, header.alarm, (tail_values, scales))])
        return Decoded(Signs(packed, scales, blocks), tail_values, header.alarm)


class TernaryCodec:
    """Five trits per byte; one fp32 scale per tensor, or none where all ranks share them."""

    def nbytes(self, numel: int, num_scales: int, tail: int) -> int:
        return frame_size(4 * tail, 4 * num_scales, -(-numel // 5))

    def encode(
        self,
        context: ExchangeContext,
        payload: Ternary | TernaryDraw,
        tail: Tensor,
        with_scales: bool,
        out: Tensor | None = None,
        alarm: Alarm = QUIET,
    ) -> Tensor:
        scales = payload.scales if with_scales else payload.scales[:0]
        header = _header(context, "ternary", payload.numel, scales.numel(), tail, alarm)
        trits: Tensor | TernaryDraw
        if isinstance(payload, Ternary):
            trits = payload.packed
        elif on_gpu(tail.device, payload.numel):
            body = self.nbytes(payload.numel, scales.numel(), tail.numel()) - HEADER_NBYTES
            return encode_ternary_frame(
                header_words(header, body), tail, scales.numel(), payload.parts, payload.scales, payload.keys,
                payload.limits, payload.counters, alarm.flag,
            )  # fmt: skip
        else:
            trits = payload
        return build(header, [as_bytes(tail), as_bytes(scales), trits], flag=alarm.flag, out=out)

    def decode(
        self,
        context: ExchangeContext,
        frame: Tensor,
        blocks: Runs,
        shared: Tensor | None,
        tail: int,
        device: torch.device,
        origin: str,
    ) -> Decoded[Ternary]:
        numel = count_elements(blocks)
        header, body = open_frame(frame, context, "ternary", numel, tail, device, origin)
        num_scales = count_blocks(blocks) if shared is None else 0
        _check_count(origin, header.count, num_scales)
        tail_values = body.take_floats(tail, "dense tail")
        scales = body.take_floats(num_scales, "scales")
        packed = body.take(-(-numel // 5), "trits")
        if packed.numel() and int(packed.max()) >= 243:
            raise FrameError(f"bad frame from {origin}: a byte of trits is above 242")
        body.finish()
        check_numbers([(origin, header.alarm, (tail_values, scales))])
        return Decoded(Ternary(packed, scales if shared is None else shared, blocks), tail_values, header.alarm)


def level_bits(ranks: int) -> int:
    """Return ceil(log2(2 N + 1)): the bits of a sum of N trits."""
    return (2 * ranks).bit_length()


@dataclass(frozen=True)
class _TritSums:
    """The section of a levels frame: the sums of N frames' trits."""

    frames: Sequence[Tensor]  # N of (ceil(n/5),) uint8
    numel: int
    bits: int

    @property
    def nbytes(self) -> int:
        return -(-self.numel * self.bits // 8)

    def write(self, out: Tensor) -> None:
        sum_trits(self.frames, self.numel, self.bits, out)


class LevelsCodec:
    """Sums of N trits, -N .. N, in ceil(log2(2 N + 1)) bits each (TernGrad, section 3.1)."""

    def nbytes(self, numel: int, ranks: int, tail: int) -> int:
        return frame_size(4 * tail, -(-numel * level_bits(ranks) // 8))

    def encode_sums(
        self,
        context: ExchangeContext,
        frames: Sequence[Tensor],
        numel: int,
        tail: Tensor,
        nbytes: int,
        out: Tensor | None = None,
        alarm: Alarm = QUIET,
    ) -> Tensor:
        """The frame of the sums of N packed vectors of ``numel`` trits."""
        bits = level_bits(len(frames))
        header = _header(context, "levels", numel, 0, tail, alarm, parameter=bits)
        return build(header, [as_bytes(tail), _TritSums(frames, numel, bits)], nbytes, alarm.flag, out)

    def decode_mean(
        self,
        context: ExchangeContext,
        frame: Tensor,
        ranks: int,
        tail: int,
        parts: Sequence[Tensor],
        scales: Tensor,
        origin: str,
    ) -> Decoded[None]:  # vectors of float32, one scale each -> (tail,) float32
        """Write scale * level / N to the parts; what is returned has the tail."""
        numel, bits = sum(part.numel() for part in parts), level_bits(ranks)
        header, body = open_frame(frame, context, "levels", numel, tail, scales.device, origin)
        _check_count(origin, header.count, 0)
        if header.parameter != bits:
            raise FrameError(f"bad frame from {origin}: it has {header.parameter} bits a level, expected {bits}")
        tail_values = body.take_floats(tail, "dense tail")
        packed = body.take(-(-numel * bits // 8), "levels")
        body.finish()
        check_numbers([(origin, header.alarm, (tail_values,))])
        if not write_levels(parts, scales, packed, bits, ranks):
            raise FrameError(f"bad frame from {origin}: a level is above {2 * ranks}")
        return Decoded(None, tail_values, header.alarm)


class FloatsCodec:
    """Plain fp32 numbers."""

    def nbytes(self, numel: int, tail: int) -> int:
        return frame_size(4 * tail, 4 * numel)

    def encode(
        self,
        context: ExchangeContext,
        values: Tensor,
        tail: Tensor,
        nbytes: int | None = None,
        out: Tensor | None = None,
        alarm: Alarm = QUIET,
    ) -> Tensor:
        header = _header(context, "dense", values.numel(), 0, tail, alarm)
        return build(header, [as_bytes(tail), as_bytes(values)], nbytes, alarm.flag, out)

    def decode(
        self, context: ExchangeContext, frame: Tensor, numel: int, tail: int, device: torch.device, origin: str
    ) -> Decoded[Tensor]:
        header, body = open_frame(frame, context, "dense", numel, tail, device, origin)
        _check_count(origin, header.count, 0)
        tail_values = body.take_floats(tail, "dense tail")
        values = body.take_floats(numel, "values")
        body.finish()
        check_numbers([(origin, header.alarm, (tail_values, values))])
        return Decoded(values, tail_values, header.alarm)
