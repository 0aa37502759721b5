"""Local clipping: a policy around a memory."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.engine.context import ExchangeContext
from thinwire.engine.flat_gradient import Gradient, as_parts
from thinwire.engine.protocols import Memory
from thinwire.engine.topk_hint import Candidates, TopKHint


class LocalClipping:
    """A policy around a memory: a worker's whole gradient is clipped before it is accumulated (DGC, section 2.2).

    The paper scales the threshold by N^-1/2 for gradients that carry a factor 1/N already (Eq. 3) and are added up.
    Ours are averaged, so they are N times as long and the threshold is clip_norm * sqrt(N): where the workers'
    gradients differ by more than they have in common, as the paper assumes, their mean then has a norm of about
    clip_norm, as if it had been clipped itself; where they all point the same way it can be sqrt(N) times that.
    """

    def __init__(self, inner: Memory, clip_norm: float, ranks: int) -> None:
        self.inner, self.state = inner, inner.state
        self.threshold = clip_norm * ranks**0.5
        self.watches = inner.watches
        self.direct_decay, self.retain = inner.direct_decay, inner.retain
        self.rollback, self.commit = inner.rollback, inner.commit
        self.copy_of, self.put_back = inner.copy_of, inner.put_back
        self.residual_square_sum, self.leftover = inner.residual_square_sum, inner.leftover
        self.state_dict, self.load_state_dict = inner.state_dict, inner.load_state_dict

    @property
    def keeps_residual(self) -> bool:
        return self.inner.keeps_residual

    def compensate(
        self,
        context: ExchangeContext,
        gradients: Gradient,
        direct_decay: tuple[float, ...],
        hint: TopKHint | None,
        flag: Tensor | None,
    ) -> tuple[Gradient, Candidates | None]:
        parts = as_parts(context.layout, gradients)
        # In float64, where no finite gradient's norm overflows.
        norms = torch._foreach_norm(list(parts), 2, dtype=torch.float64)
        factor = (self.threshold / (torch.linalg.vector_norm(torch.stack(norms)) + 1e-6)).clamp(max=1.0)
        factor = torch.where(torch.isnan(factor), 1.0, factor)  # the nan is found where it is, and not everywhere
        torch._foreach_mul_(list(parts), factor.to(parts[0].dtype))
        return self.inner.compensate(context, parts, direct_decay, hint, flag)
