"""dist-EF-blockSGDM's error, rescaled where the learning rate changes."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.engine.context import ExchangeContext
from thinwire.engine.flat_gradient import Gradient, as_parts
from thinwire.engine.named_state import RESIDUAL, VELOCITY
from thinwire.engine.payloads import Accepted
from thinwire.engine.topk_hint import Candidates, TopKHint
from thinwire.kernels import error_step
from thinwire.memory.base import StatefulMemory, undo_decay
from thinwire.memory.lr_rescaling import RateRatio


class RescaledError(StatefulMemory):
    """dist-EF-blockSGDM, Algorithm 4 on the worker: m = mu m + g; p = q + (eta_{t-1} / eta_t) e; e = p - Delta.

    q is mu m + g with Nesterov momentum (the paper's), m with plain momentum, g without. g includes the weight decay
    when ``momentum_moved``: momentum and weight decay are then taken from the user's SGD; otherwise the optimizer
    keeps both.
    """

    ratio: RateRatio

    def __init__(self, momentum_moved: bool, dtype: torch.dtype = torch.float32) -> None:
        self.kinds = (VELOCITY, RESIDUAL) if momentum_moved else (RESIDUAL,)
        super().__init__(dtype)
        self.momentum_moved = momentum_moved
        self.ratio = RateRatio()

    def compensate(
        self,
        context: ExchangeContext,
        gradients: Gradient,
        direct_decay: tuple[float, ...],
        hint: TopKHint | None,
        flag: Tensor | None,
    ) -> tuple[Gradient, Candidates | None]:
        parts = as_parts(context.layout, gradients)
        residual = self.state.flat("residual", context.layout, parts[0].device)
        ratios = [ratio * self.decay for ratio in self.ratio.begin(context, residual)]
        moved = self.momentum_moved and any(hyper.momentum for hyper in context.hypers)
        velocity = self.state.flat("velocity", context.layout, parts[0].device) if moved else None
        if velocity is not None:
            undo_decay(context, velocity, residual)
        error_step(parts, context.segments(with_decay=self.momentum_moved), ratios, velocity, residual, flag)
        return residual, None

    def retain(self, context: ExchangeContext, x: Tensor, accepted: Accepted) -> None:
        accepted.subtract_from(x)
        self.ratio.end(x)
