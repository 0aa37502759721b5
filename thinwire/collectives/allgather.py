"""All-gather of sparse frames, added up in rank order on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.codecs import SparseCodec
from thinwire.codecs.frame import is_finished
from thinwire.collectives.stateless_collective import StatelessCollective
from thinwire.engine.context import ExchangeContext
from thinwire.engine.group_mean import Base, SparseResult, WrittenResult, add_entries, write_tail
from thinwire.engine.layout import Layout
from thinwire.engine.nonfinite_alarm import Alarm
from thinwire.engine.payloads import Accepted, Sparse
from thinwire.engine.protocols import Collected
from thinwire.engine.traffic_plan import Budget, Plan, all_gather
from thinwire.engine.workspace import BACK, Workspace
from thinwire.transport import Net

_AT_ONCE = 4  # frames that are decoded together, which threads share; more of them would need more memory


@dataclass(frozen=True)
class AllGather(StatelessCollective):
    """mean = 1/N sum over ranks of what their frames say; a rank is charged with what its own frame says.

    Charging by the frame sends everything that did not get into it, rounding and entries over the budget, back to the
    memory.
    """

    codec: SparseCodec
    workspace: Workspace = field(default_factory=Workspace, compare=False)

    frames_grow: ClassVar[bool] = True

    def plan(self, layout: Layout, budget: Budget, size: int) -> Plan:
        nbytes = self.codec.nbytes(layout.coded_numel, budget.entries, layout.tail_numel, budget.spread)
        return all_gather(nbytes, size)

    def mean(
        self,
        context: ExchangeContext,
        payload: Sparse,
        tail: Tensor,
        net: Net,
        base: Base,
        alarm: Alarm,
        into: Sequence[Tensor] | None = None,
    ) -> Collected:
        device, behind = payload.values.device, self.workspace.mark(BACK)
        frame = net.to_wire(self.codec.encode(context, payload, tail, workspace=self.workspace, alarm=alarm))
        if not is_finished(frame):
            frame = self.codec.encode(context, payload, tail, within_budget=True, alarm=alarm)
        # The payload is in the frame: its memory is free for everybody's.
        self.workspace.release(0)
        received = self.workspace.take(net.size * frame.numel(), torch.uint8, device)
        write_base = partial(base.write, context, into) if into is not None else None
        frames = net.all_gather(frame, received, pairwise=True, overlap_with=write_base)
        if received is not None and frames[0].data_ptr() == received.data_ptr():
            self.workspace.release(behind, BACK)
        named = [(frame, f"rank {rank}") for rank, frame in enumerate(frames)]
        if into is not None:
            return self._add_to(context, payload, tail, net, named, alarm, into)
        decoded = self.codec.decode_all(context, named, payload.numel, payload.capacity, tail.numel(), device)
        total = torch.zeros_like(tail)
        for one in decoded:
            total.add_(one.tail)
        payloads = [one.content for one in decoded]
        mine = payloads[net.rank]
        alarm = alarm.heard((origin, one.alarm) for (_, origin), one in zip(named, decoded, strict=True))
        result = SparseResult(payloads, total, net.size, base)
        return Collected(result, Accepted(mine, tail, sent=mine.indices), alarm)

    def _add_to(
        self,
        context: ExchangeContext,
        payload: Sparse,
        tail: Tensor,
        net: Net,
        frames: Sequence[tuple[Tensor, str]],
        alarm: Alarm,
        into: Sequence[Tensor],
    ) -> Collected:
        """Add the mean to what lies where it is to go, a few frames after the other; if one of them is bad, a part is
        there."""
        others = min(_AT_ONCE, net.size if net.size > _AT_ONCE else net.size - 1)
        mine, *rooms = [self.codec.room(payload, self.workspace) for _ in range(1 + others)]
        total = self.workspace.take(tail.numel(), torch.float32, tail.device)
        total = total.zero_() if total is not None else torch.zeros_like(tail)
        own: Sparse | None = None
        for first in range(0, net.size, _AT_ONCE):
            ranks = range(first, min(first + _AT_ONCE, net.size))
            free = iter(rooms)
            chosen = [mine if rank == net.rank else next(free) for rank in ranks]
            known = [room for room in chosen if room is not None]
            decoded = self.codec.decode_all(
                context, [frames[rank] for rank in ranks], payload.numel, payload.capacity, tail.numel(), tail.device,
                known if len(known) == len(chosen) else None,
            )  # fmt: skip
            for one in decoded:
                total.add_(one.tail)
            if net.rank in ranks:
                own = decoded[net.rank - first].content
            alarm = alarm.heard((frames[rank][1], one.alarm) for rank, one in zip(ranks, decoded, strict=True))
            add_entries(context.layout, into, [one.content for one in decoded], net.size)
        write_tail(context.layout, into, total, net.size)
        assert own is not None, "this rank's frame is one of them"
        return Collected(WrittenResult(into), Accepted(own, tail, sent=own.indices), alarm)
