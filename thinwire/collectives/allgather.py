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
from thinwire.collectives.stateless import StatelessCollective
from thinwire.engine.context import ExchangeContext
from thinwire.engine.payloads import (
    Accepted,
    Sparse,
    SparseResult,
    WrittenResult,
    add_entries,
    clear,
    write_tail,
)
from thinwire.engine.workspace import BACK, Workspace
from thinwire.transport import Net

_AT_ONCE = 4  # frames that are decoded together, which threads share; more of them would need more memory


@dataclass(frozen=True)
class AllGather(StatelessCollective):
    """mean = 1/N sum over ranks of what their frames say; a rank is charged with what its own frame says.

    Charging by the frame sends everything that did not get into it, rounding and entries over the budget, back to the
    memory.
    """

    adds_applied: ClassVar[bool] = True
    codec: SparseCodec
    workspace: Workspace = field(default_factory=Workspace, compare=False)

    def rounds(self, size: int) -> int:
        return 1

    def mean(
        self, context: ExchangeContext, payload: Sparse, tail: Tensor, net: Net, into: Sequence[Tensor] | None = None
    ) -> tuple[SparseResult | WrittenResult, Accepted]:
        device, behind = payload.values.device, self.workspace.mark(BACK)
        frame = net.to_wire(self.codec.encode(context, payload, tail, workspace=self.workspace))
        if not is_finished(frame):
            frame = self.codec.encode(context, payload, tail, within_budget=True)
        # The payload is in the frame: its memory is free for everybody's.
        self.workspace.release(0)
        received = self.workspace.take(net.size * frame.numel(), torch.uint8, device)
        clearing = partial(clear, context, into) if into is not None else None
        frames = net.all_gather(frame, received, pairwise=True, overlap_with=clearing)
        if received is not None and frames[0].data_ptr() == received.data_ptr():
            self.workspace.release(behind, BACK)
        named = [(frame, f"rank {rank}") for rank, frame in enumerate(frames)]
        if into is not None:
            return self._add_to(context, payload, tail, net, named, into)
        decoded = self.codec.decode_all(context, named, payload.numel, payload.capacity, tail.numel(), device)
        total = torch.zeros_like(tail)
        for _, dense in decoded:
            total.add_(dense)
        everybody = [sparse for sparse, _ in decoded]
        mine = everybody[net.rank]
        return SparseResult(everybody, total, net.size), Accepted(mine, tail, sent=mine.indices)

    def _add_to(
        self,
        context: ExchangeContext,
        payload: Sparse,
        tail: Tensor,
        net: Net,
        frames: Sequence[tuple[Tensor, str]],
        into: Sequence[Tensor],
    ) -> tuple[WrittenResult, Accepted]:
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
            for _, dense in decoded:
                total.add_(dense)
            if net.rank in ranks:
                own = decoded[net.rank - first][0]
            add_entries(context.layout, into, [sparse for sparse, _ in decoded], net.size)
        write_tail(context.layout, into, total, net.size)
        assert own is not None, "this rank's frame is one of them"
        return WrittenResult(into), Accepted(own, tail, sent=own.indices)
