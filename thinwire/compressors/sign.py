"""The bare sign, one bit an element: signSGD's vote."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.compressors.base import PlainCompressor
from thinwire.engine.context import ExchangeContext
from thinwire.engine.flat_gradient import Gradient, as_flat
from thinwire.engine.layout import Layout
from thinwire.engine.payloads import Signs
from thinwire.engine.topk_hint import Candidates
from thinwire.engine.traffic_plan import Budget
from thinwire.kernels import coins, stream_key


@dataclass(frozen=True)
class Sign(PlainCompressor):
    """sign(x). One bit has no room for 0, so an exact zero votes by a fair, reproducible coin: a fixed side would push
    every unused weight the same way at every step."""

    def budget(self, layout: Layout) -> Budget:
        return Budget()

    def compress(
        self,
        context: ExchangeContext,
        x: Gradient,
        agreed: Tensor | None,
        rank: int,
        candidates: Candidates | None = None,
    ) -> Signs:
        x = as_flat(x)
        negative = x < 0
        zero = x == 0
        if bool(zero.any()):
            streams = [(stream_key(0, context.step, rank, s.name), 0, s.numel) for s in context.layout.coded]
            negative |= zero & coins(streams, x.device)
        no_scales = torch.zeros(0, dtype=torch.float32, device=x.device)
        return Signs(negative, no_scales, tuple((s.numel, 1) for s in context.layout.coded))
