"""What all memories share: state by parameter name, one pass that accumulates, and rates of stored errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.engine.context import Turn
from thinwire.engine.gradients import Gradient, as_parts
from thinwire.engine.hints import Scout
from thinwire.engine.named_state import NamedState
from thinwire.engine.payloads import Accepted
from thinwire.kernels import accumulate
from thinwire.memory.rates import RateRatio


class StatefulMemory:
    """The shared handling of named state.

    A memory that ``watches`` keeps out what is not finite by itself and raises the alarm's flag, where there is one.
    """

    kinds: tuple[str, ...] = ()
    watches = True
    ratio: RateRatio | None = None  # where the residual is in units of a learning rate

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.state = NamedState(*self.kinds, dtype=dtype)

    def applied(self, turn: Turn) -> tuple[float, ...]:
        return ()

    def compensate(self, turn: Turn, grad: Gradient, scout: Scout | None = None) -> Tensor:
        raise AssertionError("every memory says how it compensates")

    def _accumulate(
        self,
        turn: Turn,
        grad: Gradient,
        scout: Scout | None,
        *,
        with_velocity: bool,
        coded_decay: bool = True,
        ratios: Sequence[float] | None = None,
    ) -> Tensor:  # -> (n,) the residual
        parts = as_parts(turn.layout, grad)
        residual = self.state.flat("residual", turn.layout, parts[0].device)
        velocity = self.state.flat("velocity", turn.layout, parts[0].device) if with_velocity else None
        found = accumulate(
            parts,
            turn.segments(with_decay=with_velocity, coded_decay=coded_decay),
            velocity,
            residual,
            scout.thresholds if scout else None,
            scout.capacity if scout else 0,
            turn.alarm.flag,
            (scout.room.listing, scout.room.places) if scout is not None and scout.room is not None else None,
            ratios,
        )
        if scout is not None:
            scout.found = found
        return residual

    def retain(self, turn: Turn, x: Tensor, accepted: Accepted) -> None:
        return

    def forget(self) -> None:
        if self.ratio is not None and self.state.dtype != torch.float32:
            self.ratio.undo()  # an exchange that failed changed copies of the state alone
        self.state.forget()

    def settle(self, turn: Turn, rank: int) -> None:
        self.state.settle(turn, rank)
        if self.ratio is not None:
            self.ratio.settled()

    def residual_square_sum(self) -> float:
        return self.state.square_sum("residual") if "residual" in self.kinds else 0.0

    def leftover(self, rates: dict[str, float]) -> dict[str, Tensor]:
        kept = {name: kept.to(torch.float32) for name, kept in self.state.named.get("residual", {}).items()}
        ratio = self.ratio
        return kept if ratio is None else {name: e * ratio.rescale(name, rates[name]) for name, e in kept.items()}

    def state_dict(self) -> dict[str, Any]:
        rates = {"rates": dict(self.ratio.rates)} if self.ratio is not None else {}
        return {**self.state.state_dict(), **rates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state.load_state_dict(state)
        if self.ratio is not None:
            self.ratio.rates = dict(state.get("rates", {}))
