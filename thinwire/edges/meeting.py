"""Where ranks that take steps alone meet, with 40 bytes each: before a round, and whatever else they do together.

Where a GradScaler passed over a step of some ranks, those come a step later. Whoever is there already waits, and who
wants something else than a round takes part in those that others still make.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.engine.outer_step import square_sum
from thinwire.errors import FrameError
from thinwire.kernels import GRADIENT_LIMIT, first_nonfinite
from thinwire.reducer import Reducer
from thinwire.transport import overhead

ROUND, DETACH = "optimizer.step()", "detach()"
WISHES = (ROUND, "averaged()", "switch()", DETACH, "state_dict(all_ranks=True)", "load_state_dict()")


@dataclass(frozen=True)
class Arrival:
    """What a rank says there."""

    wish: str
    step: int  # optimizer steps so far
    apart: bool  # it has made steps since the last round
    finite: bool
    square: float  # of the length of its difference


def meeting(reducer: Reducer, wish: str, apart: bool, differences: Mapping[str, Tensor]) -> list[Arrival]:
    """What every rank says, by rank; collective."""
    net, flat = reducer.nets.own, [one.reshape(-1) for one in differences.values()]
    finite = first_nonfinite(flat, GRADIENT_LIMIT) is None
    square = square_sum(flat) if finite else 0.0
    mine = [WISHES.index(wish), reducer.progress.step, apart, finite, square]
    frame = torch.tensor(mine, dtype=torch.float64).view(torch.uint8)
    frames: list[Tensor] = []

    def meet() -> None:
        net.stage = f"meet the other ranks in {wish}"
        with overhead(net):
            frames.extend(net.all_gather(frame))

    reducer.nets.step = reducer.progress.step
    reducer.worker.run(meet)
    return [_arrival(rank, frame.cpu().clone().view(torch.float64).tolist()) for rank, frame in enumerate(frames)]


def _arrival(rank: int, row: list[float]) -> Arrival:
    wish, step, apart, finite, square = row
    if wish not in range(len(WISHES)) or not (0 <= step < 2**53 and step.is_integer()):
        raise FrameError(f"bad frame from rank {rank}: it does not say what the rank wants and at which step")
    return Arrival(WISHES[int(wish)], int(step), bool(apart), bool(finite), square)
