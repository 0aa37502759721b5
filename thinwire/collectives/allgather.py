"""All-gather of sparse frames, added up in rank order on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs import SparseCodec
from thinwire.codecs.frame import is_finished
from thinwire.collectives.stateless import StatelessCollective
from thinwire.layout import Turn
from thinwire.payloads import Accepted, Sparse, SparseResult, clear
from thinwire.transport import Net


@dataclass(frozen=True)
class AllGather(StatelessCollective):
    """mean = 1/N sum over ranks of what their frames say; a rank is charged with what its own frame says.

    Charging by the frame sends everything that did not get into it, rounding and entries over the budget, back to the
    memory.
    """

    codec: SparseCodec

    def rounds(self, size: int) -> int:
        return 1

    def mean(
        self, turn: Turn, payload: Sparse, tail: Tensor, net: Net, into: Sequence[Tensor] | None = None
    ) -> tuple[SparseResult, Accepted]:
        device = payload.values.device
        frame = net.to_wire(self.codec.encode(turn, payload, tail))
        if not is_finished(frame):
            frame = self.codec.encode(turn, payload, tail, within_budget=True)
        frames = net.all_gather(frame, lambda: clear(turn.layout, into)) if into is not None else net.all_gather(frame)
        named = [(frame, f"rank {rank}") for rank, frame in enumerate(frames)]
        decoded = self.codec.decode_all(turn, named, payload.numel, payload.capacity, tail.numel(), device)
        total = torch.zeros_like(tail)
        for _, dense in decoded:
            total.add_(dense)
        everybody = [sparse for sparse, _ in decoded]
        mine = everybody[net.rank]
        result = SparseResult(everybody, total, net.size, cleared=into is not None)
        return result, Accepted(mine, tail, sent=mine.indices)
