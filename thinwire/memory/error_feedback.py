"""What was not sent is added to the next gradient."""

from __future__ import annotations

from torch import Tensor

from thinwire.engine.context import ExchangeContext
from thinwire.engine.flat_gradient import Gradient
from thinwire.engine.named_state import RESIDUAL
from thinwire.engine.payloads import Accepted
from thinwire.engine.topk_hint import Candidates, TopKHint
from thinwire.memory.base import StatefulMemory


class ErrorFeedback(StatefulMemory):
    """x = g + e; e = x - accepted (gTop-k Algorithm 4 lines 4-10, gradient dropping Algorithm 1 lines 3-7).

    With a ``decay`` x = g + decay e (SparseLoCo).
    """

    kinds = (RESIDUAL,)

    def compensate(
        self,
        context: ExchangeContext,
        gradients: Gradient,
        direct_decay: tuple[float, ...],
        hint: TopKHint | None,
        flag: Tensor | None,
    ) -> tuple[Gradient, Candidates | None]:
        ratios = None if self.decay == 1.0 else [self.decay] * len(context.layout.segments)
        return self._accumulate(context, gradients, hint, flag, with_velocity=False, ratios=ratios)

    def retain(self, context: ExchangeContext, x: Tensor, accepted: Accepted) -> None:
        accepted.subtract_from(x)  # x is the residual itself
