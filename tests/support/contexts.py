"""Contexts of a few tensors, and an aggregator's mean as one vector."""

from __future__ import annotations

from torch import Tensor

from thinwire.engine.context import ExchangeContext, Hyper
from thinwire.engine.layout import Layout
from thinwire.engine.protocols import Aggregator


def context_of(sizes: list[int], step: int = 0) -> ExchangeContext:
    rows = [(f"p{i}", i, n, True) for i, n in enumerate(sizes)]
    return ExchangeContext(Layout.of(rows), step, (Hyper(),) * len(rows))


def mean_of(aggregator: Aggregator, context: ExchangeContext, gradient: Tensor) -> Tensor:  # (n,) -> (n,)
    """What reduce() makes of a flat gradient, which stays as it is."""
    flat = gradient.clone()
    aggregator.reduce(context, context.layout.split(flat))
    return flat
