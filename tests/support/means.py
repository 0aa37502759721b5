"""The mean that an aggregator makes, for tests that want it beside the gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thinwire.engine.context import ExchangeContext


def mean_of(aggregator: Any, context: ExchangeContext, grad: Tensor) -> Tensor:  # (n,) float32 -> (n,) float32
    """The group's mean of a flat gradient, which stays as it is."""
    mean = grad.clone()
    with torch.no_grad():
        aggregator.reduce(context, context.layout.split(mean))
    return mean
