"""All-gather of sparse frames, added up in rank order on every rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs import SparseCodec
from thinwire.collectives.stateless import StatelessCollective
from thinwire.layout import Turn
from thinwire.payloads import Accepted, Sparse
from thinwire.transport import Net


@dataclass(frozen=True)
class AllGather(StatelessCollective):
    """mean = 1/N sum over ranks of what their frames say; a rank is charged with what its own frame says.

    Charging by the frame sends everything that did not get into it, rounding and entries over the budget, back to the
    memory.
    """

    codec: SparseCodec

    def mean(self, turn: Turn, payload: Sparse, tail: Tensor, net: Net) -> tuple[Tensor, Accepted]:
        device, coded = payload.values.device, payload.numel
        frames = net.all_gather(self.codec.encode(turn, payload, tail))
        total = torch.zeros(coded + tail.numel(), dtype=torch.float32, device=device)
        mine = payload
        for rank, frame in enumerate(frames):
            sparse, dense = self.codec.decode(
                turn, frame, coded, payload.capacity, tail.numel(), device, f"rank {rank}"
            )
            sparse.add_to(total[:coded])
            total[coded:].add_(dense)
            if rank == net.rank:
                mine = sparse
        return total.div_(net.size), Accepted(mine, tail, sent=mine.indices)
