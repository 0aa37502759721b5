"""The server of dist-EF-blockSGDM: signs up, signs down, an error of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire.codecs import FloatsCodec, SignsCodec
from thinwire.codecs.dense import count_blocks
from thinwire.codecs.frame import Decoded
from thinwire.collectives.server import Server, decode_frames, read_floats
from thinwire.collectives.serving_shards import Shard, block_scales, served_by, worker_runs
from thinwire.compressors.blocksign import cut_into_blocks
from thinwire.engine.context import ExchangeContext
from thinwire.engine.layout import Layout
from thinwire.engine.named_state import RESIDUAL, NamedState, StateKind
from thinwire.engine.nonfinite_alarm import Alarm
from thinwire.engine.payloads import Signs, SignsOf
from thinwire.engine.traffic_plan import Budget, share
from thinwire.kernels import add_mean_of_signs, sign_scales, write_signs
from thinwire.memory import RateRatio


class BlockSignServer(Server):
    """dist-EF-blockSGDM's server (Algorithm 4 lines 10-13), two-way: averages, adds its own rescaled error, compresses.

    With ``two_way=False`` it answers in fp32 and has no error.
    """

    kinds: ClassVar[tuple[StateKind, ...]] = (RESIDUAL,)

    def __init__(self, topology: str, block: int | None, two_way: bool) -> None:
        super().__init__(topology)
        self.block, self.two_way = block, two_way
        self.state = NamedState(*self.kinds)
        self.ratio = RateRatio()
        self._starts: dict[str, int] = {}  # first element of the part of each tensor that this rank serves

    def planned_push(self, layout: Layout, budget: Budget, servers: int) -> int:
        runs = [run for s in layout.coded for run in cut_into_blocks(share(s.numel, servers), self.block)]
        coded, tail = share(layout.coded_numel, servers), share(layout.tail_numel, servers)
        return SignsCodec().nbytes(coded, count_blocks(tuple(runs)), tail)

    def planned_reply(self, layout: Layout, budget: Budget, servers: int, size: int) -> int:
        if self.two_way:
            return self.planned_push(layout, budget, servers)
        return FloatsCodec().nbytes(share(layout.coded_numel, servers), share(layout.tail_numel, servers))

    def push_nbytes(self, layout: Layout, shard: Shard) -> int:
        runs = worker_runs(shard, self.block)
        return SignsCodec().nbytes(shard.numel, count_blocks(runs), shard.tail_numel)

    def push(
        self,
        context: ExchangeContext,
        payload: Signs | SignsOf,
        shard: Shard,
        tail: Tensor,
        alarm: Alarm,
        out: Tensor | None,
    ) -> Tensor:
        runs = worker_runs(shard, self.block)
        scales = block_scales(payload.scales, shard, self.block, context.layout)
        part = payload.cut([piece.span for piece in shard.pieces], scales, runs)
        return SignsCodec().encode(context, part, tail, out=out, alarm=alarm)

    def reply_nbytes(self, shard: Shard, size: int) -> int:
        if not self.two_way:
            return FloatsCodec().nbytes(shard.numel, shard.tail_numel)
        return SignsCodec().nbytes(shard.numel, count_blocks(shard.server_runs(self.block)), shard.tail_numel)

    def answer(
        self,
        context: ExchangeContext,
        payload: Signs | SignsOf,
        frames: list[Tensor],
        shard: Shard,
        nbytes: int,
        alarm: Alarm,
        out: Tensor | None,
    ) -> tuple[Tensor, Alarm]:
        runs = worker_runs(shard, self.block)
        device, num_scales = payload.scales.device, count_blocks(runs)
        codec, tail_numel = SignsCodec(), shard.tail_numel
        given, dense, alarm = decode_frames(
            frames, tail_numel, device, alarm,
            lambda frame, origin: codec.decode(context, frame, runs, num_scales, tail_numel, device, origin),
        )  # fmt: skip
        dense.div_(len(frames))
        signs = [(one.packed, one.scales) for one in given]
        if not self.two_way:
            total = torch.zeros(shard.numel, dtype=torch.float32, device=device)
            add_mean_of_signs(total, signs, runs)
            return FloatsCodec().encode(context, total, dense, nbytes, out, alarm), alarm
        error = self.state.flat("residual", shard.layout, device)
        self._starts.update({piece.segment.name: piece.start for piece in shard.pieces})
        served = shard.context(context)
        ratios = self.ratio.begin(served, error)
        for segment, ratio in zip(served.layout.segments, ratios, strict=True):
            error[segment.span].mul_(ratio)
        add_mean_of_signs(error, signs, runs)
        blocks = shard.server_runs(self.block)
        sent = SignsOf((error,), sign_scales(error, blocks), blocks)
        reply = SignsCodec().encode(context, sent, dense, nbytes, out, alarm)
        sent.subtract_from(error)
        self.ratio.end(error)
        return reply, alarm

    def read(
        self,
        context: ExchangeContext,
        payload: Signs | SignsOf,
        frame: Tensor,
        shard: Shard,
        size: int,
        origin: str,
        parts: list[Tensor],
    ) -> Decoded[Any]:
        device = payload.scales.device
        if not self.two_way:
            return read_floats(context, frame, shard, device, origin, parts)
        blocks = shard.server_runs(self.block)
        decoded = SignsCodec().decode(context, frame, blocks, count_blocks(blocks), shard.tail_numel, device, origin)
        write_signs(parts, decoded.content.packed, decoded.content.scales, blocks)
        return decoded

    def copy_of(self, name: str) -> Any:
        return self.state.copy_of(name), self.ratio.rates.get(name)

    def put_back(self, name: str, copies: Any) -> None:
        vectors, rate = copies
        self.state.put_back(name, vectors)
        self.ratio.put_back(name, rate)

    def served(self, numels: Mapping[str, int], rank: int, size: int) -> dict[str, tuple[int, int]]:
        return served_by(numels, rank, size, self.topology) if self.two_way else {}

    def residual_square_sum(self) -> float:
        return self.state.square_sum()

    def leftover(self, rates: dict[str, float]) -> Iterable[tuple[str, int, Tensor]]:
        for name, error in self.state.named["residual"].items():
            yield name, self._starts[name], error * self.ratio.rescale(name, rates[name])

    def state_dict(self) -> dict[str, Any]:
        return {**self.state.state_dict(), "rates": dict(self.ratio.rates), "starts": dict(self._starts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state.load_state_dict(state)
        self.ratio.rates = dict(state.get("rates", {}))
        self._starts = dict(state.get("starts", {}))
