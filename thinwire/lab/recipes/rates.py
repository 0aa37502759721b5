"""Learning-rate schedules, as functions of the steps a run has."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler


def cosine(optimizer: Optimizer, num_steps: int, warmup: float = 0.0) -> LRScheduler:
    """Half a cosine from the full rate to zero, multiplied by a linear rise over the share `warmup` of all steps."""
    num_warmup = max(1, round(num_steps * warmup))
    return LambdaLR(
        optimizer,
        lambda step: min(1.0, (step + 1) / num_warmup) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / num_steps))),
    )


def polynomial(optimizer: Optimizer, num_steps: int, power: float) -> LRScheduler:
    """(1 - step / num_steps) ** power: TernGrad, section 4, with power 0.5."""
    return LambdaLR(optimizer, lambda step: max(0.0, 1 - step / num_steps) ** power)
