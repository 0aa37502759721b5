"""Servers: every rank pushes its payload to whoever serves it, the server averages and answers in compressed form.

``topology="server"`` is one rank that serves all (and works too); ``"sharded"`` lets every rank serve a part, so that
no link carries more than any other: an all-to-all up, an all-gather down.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs import FloatsCodec
from thinwire.codecs.frame import Decoded
from thinwire.collectives.serving_shards import Shard, shards
from thinwire.collectives.stateless_collective import StatelessCollective
from thinwire.engine.context import ExchangeContext
from thinwire.engine.group_mean import ZEROS, Base, DenseResult, WrittenResult
from thinwire.engine.layout import Layout
from thinwire.engine.nonfinite_alarm import Alarm
from thinwire.engine.payloads import Accepted
from thinwire.engine.protocols import Collected
from thinwire.engine.traffic_plan import Budget, Plan, all_gather, all_to_all
from thinwire.transport import Net


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

    def plan(self, layout: Layout, budget: Budget, size: int) -> Plan:
        if self.topology == "server":  # one rank's link carries everybody's frames, first one way and then the other
            up = all_to_all(self.planned_push(layout, budget, 1), size, size)
            return up + all_to_all(self.planned_reply(layout, budget, 1, size), size)
        up = all_to_all(self.planned_push(layout, budget, size), size, size)
        return up + all_gather(self.planned_reply(layout, budget, size, size), size)

    @abstractmethod
    def planned_push(self, layout: Layout, budget: Budget, servers: int) -> int:
        """Length of a frame that a worker pushes when this many ranks serve."""

    @abstractmethod
    def planned_reply(self, layout: Layout, budget: Budget, servers: int, size: int) -> int:
        """Length of a server's answer to ``size`` ranks when this many serve."""

    @abstractmethod
    def push_nbytes(self, layout: Layout, shard: Shard) -> int:
        """Length of the frame in which a worker pushes this shard."""

    @abstractmethod
    def push(
        self,
        context: ExchangeContext,
        payload: Any,
        shard: Shard,
        tail: Tensor,
        alarm: Alarm,
        out: Tensor | None,
    ) -> Tensor:
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
        alarm: Alarm,
        out: Tensor | None,
    ) -> tuple[Tensor, Alarm]:
        """Decode all frames in rank order, average, and encode the answer (on the shard's server)."""

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
    ) -> Decoded[Any]:
        """Decode an answer: put the mean of the shard's pieces into ``parts``; return that of its tail."""

    def mean(
        self,
        context: ExchangeContext,
        payload: Any,
        tail: Tensor,
        net: Net,
        base: Base,
        alarm: Alarm,
        into: Sequence[Tensor] | None = None,
    ) -> Collected:
        assert base == ZEROS, "an answer is not added to anything: what the memory takes off would be lost"
        layout, served = context.layout, shards(context.layout, net.size, self.topology)
        mine, device, sharded = served[net.rank], tail.device, self.topology == "sharded"
        pushes = [0 if shard.empty else self.push_nbytes(layout, shard) for shard in served]
        longest = max(0 if shard.empty else self.reply_nbytes(shard, net.size) for shard in served)
        own = pushes[net.rank]
        front = self._space.take("front", max(sum(pushes) - own, longest), device)
        back = self._space.take("back", max(own * net.size, longest if sharded else 0), device)

        places = _cut(front, [0 if rank == net.rank else nbytes for rank, nbytes in enumerate(pushes)])
        places[net.rank], incoming = _cut(back, [own, own * (net.size - 1)])
        nothing = torch.zeros(0, dtype=torch.uint8, device=device)
        pushed = [
            nothing if shard.empty else self.push(context, payload, shard, tail[shard.tail], alarm, place)
            for shard, place in zip(served, places, strict=True)
        ]
        frames = net.all_to_all(pushed, [own] * net.size, incoming)

        if mine.empty:
            reply = torch.zeros(longest if sharded else 0, dtype=torch.uint8, device=device)
        else:
            reply, alarm = self.answer(context, payload, frames, mine, longest, alarm, _cut(front, [longest])[0])
        flat = torch.empty(layout.numel if into is None else 0, dtype=torch.float32, device=device)
        result = list(into if into is not None else layout.split(flat))
        if sharded:
            replies = net.gather_each(reply, back)
        else:
            answers = net.all_to_all([reply] * net.size, [longest] + [0] * (net.size - 1))
            replies = iter(list(enumerate(answers))[:1])
        for rank, frame in replies:
            shard = served[rank]
            if not shard.empty:
                parts = [result[piece.place][piece.start : piece.stop] for piece in shard.pieces]
                read = self.read(context, payload, frame, shard, net.size, f"server {rank}", parts)
                alarm = alarm.heard([(f"server {rank}", read.alarm)])
                _write_tail(result[len(layout.coded) :], shard, read.tail)
        return Collected(DenseResult(flat) if into is None else WrittenResult(result), Accepted(payload, tail), alarm)


def _write_tail(parts: Sequence[Tensor], shard: Shard, values: Tensor) -> None:  # (t of the shard,) float32
    """Put a shard's slice of the dense tail into the tail's vectors."""
    start = 0
    for part in parts:
        first, last = max(shard.tail_start, start), min(shard.tail_stop, start + part.numel())
        if first < last:
            part[first - start : last - start] = values[first - shard.tail_start : last - shard.tail_start]
        start += part.numel()


def decode_frames(
    frames: Sequence[Tensor],
    tail_numel: int,
    device: torch.device,
    alarm: Alarm,
    decode: Callable[[Tensor, str], Decoded[Any]],
) -> tuple[list[Any], Tensor, Alarm]:
    """Return all payloads in rank order, the sum of their tails, and the alarm with what the frames told."""
    contents, dense = [], torch.zeros(tail_numel, dtype=torch.float32, device=device)
    for rank, frame in enumerate(frames):
        decoded = decode(frame, f"rank {rank}")
        alarm = alarm.heard([(f"rank {rank}", decoded.alarm)])
        contents.append(decoded.content)
        dense.add_(decoded.tail)
    return contents, dense, alarm


def read_floats(
    context: ExchangeContext, frame: Tensor, shard: Shard, device: torch.device, origin: str, parts: list[Tensor]
) -> Decoded[Tensor]:
    """An answer in fp32: into the parts."""
    decoded = FloatsCodec().decode(context, frame, shard.numel, shard.tail_numel, device, origin)
    for part, value in zip(parts, decoded.content.split([part.numel() for part in parts]), strict=True):
        part.copy_(value)
    return decoded
