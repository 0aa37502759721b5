"""No memory: for methods whose error is meant to average out."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from thinwire.engine.context import ExchangeContext
from thinwire.engine.gradients import Gradient, as_parts
from thinwire.engine.hints import TopKHint
from thinwire.engine.named_state import NamedState
from thinwire.engine.payloads import Accepted
from thinwire.kernels import watch


class NoMemory:
    """Nothing is kept: for methods whose error is meant to average out (TernGrad)."""

    state = NamedState()
    watches = True

    def applied(self, context: ExchangeContext) -> tuple[float, ...]:
        return ()

    def compensate(self, context: ExchangeContext, grad: Gradient, hint: TopKHint | None = None) -> Gradient:
        if context.alarm.flag is not None:
            watch(as_parts(context.layout, grad), context.alarm.flag)
        return grad

    def retain(self, context: ExchangeContext, x: Gradient, accepted: Accepted) -> None:
        return

    def forget(self) -> None:
        return

    def commit(self, context: ExchangeContext, rank: int) -> None:
        return

    def residual_square_sum(self) -> float:
        return 0.0

    def leftover(self, rates: dict[str, float]) -> dict[str, Tensor]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        return
