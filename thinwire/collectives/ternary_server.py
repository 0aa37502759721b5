"""The server of TernGrad: sums of trits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thinwire.codecs import FloatsCodec, LevelsCodec, TernaryCodec
from thinwire.codecs.frame import Decoded
from thinwire.collectives.server import Server, decode_frames, read_floats
from thinwire.collectives.serving_shards import Shard, piece_scales
from thinwire.engine.context import ExchangeContext
from thinwire.engine.layout import Layout
from thinwire.engine.nonfinite_alarm import Alarm
from thinwire.engine.payloads import TernaryDraw
from thinwire.engine.traffic_plan import Budget, share


class TernaryServer(Server):
    """TernGrad's server: adds trits, answers in ceil(log2(2N+1)) bits when scalers are shared, else in fp32."""

    def __init__(self, topology: str, share_scaler: bool) -> None:
        super().__init__(topology)
        self.share_scaler = share_scaler

    def planned_push(self, layout: Layout, budget: Budget, servers: int) -> int:
        scales = 0 if self.share_scaler else budget.scales
        return TernaryCodec().nbytes(share(layout.coded_numel, servers), scales, share(layout.tail_numel, servers))

    def planned_reply(self, layout: Layout, budget: Budget, servers: int, size: int) -> int:
        coded, tail = share(layout.coded_numel, servers), share(layout.tail_numel, servers)
        return LevelsCodec().nbytes(coded, size, tail) if self.share_scaler else FloatsCodec().nbytes(coded, tail)

    def push_nbytes(self, layout: Layout, shard: Shard) -> int:
        return TernaryCodec().nbytes(shard.numel, 0 if self.share_scaler else len(shard.pieces), shard.tail_numel)

    def push(
        self,
        context: ExchangeContext,
        payload: TernaryDraw,
        shard: Shard,
        tail: Tensor,
        alarm: Alarm,
        out: Tensor | None,
    ) -> Tensor:
        part = payload.cut([(piece.place, piece.start, piece.stop) for piece in shard.pieces])
        return TernaryCodec().encode(context, part, tail, with_scales=not self.share_scaler, out=out, alarm=alarm)

    def reply_nbytes(self, shard: Shard, size: int) -> int:
        if self.share_scaler:
            return LevelsCodec().nbytes(shard.numel, size, shard.tail_numel)
        return FloatsCodec().nbytes(shard.numel, shard.tail_numel)

    def answer(
        self,
        context: ExchangeContext,
        payload: TernaryDraw,
        frames: list[Tensor],
        shard: Shard,
        nbytes: int,
        alarm: Alarm,
        out: Tensor | None,
    ) -> tuple[Tensor, Alarm]:
        device, runs = payload.scales.device, shard.piece_runs()
        shared = piece_scales(payload.scales, shard) if self.share_scaler else None
        codec, tail_numel = TernaryCodec(), shard.tail_numel
        given, dense, alarm = decode_frames(
            frames, tail_numel, device, alarm,
            lambda frame, origin: codec.decode(context, frame, runs, shared, tail_numel, device, origin),
        )  # fmt: skip
        dense.div_(len(frames))
        if self.share_scaler:
            packed = [part.packed for part in given]
            return LevelsCodec().encode_sums(context, packed, shard.numel, dense, nbytes, out, alarm), alarm
        total = torch.zeros(shard.numel, dtype=torch.float32, device=device)
        for part in given:
            part.add_to(total)
        return FloatsCodec().encode(context, total.div_(len(frames)), dense, nbytes, out, alarm), alarm

    def read(
        self,
        context: ExchangeContext,
        payload: TernaryDraw,
        frame: Tensor,
        shard: Shard,
        size: int,
        origin: str,
        parts: list[Tensor],
    ) -> Decoded[Any]:
        if not self.share_scaler:
            return read_floats(context, frame, shard, payload.scales.device, origin, parts)
        scales = piece_scales(payload.scales, shard)
        return LevelsCodec().decode_mean(context, frame, size, shard.tail_numel, parts, scales, origin)
