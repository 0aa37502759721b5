"""Contexts of a few tensors."""

from __future__ import annotations

from thinwire.engine.context import ExchangeContext, Hyper
from thinwire.engine.layout import Layout


def context_of(sizes: list[int], step: int = 0) -> ExchangeContext:
    rows = [(f"p{i}", i, n, True) for i, n in enumerate(sizes)]
    return ExchangeContext(Layout.of(rows), step, (Hyper(),) * len(rows))
