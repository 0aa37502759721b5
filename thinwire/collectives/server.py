"""Servers: every rank pushes its payload to whoever serves it, the server averages and answers in compressed form.

``topology="server"`` is one rank that serves all (and works too); ``"sharded"`` lets every rank serve a part, so that
no link carries more than any other: an all-to-all up, an all-gather down.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs import FloatsCodec, LevelsCodec, SignsCodec, TernaryCodec
from thinwire.codecs.dense import count_blocks
from thinwire.collectives.shards import Shard, scale_places, shards
from thinwire.collectives.stateless import StatelessCollective
from thinwire.kernels import block_expand, blockwise_sign, coin, stream_key
from thinwire.layout import Layout, Turn
from thinwire.memory import NamedState, RateRatio
from thinwire.payloads import Accepted, DenseResult, Payload, Signs, TernaryDraw
from thinwire.transport import Net

VOTE_RANK = 0xFFFFFFFF  # the "rank" whose random stream breaks ties of a vote, wherever it is counted


class Server(StatelessCollective, ABC):
    """The way up and down that all servers share; a method says how a shard is pushed, averaged and answered.

    What a worker pushes is used as a whole, so ``accepted`` is the payload itself; what the server's own compression
    loses is kept by the server.
    """

    def __init__(self, topology: str) -> None:
        self.topology = topology

    @abstractmethod
    def push_nbytes(self, layout: Layout, shard: Shard) -> int:
        """Length of the frame in which a worker pushes this shard."""

    @abstractmethod
    def push(self, turn: Turn, payload: Any, shard: Shard, tail: Tensor) -> Tensor:
        """Encode a shard of the worker's payload and tail."""

    @abstractmethod
    def reply_nbytes(self, shard: Shard, size: int) -> int:
        """Length of the answer for this shard."""

    @abstractmethod
    def answer(self, turn: Turn, payload: Any, frames: list[Tensor], shard: Shard, net: Net, nbytes: int) -> Tensor:
        """Decode everybody's frames in rank order, average, and encode the answer (on the shard's server)."""

    @abstractmethod
    def read(
        self, turn: Turn, payload: Any, frame: Tensor, shard: Shard, net: Net, origin: str
    ) -> tuple[Tensor, Tensor]:
        """Decode an answer into the shard's mean: coded elements and tail."""

    def mean(self, turn: Turn, payload: Payload, tail: Tensor, net: Net) -> tuple[DenseResult, Accepted]:
        layout, everybody = turn.layout, shards(turn.layout, net.size, self.topology)
        mine = everybody[net.rank]
        nothing = torch.zeros(0, dtype=torch.uint8, device=tail.device)
        pushed = [nothing if s.empty else self.push(turn, payload, s, tail[s.tail]) for s in everybody]
        frames = net.all_to_all(pushed, [0 if mine.empty else self.push_nbytes(layout, mine)] * net.size)

        sizes = [0 if shard.empty else self.reply_nbytes(shard, net.size) for shard in everybody]
        longest = max(sizes)
        if mine.empty:
            reply = torch.zeros(longest if self.topology == "sharded" else 0, dtype=torch.uint8, device=tail.device)
        else:
            reply = self.answer(turn, payload, frames, mine, net, longest)
        if self.topology == "sharded":
            replies = net.all_gather(reply)
        else:
            replies = net.all_to_all([reply] * net.size, [longest] + [0] * (net.size - 1))

        result = torch.zeros(layout.numel, dtype=torch.float32, device=tail.device)
        for rank, shard in enumerate(everybody):
            if not shard.empty:
                coded, dense = self.read(turn, payload, replies[rank], shard, net, f"server {rank}")
                shard.scatter(coded, result)
                result[layout.coded_numel :][shard.tail] = dense
        return DenseResult(result), Accepted(payload, tail)


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
        runs = scale_places(shard, self.block, layout)[1]
        return SignsCodec().nbytes(shard.numel, count_blocks(runs), shard.tail_numel)

    def push(self, turn: Turn, payload: Signs, shard: Shard, tail: Tensor) -> Tensor:
        places, runs = scale_places(shard, self.block, turn.layout)
        scales = payload.scales[places.to(payload.scales.device)]
        return SignsCodec().encode(turn, Signs(shard.gather(payload.negative), scales, runs), tail)

    def reply_nbytes(self, shard: Shard, size: int) -> int:
        if not self.two_way:
            return FloatsCodec().nbytes(shard.numel, shard.tail_numel)
        return SignsCodec().nbytes(shard.numel, count_blocks(shard.server_runs(self.block)), shard.tail_numel)

    def answer(self, turn: Turn, payload: Signs, frames: list[Tensor], shard: Shard, net: Net, nbytes: int) -> Tensor:
        runs = scale_places(shard, self.block, turn.layout)[1]
        device, num_scales = payload.scales.device, count_blocks(runs)
        total = torch.zeros(shard.numel, dtype=torch.float32, device=device)
        dense = torch.zeros(shard.tail_numel, dtype=torch.float32, device=device)
        for rank, frame in enumerate(frames):
            signs, tail = SignsCodec().decode(turn, frame, runs, num_scales, shard.tail_numel, device, f"rank {rank}")
            signs.add_to(total)
            dense.add_(tail)
        total.div_(net.size)
        dense.div_(net.size)
        if not self.two_way:
            return FloatsCodec().encode(turn, total, dense, nbytes)
        error = self.state.flat("residual", shard.layout, device)
        self._starts.update({piece.segment.name: piece.start for piece in shard.pieces})
        served = shard.turn(turn)
        held = self.ratio.hold(served, error)
        for segment, ratio in self.ratio.advance(served):
            error[segment.span].mul_(ratio)
        error.add_(total)
        blocks = shard.server_runs(self.block)
        signs = Signs(*blockwise_sign(error, blocks), blocks)
        signs.subtract_from(error)
        self.ratio.release(held, error)
        return SignsCodec().encode(turn, signs, dense, nbytes)

    def read(
        self, turn: Turn, payload: Signs, frame: Tensor, shard: Shard, net: Net, origin: str
    ) -> tuple[Tensor, Tensor]:
        device = payload.scales.device
        if not self.two_way:
            return FloatsCodec().decode(turn, frame, shard.numel, shard.tail_numel, device, origin)
        blocks = shard.server_runs(self.block)
        signs, tail = SignsCodec().decode(turn, frame, blocks, count_blocks(blocks), shard.tail_numel, device, origin)
        return signs.values(), tail

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

    def push(self, turn: Turn, payload: Signs, shard: Shard, tail: Tensor) -> Tensor:
        bits = Signs(shard.gather(payload.negative), payload.scales, shard.piece_runs())
        return SignsCodec().encode(turn, bits, tail)

    def reply_nbytes(self, shard: Shard, size: int) -> int:
        return SignsCodec().nbytes(shard.numel, 0, shard.tail_numel)

    def answer(self, turn: Turn, payload: Signs, frames: list[Tensor], shard: Shard, net: Net, nbytes: int) -> Tensor:
        device, runs = payload.bits.device, shard.piece_runs()
        against = torch.zeros(shard.numel, dtype=torch.int32, device=device)
        dense = torch.zeros(shard.tail_numel, dtype=torch.float32, device=device)
        for rank, frame in enumerate(frames):
            signs, tail = SignsCodec().decode(turn, frame, runs, 0, shard.tail_numel, device, f"rank {rank}")
            against += signs.negative
            dense.add_(tail)
        negative = against * 2 > net.size
        if net.size % 2 == 0:
            negative |= (against * 2 == net.size) & self._coins(turn, shard, device)
        vote = Signs(negative, payload.scales, runs)
        return SignsCodec().encode(turn, vote, dense.div_(net.size), nbytes)

    @staticmethod
    def _coins(turn: Turn, shard: Shard, device: torch.device) -> Tensor:  # -> (m,) bool
        flips = [
            coin(stream_key(0, turn.step, VOTE_RANK, piece.segment.name), piece.stop - piece.start, device, piece.start)
            for piece in shard.pieces
        ]
        return torch.cat(flips) if flips else torch.zeros(0, dtype=torch.bool, device=device)

    def read(
        self, turn: Turn, payload: Signs, frame: Tensor, shard: Shard, net: Net, origin: str
    ) -> tuple[Tensor, Tensor]:
        device = payload.bits.device
        vote, tail = SignsCodec().decode(turn, frame, shard.piece_runs(), 0, shard.tail_numel, device, origin)
        return 1.0 - 2.0 * vote.negative.to(torch.float32), tail


class TernaryServer(Server):
    """TernGrad's server: adds trits, answers in ceil(log2(2N+1)) bits when scalers are shared, else in fp32."""

    def __init__(self, topology: str, share_scaler: bool) -> None:
        super().__init__(topology)
        self.share_scaler = share_scaler

    @staticmethod
    def _piece_scales(payload: TernaryDraw, shard: Shard) -> Tensor:  # -> (pieces,) float32
        # Coded segments come first in a layout, so a piece's place is also its tensor's place among the scalers.
        places = torch.tensor([piece.place for piece in shard.pieces], dtype=torch.int64)
        return payload.scales[places.to(payload.scales.device)]

    def push_nbytes(self, layout: Layout, shard: Shard) -> int:
        return TernaryCodec().nbytes(shard.numel, 0 if self.share_scaler else len(shard.pieces), shard.tail_numel)

    def push(self, turn: Turn, payload: TernaryDraw, shard: Shard, tail: Tensor) -> Tensor:
        part = payload.cut([(piece.place, piece.start, piece.stop) for piece in shard.pieces])
        return TernaryCodec().encode(turn, part, tail, with_scales=not self.share_scaler)

    def reply_nbytes(self, shard: Shard, size: int) -> int:
        if self.share_scaler:
            return LevelsCodec().nbytes(shard.numel, size, shard.tail_numel)
        return FloatsCodec().nbytes(shard.numel, shard.tail_numel)

    def answer(
        self, turn: Turn, payload: TernaryDraw, frames: list[Tensor], shard: Shard, net: Net, nbytes: int
    ) -> Tensor:
        device, runs = payload.scales.device, shard.piece_runs()
        shared = self._piece_scales(payload, shard) if self.share_scaler else None
        levels = torch.zeros(shard.numel, dtype=torch.int32, device=device)
        total = torch.zeros(0 if self.share_scaler else shard.numel, dtype=torch.float32, device=device)
        dense = torch.zeros(shard.tail_numel, dtype=torch.float32, device=device)
        for rank, frame in enumerate(frames):
            part, tail = TernaryCodec().decode(turn, frame, runs, shared, shard.tail_numel, device, f"rank {rank}")
            if self.share_scaler:
                levels += part.trits
            else:
                part.add_to(total)
            dense.add_(tail)
        dense.div_(net.size)
        if self.share_scaler:
            return LevelsCodec().encode(turn, levels, net.size, dense, nbytes)
        return FloatsCodec().encode(turn, total.div_(net.size), dense, nbytes)

    def read(
        self, turn: Turn, payload: TernaryDraw, frame: Tensor, shard: Shard, net: Net, origin: str
    ) -> tuple[Tensor, Tensor]:
        device = payload.scales.device
        if not self.share_scaler:
            return FloatsCodec().decode(turn, frame, shard.numel, shard.tail_numel, device, origin)
        levels, tail = LevelsCodec().decode(turn, frame, shard.numel, net.size, shard.tail_numel, device, origin)
        scales = block_expand(self._piece_scales(payload, shard), shard.piece_runs())
        return scales * levels / net.size, tail
