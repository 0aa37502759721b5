"""The server of signSGD: a majority vote of signs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thinwire.codecs import SignsCodec
from thinwire.codecs.dense import count_blocks
from thinwire.codecs.frame import Decoded
from thinwire.collectives.server import Server, decode_frames
from thinwire.collectives.serving_shards import Shard
from thinwire.engine.context import ExchangeContext
from thinwire.engine.layout import Layout
from thinwire.engine.nonfinite_alarm import Alarm
from thinwire.engine.payloads import Signs
from thinwire.engine.traffic_plan import Budget, share
from thinwire.kernels import coins, stream_key, write_signs

VOTE_RANK = 0xFFFFFFFF  # the "rank" whose random stream breaks ties of a vote, wherever it is counted


class VoteServer(Server):
    """signSGD with majority vote: one bit each way; a tie is decided by a fair, reproducible coin."""

    def planned_push(self, layout: Layout, budget: Budget, servers: int) -> int:
        return SignsCodec().nbytes(share(layout.coded_numel, servers), 0, share(layout.tail_numel, servers))

    def planned_reply(self, layout: Layout, budget: Budget, servers: int, size: int) -> int:
        return self.planned_push(layout, budget, servers)

    def push_nbytes(self, layout: Layout, shard: Shard) -> int:
        return SignsCodec().nbytes(shard.numel, 0, shard.tail_numel)

    def push(
        self,
        context: ExchangeContext,
        payload: Signs,
        shard: Shard,
        tail: Tensor,
        alarm: Alarm,
        out: Tensor | None,
    ) -> Tensor:
        bits = payload.cut([piece.span for piece in shard.pieces], payload.scales, shard.piece_runs())
        return SignsCodec().encode(context, bits, tail, out=out, alarm=alarm)

    def reply_nbytes(self, shard: Shard, size: int) -> int:
        return SignsCodec().nbytes(shard.numel, 0, shard.tail_numel)

    def answer(
        self,
        context: ExchangeContext,
        payload: Signs,
        frames: list[Tensor],
        shard: Shard,
        nbytes: int,
        alarm: Alarm,
        out: Tensor | None,
    ) -> tuple[Tensor, Alarm]:
        device, runs = payload.bits.device, shard.piece_runs()
        codec, tail_numel = SignsCodec(), shard.tail_numel
        given, dense, alarm = decode_frames(
            frames, tail_numel, device, alarm,
            lambda frame, origin: codec.decode(context, frame, runs, 0, tail_numel, device, origin),
        )  # fmt: skip
        against = torch.zeros(shard.numel, dtype=torch.int32, device=device)
        for signs in given:
            against += signs.negative
        size = len(frames)
        negative = against * 2 > size
        if size % 2 == 0:
            negative |= (against * 2 == size) & self._coins(context, shard, device)
        vote = Signs(negative, payload.scales, runs)
        return SignsCodec().encode(context, vote, dense.div_(size), nbytes, out, alarm), alarm

    @staticmethod
    def _coins(context: ExchangeContext, shard: Shard, device: torch.device) -> Tensor:  # -> (m,) bool
        return coins(
            [
                (stream_key(0, context.step, VOTE_RANK, piece.segment.name), piece.start, piece.stop - piece.start)
                for piece in shard.pieces
            ],
            device,
        )

    def read(
        self,
        context: ExchangeContext,
        payload: Signs,
        frame: Tensor,
        shard: Shard,
        size: int,
        origin: str,
        parts: list[Tensor],
    ) -> Decoded[Any]:
        device, runs = payload.bits.device, shard.piece_runs()
        decoded = SignsCodec().decode(context, frame, runs, 0, shard.tail_numel, device, origin)
        write_signs(
            parts, decoded.content.packed, torch.ones(count_blocks(runs), dtype=torch.float32, device=device), runs
        )
        return decoded
