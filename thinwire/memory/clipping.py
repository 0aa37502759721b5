"""Local clipping: a policy around a memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thinwire.engine.context import ExchangeContext
from thinwire.engine.gradients import Gradient, as_parts
from thinwire.engine.hints import TopKHint


class LocalClipping:
    """A policy around a memory: a worker's whole gradient is clipped before it is accumulated (DGC, section 2.2).

    The paper scales the threshold by N^-1/2 for gradients that carry a factor 1/N already (Eq. 3) and are added up.
    Ours are averaged, so they are N times as long and the threshold is clip_norm * sqrt(N): where the workers'
    gradients differ by more than they have in common, as the paper assumes, their mean then has a norm of about
    clip_norm, as if it had been clipped itself; where they all point the same way it can be sqrt(N) times that.
    """

    def __init__(self, inner: Any, clip_norm: float, ranks: int) -> None:
        self.inner = inner
        self.state = inner.state
        self.threshold = clip_norm * ranks**0.5
        self.retain = inner.retain
        self.watches, self.applied = inner.watches, inner.applied
        self.forget, self.commit = inner.forget, inner.commit
        self.residual_square_sum = inner.residual_square_sum
        self.leftover = inner.leftover
        self.state_dict = inner.state_dict
        self.load_state_dict = inner.load_state_dict

    def compensate(self, context: ExchangeContext, grad: Gradient, hint: TopKHint | None = None) -> Tensor:
        parts = as_parts(context.layout, grad)
        # In float64, where no finite gradient's norm overflows.
        norms = torch._foreach_norm(list(parts), 2, dtype=torch.float64)
        factor = (self.threshold / (torch.linalg.vector_norm(torch.stack(norms)) + 1e-6)).clamp(max=1.0)
        factor = torch.where(torch.isnan(factor), 1.0, factor)  # the nan is found where it is, and not everywhere
        torch._foreach_mul_(list(parts), factor.to(parts[0].dtype))
        x: Tensor = self.inner.compensate(context, parts, hint)
        return x
