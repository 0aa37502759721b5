"""Servers: every rank pushes its payload to whoever serves it, the server averages and answers in compressed form.

``topology="server"`` is one rank that serves all (and works too); ``"sharded"`` lets every rank serve a part, so that
no link carries more than any other: an all-to-all up, an all-gather down.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs import FloatsCodec, LevelsCodec, SignsCodec, TernaryCodec
from thinwire.codecs.dense import count_blocks
from thinwire.collectives.shards import Shard, block_scales, piece_scales, shards, worker_runs
from thinwire.collectives.stateless import StatelessCollective
from thinwire.engine.context import ExchangeContext
from thinwire.engine.layout import Layout
from thinwire.engine.named_state import NamedState
from thinwire.engine.payloads import Accepted, DenseResult, Payload, Result, Signs, SignsOf, TernaryDraw, WrittenResult
from thinwire.kernels import add_mean_of_signs, coins, sign_scales, stream_key, write_signs
from thinwire.memory import RateRatio
from thinwire.transport import Net

VOTE_RANK = 0xFFFFFFFF  # the "rank" whose random stream breaks ties of a vote, wherever it is counted


class FrameBuffers:
    """The memory of an exchange's frames on the host: two buffers that grow once and are used again by every exchange.

    Frames that leave lie in front, and later this rank's answer; its own frame and those that come in lie in the back,
    and later the answers of the others. On a GPU the allocator does this.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, place: str, nbytes: int, device: torch.device) -> Tensor | None:  # -> (nbytes,) uint8
        if device.type != "cpu":
            return None
        buffer = self._buffers.get(place)
        if buffer is None or buffer.numel() < nbytes:
            buffer = self._buffers[place] = torch.empty(nbytes, dtype=torch.uint8)
        return buffer[:nbytes]


def _cut(buffer: Tensor | None, nbytes: Sequence[int]) -> list[Tensor | None]:
    """Consecutive stretches of a buffer, where there is one."""
    if buffer is None:
        return [None] * len(nbytes)
    return list(buffer[: sum(nbytes)].split(list(nbytes)))


class Server(StatelessCollective, ABC):
    """The way up and down that all servers share; a method says how a shard is pushed, averaged and answered.

    What a worker pushes is used as a whole, so ``accepted`` is the payload itself; what the server's own compression
    loses is kept by the server. Where an ``out`` is given, the frame is to lie there.
    """

    def __init__(self, topology: str) -> None:
        self.topology = topology
        self._space = FrameBuffers()

    def rounds(self, size: int) -> int:
        return 2  # up and down

    @abstractmethod
    def push_nbytes(self, layout: Layout, shard: Shard) -> int:
        """Length of the frame in which a worker pushes this shard."""

    @abstractmethod
    def push(self, context: ExchangeContext, payload: Any, shard: Shard, tail: Tensor, out: Tensor | None) -> Tensor:
        """Encode a shard of the worker's payload and tail."""

    @abstractmethod
    def reply_nbytes(self, shard: Shard, size: int) -> int:
        """Length of the answer for this shard."""

    @abstractmethod
    def answer(
        self,
        context: ExchangeContext,
        payload: Any,
        frames: list[Tensor],
        shard: Shard,
        nbytes: int,
        out: Tensor | None,
    ) -> Tensor:
        """Decode everybody's frames in rank order, average, and encode the answer (on the shard's server)."""

    @abstractmethod
    def read(
        self,
        context: ExchangeContext,
        payload: Any,
        frame: Tensor,
        shard: Shard,
        size: int,
        origin: str,
        parts: list[Tensor],
    ) -> Tensor:
        """Decode an answer: put the mean of the shard's pieces into ``parts``, return that of its tail."""

    def mean(
        self, context: ExchangeContext, payload: Payload, tail: Tensor, net: Net, into: Sequence[Tensor] | None = None
    ) -> tuple[Result, Accepted]:
        layout, everybody = context.layout, shards(context.layout, net.size, self.topology)
        mine, device, sharded = everybody[net.rank], tail.device, self.topology == "sharded"
        pushes = [0 if shard.empty else self.push_nbytes(layout, shard) for shard in everybody]
        longest = max(0 if shard.empty else self.reply_nbytes(shard, net.size) for shard in everybody)
        own = pushes[net.rank]
        front = self._space.take("front", max(sum(pushes) - own, longest), device)
        back = self._space.take("back", max(own * net.size, longest if sharded else 0), device)

        places = _cut(front, [0 if rank == net.rank else nbytes for rank, nbytes in enumerate(pushes)])
        places[net.rank], incoming = _cut(back, [own, own * (net.size - 1)])
        nothing = torch.zeros(0, dtype=torch.uint8, device=device)
        pushed = [
            nothing if shard.empty else self.push(context, payload, shard, tail[shard.tail], place)
            for shard, place in zip(everybody, places, strict=True)
        ]
        frames = net.all_to_all(pushed, [own] * net.size, incoming)

        if mine.empty:
            reply = torch.zeros(longest if sharded else 0, dtype=torch.uint8, device=device)
        else:
            reply = self.answer(context, payload, frames, mine, longest, _cut(front, [longest])[0])
        flat = torch.empty(layout.numel if into is None else 0, device=device)
        result = list(into if into is not None else layout.split(flat))
        if sharded:
            replies = net.gather_each(reply, back)
        else:
            answers = net.all_to_all([reply] * net.size, [longest] + [0] * (net.size - 1))
            replies = iter(list(enumerate(answers))[:1])
        for rank, frame in replies:
            shard = everybody[rank]
            if not shard.empty:
                parts = [result[piece.place][piece.start : piece.stop] for piece in shard.pieces]
                rest = self.read(context, payload, frame, shard, net.size, f"server {rank}", parts)
                _write_tail(result[len(layout.coded) :], shard, rest)
        return DenseResult(flat) if into is None else WrittenResult(result), Accepted(payload, tail)


def _write_tail(parts: Sequence[Tensor], shard: Shard, values: Tensor) -> None:  # (t of the shard,) float32
    """Put a shard's slice of the dense tail into the tail's vectors."""
    start = 0
    for part in parts:
        first, last = max(shard.tail_start, start), min(shard.tail_stop, start + part.numel())
        if first < last:
            part[first - start : last - start] = values[first - shard.tail_start : last - shard.tail_start]
        start += part.numel()


class BlockSignServer(Server):
    """dist-EF-blockSGDM's server (Algorithm 4 lines 10-13), two-way: averages, adds its own rescaled error, compresses.

    With ``two_way=False`` it answers in fp32 and has no error.
    """

    def __init__(self, topology: str, block: int | None, two_way: bool) -> None:
        super().__init__(topology)
        self.block, self.two_way = block, two_way
        self.state = NamedState("residual")
        self.ratio = RateRatio()
        self._starts: dict[str, int] = {}  # first element of the part of each tensor that this rank serves

    def push_nbytes(self, layout: Layout, shard: Shard) -> int:
        runs = worker_runs(shard, self.block)
        return SignsCodec().nbytes(shard.numel, count_blocks(runs), shard.tail_numel)

    def push(
        self, context: ExchangeContext, payload: Signs | SignsOf, shard: Shard, tail: Tensor, out: Tensor | None
    ) -> Tensor:
        runs = worker_runs(shard, self.block)
        scales = block_scales(payload.scales, shard, self.block, context.layout)
        part = payload.cut([piece.span for piece in shard.pieces], scales, runs)
        return SignsCodec().encode(context, part, tail, out=out)

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
        out: Tensor | None,
    ) -> Tensor:
        runs = worker_runs(shard, self.block)
        device, num_scales = payload.scales.device, count_blocks(runs)
        dense = torch.zeros(shard.tail_numel, dtype=torch.float32, device=device)
        given = []
        for rank, frame in enumerate(frames):
            signs, tail = SignsCodec().decode(
                context, frame, runs, num_scales, shard.tail_numel, device, f"rank {rank}"
            )
            given.append((signs.packed, signs.scales))
            dense.add_(tail)
        dense.div_(len(frames))
        if not self.two_way:
            total = torch.zeros(shard.numel, dtype=torch.float32, device=device)
            add_mean_of_signs(total, given, runs)
            return FloatsCodec().encode(context, total, dense, nbytes, out)
        error = self.state.flat("residual", shard.layout, device)
        self._starts.update({piece.segment.name: piece.start for piece in shard.pieces})
        served = shard.context(context)
        ratios = self.ratio.begin(served, error)
        for segment, ratio in zip(served.layout.segments, ratios, strict=True):
            error[segment.span].mul_(ratio)
        add_mean_of_signs(error, given, runs)
        blocks = shard.server_runs(self.block)
        sent = SignsOf((error,), sign_scales(error, blocks), blocks)
        reply = SignsCodec().encode(context, sent, dense, nbytes, out)
        sent.subtract_from(error)
        self.ratio.end(error)
        return reply

    def read(
        self,
        context: ExchangeContext,
        payload: Signs | SignsOf,
        frame: Tensor,
        shard: Shard,
        size: int,
        origin: str,
        parts: list[Tensor],
    ) -> Tensor:
        device = payload.scales.device
        if not self.two_way:
            return _read_floats(context, frame, shard, device, origin, parts)
        blocks = shard.server_runs(self.block)
        signs, tail = SignsCodec().decode(
            context, frame, blocks, count_blocks(blocks), shard.tail_numel, device, origin
        )
        write_signs(parts, signs.packed, signs.scales, blocks)
        return tail

    def residual_square_sum(self) -> float:
        return self.state.square_sum("residual")

    def leftover(self, rates: dict[str, float]) -> Iterable[tuple[str, int, Tensor]]:
        for name, error in self.state.named["residual"].items():
            yield name, self._starts[name], error * self.ratio.rescale(name, rates[name])

    def state_dict(self) -> dict[str, Any]:
        return {**self.state.state_dict(), "rates": dict(self.ratio.rates), "starts": dict(self._starts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state.load_state_dict(state)
        self.ratio.rates = dict(state.get("rates", {}))
        self._starts = dict(state.get("starts", {}))


class VoteServer(Server):
    """signSGD with majority vote: one bit each way; a tie is decided by a fair, reproducible coin."""

    def push_nbytes(self, layout: Layout, shard: Shard) -> int:
        return SignsCodec().nbytes(shard.numel, 0, shard.tail_numel)

    def push(self, context: ExchangeContext, payload: Signs, shard: Shard, tail: Tensor, out: Tensor | None) -> Tensor:
        bits = payload.cut([piece.span for piece in shard.pieces], payload.scales, shard.piece_runs())
        return SignsCodec().encode(context, bits, tail, out=out)

    def reply_nbytes(self, shard: Shard, size: int) -> int:
        return SignsCodec().nbytes(shard.numel, 0, shard.tail_numel)

    def answer(
        self,
        context: ExchangeContext,
        payload: Signs,
        frames: list[Tensor],
        shard: Shard,
        nbytes: int,
        out: Tensor | None,
    ) -> Tensor:
        device, runs = payload.bits.device, shard.piece_runs()
        against = torch.zeros(shard.numel, dtype=torch.int32, device=device)
        dense = torch.zeros(shard.tail_numel, dtype=torch.float32, device=device)
        for rank, frame in enumerate(frames):
            signs, tail = SignsCodec().decode(context, frame, runs, 0, shard.tail_numel, device, f"rank {rank}")
            against += signs.negative
            dense.add_(tail)
        size = len(frames)
        negative = against * 2 > size
        if size % 2 == 0:
            negative |= (against * 2 == size) & self._coins(context, shard, device)
        vote = Signs(negative, payload.scales, runs)
        return SignsCodec().encode(context, vote, dense.div_(size), nbytes, out)

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
    ) -> Tensor:
        device, runs = payload.bits.device, shard.piece_runs()
        vote, tail = SignsCodec().decode(context, frame, runs, 0, shard.tail_numel, device, origin)
        write_signs(parts, vote.packed, torch.ones(count_blocks(runs), device=device), runs)
        return tail


class TernaryServer(Server):
    """TernGrad's server: adds trits, answers in ceil(log2(2N+1)) bits when scalers are shared, else in fp32."""

    def __init__(self, topology: str, share_scaler: bool) -> None:
        super().__init__(topology)
        self.share_scaler = share_scaler

    def rounds(self, size: int) -> int:
        # The scalers are agreed on first; not in an exchange without any, for which this is one too many.
        return super().rounds(size) + int(self.share_scaler)

    def push_nbytes(self, layout: Layout, shard: Shard) -> int:
        return TernaryCodec().nbytes(shard.numel, 0 if self.share_scaler else len(shard.pieces), shard.tail_numel)

    def push(
        self, context: ExchangeContext, payload: TernaryDraw, shard: Shard, tail: Tensor, out: Tensor | None
    ) -> Tensor:
        part = payload.cut([(piece.place, piece.start, piece.stop) for piece in shard.pieces])
        return TernaryCodec().encode(context, part, tail, with_scales=not self.share_scaler, out=out)

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
        out: Tensor | None,
    ) -> Tensor:
        device, runs = payload.scales.device, shard.piece_runs()
        shared = piece_scales(payload.scales, shard) if self.share_scaler else None
        dense = torch.zeros(shard.tail_numel, dtype=torch.float32, device=device)
        given = []
        for rank, frame in enumerate(frames):
            part, tail = TernaryCodec().decode(context, frame, runs, shared, shard.tail_numel, device, f"rank {rank}")
            given.append(part)
            dense.add_(tail)
        dense.div_(len(frames))
        if self.share_scaler:
            packed = [part.packed for part in given]
            return LevelsCodec().encode_sums(context, packed, shard.numel, dense, nbytes, out)
        total = torch.zeros(shard.numel, dtype=torch.float32, device=device)
        for part in given:
            part.add_to(total)
        return FloatsCodec().encode(context, total.div_(len(frames)), dense, nbytes, out)

    def read(
        self,
        context: ExchangeContext,
        payload: TernaryDraw,
        frame: Tensor,
        shard: Shard,
        size: int,
        origin: str,
        parts: list[Tensor],
    ) -> Tensor:
        if not self.share_scaler:
            return _read_floats(context, frame, shard, payload.scales.device, origin, parts)
        scales = piece_scales(payload.scales, shard)
        return LevelsCodec().decode_mean(context, frame, size, shard.tail_numel, parts, scales, origin)


def _read_floats(
    context: ExchangeContext, frame: Tensor, shard: Shard, device: torch.device, origin: str, parts: list[Tensor]
) -> Tensor:
    """An answer in fp32: into the parts; returns the tail."""
    values, tail = FloatsCodec().decode(context, frame, shard.numel, shard.tail_numel, device, origin)
    for part, value in zip(parts, values.split([part.numel() for part in parts]), strict=True):
        part.copy_(value)
    return tail
