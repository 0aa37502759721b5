"""No memory: for methods whose error is meant to average out."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from thinwire.engine.context import ExchangeContext
from thinwire.engine.flat_gradient import Gradient, as_parts
from thinwire.engine.named_state import NamedState
from thinwire.engine.payloads import Accepted
from thinwire.engine.topk_hint import Candidates, TopKHint
from thinwire.kernels import watch


class NoMemory:
    """Nothing is kept: for methods whose error is meant to average out (TernGrad)."""

    state = NamedState()
    watches = True

    @property
    def keeps_residual(self) -> bool:
        return False

    def direct_decay(self, context: ExchangeContext) -> tuple[float, ...]:
        return ()

    def compensate(
        self,
        context: ExchangeContext,
        gradients: Gradient,
        direct_decay: tuple[float, ...],
        hint: TopKHint | None,
        flag: Tensor | None,
    ) -> tuple[Gradient, Candidates | None]:
        if flag is not None:
            watch(as_parts(context.layout, gradients), flag)
        return gradients, None

    def retain(self, context: ExchangeContext, x: Gradient, accepted: Accepted) -> None:
        return

    def rollback(self) -> None:
        return

    def commit(self, context: ExchangeContext, rank: int) -> None:
        return

    def copy_of(self, name: str) -> None:
        return None

    def put_back(self, name: str, copies: Any) -> None:
        return

    def residual_square_sum(self) -> float:
        return 0.0

    def leftover(self, rates: dict[str, float]) -> dict[str, Tensor]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        return
