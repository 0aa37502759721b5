"""Frames that hold one number an element: signs, trits, levels or floats, each with the dense tail in front."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.codecs.frame import HEADER_NBYTES, Header, as_bytes, build, frame_size, header_words, open_frame
from thinwire.errors import FrameError
from thinwire.kernels import Runs, encode_ternary_frame, on_gpu, pack_uints, unpack_uints
from thinwire.layout import Turn
from thinwire.payloads import Signs, Ternary, TernaryDraw


def count_blocks(blocks: Runs) -> int:
    return sum(count for _, count in blocks)


def count_elements(blocks: Runs) -> int:
    return sum(length * count for length, count in blocks)


def _header(turn: Turn, kind: str, numel: int, count: int, tail: Tensor, parameter: int = 0) -> Header:
    return Header(
        kind,
        numel,
        count,
        tail.numel(),
        turn.layout.fingerprint,
        turn.step,
        parameter=parameter,
        alarm=turn.alarm.rings,
    )


def _check_count(origin: str, count: int, expected: int) -> None:
    if count != expected:
        raise FrameError(f"bad frame from {origin}: it holds {count} scales, expected {expected}")


class SignsCodec:
    """One bit an element, one fp32 scale a block (none for plain votes)."""

    def nbytes(self, numel: int, num_scales: int, tail: int) -> int:
        return frame_size(4 * tail, 4 * num_scales, -(-numel // 8))

    def encode(self, turn: Turn, payload: Signs, tail: Tensor, nbytes: int | None = None) -> Tensor:
        header = _header(turn, "signs", payload.numel, payload.scales.numel(), tail)
        return build(header, [as_bytes(tail), as_bytes(payload.scales), payload.packed], nbytes, turn.alarm.flag)

    def decode(
        self, turn: Turn, frame: Tensor, blocks: Runs, num_scales: int, tail: int, device: torch.device, origin: str
    ) -> tuple[Signs, Tensor]:
        numel = count_elements(blocks)
        header, body = open_frame(frame, turn, "signs", numel, tail, device, origin)
        _check_count(origin, header.count, num_scales)
        tail_values = body.take_floats(tail, "dense tail")
        scales = body.take_floats(num_scales, "scales")
        packed = body.take(-(-numel // 8), "sign bits")
        body.finish()
        return Signs(packed, scales, blocks), tail_values


class TernaryCodec:
    """Five trits a byte; one fp32 scale a tensor, or none where all ranks share them."""

    def nbytes(self, numel: int, num_scales: int, tail: int) -> int:
        return frame_size(4 * tail, 4 * num_scales, -(-numel // 5))

    def encode(self, turn: Turn, payload: Ternary | TernaryDraw, tail: Tensor, with_scales: bool) -> Tensor:
        scales = payload.scales if with_scales else payload.scales[:0]
        header = _header(turn, "ternary", payload.numel, scales.numel(), tail)
        trits: Tensor | TernaryDraw
        if isinstance(payload, Ternary):
            trits = payload.packed
        elif on_gpu(tail.device) and payload.numel < 1 << 31:
            body = self.nbytes(payload.numel, scales.numel(), tail.numel()) - HEADER_NBYTES
            return encode_ternary_frame(
                header_words(header, body), tail, scales.numel(), payload.parts, payload.scales, payload.keys,
                payload.limits, payload.counters, turn.alarm.flag,
            )  # fmt: skip
        else:
            trits = payload
        return build(header, [as_bytes(tail), as_bytes(scales), trits], flag=turn.alarm.flag)

    def decode(
        self,
        turn: Turn,
        frame: Tensor,
        blocks: Runs,
        shared: Tensor | None,
        tail: int,
        device: torch.device,
        origin: str,
    ) -> tuple[Ternary, Tensor]:
        numel = count_elements(blocks)
        header, body = open_frame(frame, turn, "ternary", numel, tail, device, origin)
        num_scales = count_blocks(blocks) if shared is None else 0
        _check_count(origin, header.count, num_scales)
        tail_values = body.take_floats(tail, "dense tail")
        scales = body.take_floats(num_scales, "scales")
        packed = body.take(-(-numel // 5), "trits")
        if bool((packed >= 243).any()):
            raise FrameError(f"bad frame from {origin}: a byte of trits is above 242")
        body.finish()
        return Ternary(packed, scales if shared is None else shared, blocks), tail_values


def level_bits(ranks: int) -> int:
    """Return ceil(log2(2 N + 1)): the bits of a sum of N trits."""
    return (2 * ranks).bit_length()


class LevelsCodec:
    """Sums of N trits, -N .. N, in ceil(log2(2 N + 1)) bits each (TernGrad, section 3.1)."""

    def nbytes(self, numel: int, ranks: int, tail: int) -> int:
        return frame_size(4 * tail, -(-numel * level_bits(ranks) // 8))

    def encode(self, turn: Turn, levels: Tensor, ranks: int, tail: Tensor, nbytes: int) -> Tensor:  # levels: (n,) int
        bits = level_bits(ranks)
        header = _header(turn, "levels", levels.numel(), 0, tail, parameter=bits)
        return build(
            header, [as_bytes(tail), pack_uints(levels.to(torch.int64) + ranks, bits)], nbytes, turn.alarm.flag
        )

    def decode(
        self, turn: Turn, frame: Tensor, numel: int, ranks: int, tail: int, device: torch.device, origin: str
    ) -> tuple[Tensor, Tensor]:  # -> (numel,) int64, (tail,) float32
        header, body = open_frame(frame, turn, "levels", numel, tail, device, origin)
        _check_count(origin, header.count, 0)
        bits = level_bits(ranks)
        if header.parameter != bits:
            raise FrameError(f"bad frame from {origin}: it has {header.parameter} bits a level, expected {bits}")
        tail_values = body.take_floats(tail, "dense tail")
        levels = unpack_uints(body.take(-(-numel * bits // 8), "levels"), numel, bits)
        if bool((levels > 2 * ranks).any()):
            raise FrameError(f"bad frame from {origin}: a level is above {2 * ranks}")
        body.finish()
        return levels - ranks, tail_values


class FloatsCodec:
    """Plain fp32 numbers."""

    def nbytes(self, numel: int, tail: int) -> int:
        return frame_size(4 * tail, 4 * numel)

    def encode(self, turn: Turn, values: Tensor, tail: Tensor, nbytes: int | None = None) -> Tensor:
        header = _header(turn, "dense", values.numel(), 0, tail)
        return build(header, [as_bytes(tail), as_bytes(values)], nbytes, turn.alarm.flag)

    def decode(
        self, turn: Turn, frame: Tensor, numel: int, tail: int, device: torch.device, origin: str
    ) -> tuple[Tensor, Tensor]:
        header, body = open_frame(frame, turn, "dense", numel, tail, device, origin)
        _check_count(origin, header.count, 0)
        tail_values = body.take_floats(tail, "dense tail")
        values = body.take_floats(numel, "values")
        body.finish()
        return values, tail_values
