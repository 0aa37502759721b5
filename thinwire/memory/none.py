"""No memory: for methods whose error is meant to average out."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from thinwire.engine.context import Turn
from thinwire.engine.gradients import Gradient, as_parts
from thinwire.engine.hints import Scout
from thinwire.engine.named_state import NamedState
from thinwire.engine.payloads import Accepted
from thinwire.kernels import watch


class NoMemory:
    """Nothing is kept: for methods whose error is meant to average out (TernGrad)."""

    state = NamedState()
    watches = True

    def applied(self, turn: Turn) -> tuple[float, ...]:
        return ()

    def compensate(self, turn: Turn, grad: Gradient, scout: Scout | None = None) -> Gradient:
        if turn.alarm.flag is not None:
            watch(as_parts(turn.layout, grad), turn.alarm.flag)
        return grad

    def retain(self, turn: Turn, x: Gradient, accepted: Accepted) -> None:
        return

    def forget(self) -> None:
        return

    def settle(self, turn: Turn, rank: int) -> None:
        return

    def residual_square_sum(self) -> float:
        return 0.0

    def leftover(self, rates: dict[str, float]) -> dict[str, Tensor]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        return
