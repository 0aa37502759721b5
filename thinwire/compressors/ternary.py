"""TernGrad: stochastic ternary gradients with one scaler per tensor, or one in all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.engine.context import ExchangeContext
from thinwire.engine.flat_gradient import Gradient
from thinwire.engine.layout import Layout
from thinwire.engine.payloads import TernaryDraw
from thinwire.engine.topk_hint import Candidates
from thinwire.engine.traffic_plan import Budget
from thinwire.kernels import clipped_scalers, stream_key


@dataclass
class Ternarize:
    """s * sign(g) * b with P(b = 1) = |g| / s (Eq. 1-3) of the clipped gradient (Eq. 21).

    Unbiased for the clipped gradient; clipping itself is a bias, by design. The scaler is this rank's largest
    magnitude, or with ``share_scaler`` the largest of all ranks (Eq. 4), agreed on through ``measure``.

    With ``whole_model`` all tensors of the exchange have one scaler, the largest of theirs: what the paper improves on
    with its layer-wise ternarizing (section 3.3). Limits stay those of the tensors, because clipping is the paper's
    answer to the range within a layer, and the scaler the one to the range across layers.
    """

    clip_sigma: float | None = 2.5
    share_scaler: bool = True
    seed: int = 0
    whole_model: bool = False
    # What measure() computed of a vector, for the compress() of the same exchange: a pass over memory less.
    _measured: tuple[ExchangeContext, tuple[Tensor, ...], Tensor | None] | None = field(
        default=None, init=False, repr=False, compare=False
    )

    def _parts(self, context: ExchangeContext, x: Gradient) -> tuple[Tensor, ...]:
        return tuple(x[segment.span] for segment in context.layout.coded) if isinstance(x, Tensor) else tuple(x)

    def _scalers(self, context: ExchangeContext, parts: tuple[Tensor, ...]) -> tuple[Tensor, Tensor | None]:
        """Every tensor's scaler, (T,), and clipping limit (Eq. 2 and 21), (T,); no limit without clipping."""
        if parts:
            return clipped_scalers(parts, self.clip_sigma)
        # What an exchange without any tensor to ternarize is computed on only its parameters show.
        device = context.weights[0].device if context.weights else None
        return torch.zeros(0, dtype=torch.float32, device=device), None

    def budget(self, layout: Layout) -> Budget:
        scalers = min(1, len(layout.coded)) if self.whole_model else len(layout.coded)
        return Budget(scales=len(layout.coded), agreed=scalers if self.share_scaler else 0)

    def stages(
        self,
        context: ExchangeContext,
        x: Tensor,
        agree: Callable[[Tensor | None], Tensor | None],
        rank: int,
    ) -> dict[str, Tensor]:  # x: (c,) float32
        """What becomes of a vector on its way, for histograms; ``agree`` takes the largest of all ranks' numbers.

        Not the ternary values where one scaler belongs to the whole model, of which x may be a part.
        """
        clipped, limits = x.clone(), self._scalers(context, self._parts(context, x))[1]
        if limits is not None:
            for segment, limit in zip(context.layout.coded, limits, strict=True):
                clipped[segment.span].clamp_(-limit, limit)
        if self.whole_model:
            return {"clipped": clipped}
        agreed = agree(self.measure(context, x))
        return {"clipped": clipped, "ternary": self.compress(context, x, agreed, rank).values()}

    def hint(self, context: ExchangeContext, device: torch.device) -> None:
        return None

    def measure(self, context: ExchangeContext, x: Gradient) -> Tensor | None:
        if not self.share_scaler or not context.layout.coded:  # without scalers there is nothing to agree on
            return None
        parts = self._parts(context, x)
        scalers, limits = self._scalers(context, parts)
        self._measured = (context, parts, limits)
        return scalers.max()[None] if self.whole_model else scalers

    def compress(
        self,
        context: ExchangeContext,
        x: Gradient,
        agreed: Tensor | None,
        rank: int,
        candidates: Candidates | None = None,
    ) -> TernaryDraw:
        parts, (measured, self._measured) = self._parts(context, x), (self._measured, None)
        if agreed is not None and measured is not None and measured[0] is context and _same(measured[1], parts):
            scalers, limits = agreed, measured[2]
        else:
            scalers, limits = self._scalers(context, parts)
            scalers = agreed if agreed is not None else scalers
        if self.whole_model and parts:
            scalers = scalers.max().repeat(len(parts))
        keys = tuple(stream_key(self.seed, context.step, rank, segment.name) for segment in context.layout.coded)
        return TernaryDraw(parts, scalers, limits, keys, (0,) * len(parts))


def _same(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return [(t.data_ptr(), t.numel()) for t in a] == [(t.data_ptr(), t.numel()) for t in b]
