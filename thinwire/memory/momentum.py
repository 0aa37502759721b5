"""Momentum in front of the compression: velocities that accumulate (DGC), or that are sent as they are (Signum)."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.engine.context import ExchangeContext
from thinwire.engine.flat_gradient import Gradient, as_flat, as_parts
from thinwire.engine.named_state import RESIDUAL, VELOCITY
from thinwire.engine.payloads import Accepted
from thinwire.engine.topk_hint import Candidates, TopKHint
from thinwire.kernels import zero_at
from thinwire.memory.base import StatefulMemory, undo_decay
from thinwire.memory.lr_rescaling import RateRatio


def apply_momentum(
    context: ExchangeContext, velocity: Tensor, grad: Tensor
) -> None:  # (n,) float32 both, changed in place
    """velocity = m velocity + grad; grad becomes the velocity, or grad + m velocity for Nesterov: SGD's own update."""
    for span, hyper in context.runs():
        if hyper.momentum:
            velocity[span].mul_(hyper.momentum).add_(grad[span])
            if hyper.nesterov:
                grad[span].add_(velocity[span], alpha=hyper.momentum)
            else:
                grad[span].copy_(velocity[span])


class Velocity(StatefulMemory):
    """Signum: the optimizer's momentum in front of the compression, and no residual.

    u = m u + g; what is sent is u, or g + m u for Nesterov.
    """

    kinds = (VELOCITY,)
    watches = False

    def compensate(
        self,
        context: ExchangeContext,
        gradients: Gradient,
        direct_decay: tuple[float, ...],
        hint: TopKHint | None,
        flag: Tensor | None,
    ) -> tuple[Gradient, Candidates | None]:
        flat = as_flat(gradients)
        velocity = self.state.flat("velocity", context.layout, flat.device)
        undo_decay(context, velocity)
        apply_momentum(context, velocity, flat)
        return flat, None


class MomentumCorrection(StatefulMemory):
    """DGC: u = m u + g, v = v + u (Eq. 4), or v = v + m u + g for Nesterov (Eq. 7); v is what should be sent.

    g includes the weight decay. With ``masking`` the velocity of every coordinate that was sent is cleared (section
    2.3); tensors that travel dense are never masked, because all of their coordinates are always sent and masking
    would take their momentum away altogether.

    With ``direct`` the decay need not wait: every rank knows the weights, so s w is added to the mean of coded tensors
    on all of them without being sent, and taken off what waits: v = v + (u - s w). s = decay / (1 - m) is what momentum
    makes of the decay of weights that stand still. Nothing is lost or added, whatever the weights do meanwhile, and
    with density 1 the result is SGD's.

    Both together: masking would clear the decay's velocity, too, so u and v are without it and s w alone is applied, as
    in the code of DGC's authors. A gradient then loses velocity whenever its element is sent and the decay does not:
    beside each other the decay is the stronger, up to 1 / (1 - m) times where an element is sent at every step.

    With ``rescaling`` v = (eta_{t-1} / eta_t) v + u, as in dist-EF-blockSGDM (Algorithm 4): what waits is applied with
    the learning rates of the steps that it comes from, and not with the one at which it leaves.
    """

    kinds = (VELOCITY, RESIDUAL)

    def __init__(
        self, masking: bool, dtype: torch.dtype = torch.float32, rescaling: bool = False, direct: bool = True
    ) -> None:
        super().__init__(dtype)
        self.masking, self.direct = masking, direct
        self.ratio = RateRatio() if rescaling else None

    def direct_decay(self, context: ExchangeContext) -> tuple[float, ...]:
        if not self.direct:
            return ()
        rows = zip(context.layout.segments, context.hypers, strict=True)
        shares = tuple(hyper.steady_decay if segment.coded else 0.0 for segment, hyper in rows)
        return shares if any(shares) else ()

    def compensate(
        self,
        context: ExchangeContext,
        gradients: Gradient,
        direct_decay: tuple[float, ...],
        hint: TopKHint | None,
        flag: Tensor | None,
    ) -> tuple[Gradient, Candidates | None]:
        ratios = None
        if self.ratio is not None:
            residual = self.state.flat("residual", context.layout, as_parts(context.layout, gradients)[0].device)
            ratios = self.ratio.begin(context, residual)
        return self._accumulate(
            context, gradients, hint, flag, with_velocity=True, coded_decay=not (self.direct and self.masking),
            direct_decay=direct_decay, ratios=ratios,
        )  # fmt: skip

    def retain(self, context: ExchangeContext, x: Tensor, accepted: Accepted) -> None:
        accepted.subtract_from(x)
        if self.ratio is not None:
            self.ratio.end(x)
        if self.masking and accepted.sent is not None:
            sent = accepted.sent if self.ratio is None else self.ratio.that_moved(accepted.sent)
            zero_at(self.state.flat("velocity", context.layout, x.device), sent)
