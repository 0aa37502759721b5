"""What an exchange really sends, and the written format's formulas for it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import plain_wire as plain
import torch
from means import mean_of
from torch import Tensor

from thinwire.engine.context import ExchangeContext, Hyper
from thinwire.engine.layout import Layout
from thinwire.methods import Method, Noop
from thinwire.transport import ThreadNet, ThreadWorld


def sparse_nbytes(values: str, indices: str, numel: int, k: int, tail: int, spread: Any = ()) -> int:
    """The document's formula."""
    sections = {"fp32": 4 * k, "fp16": plain.padded(2 * k), "bf16": plain.padded(2 * k),
                "int8": 4 * -(-k // 256) + plain.padded(k),
                "int4": 4 * -(-k // 128) + plain.padded(-(-k // 2)),
                "int2": 4 * -(-k // 64) + plain.padded(-(-k // 4))}  # fmt: skip
    return 36 + 4 * tail + sections[values] + plain.index_budget(indices, numel, k, spread=spread)


def layout_of(sizes: list[int], tail: int = 0) -> Layout:
    rows = [(f"w{i}", i, n, True) for i, n in enumerate(sizes)]
    return Layout.of(rows + ([("bias", len(sizes), tail, False)] if tail else []))


def traffic(method: Method, layout: Layout, size: int, seed: int = 0) -> list[Any]:
    """One exchange of every rank through the method's real parts; returns the ranks' counters."""
    hypers = (Hyper(lr=0.1),) * len(layout.segments)
    weights = tuple(torch.zeros(segment.numel) for segment in layout.segments)

    # Read by one thread: torch's lock of the generator and the interpreter's can wait for each other.
    before = torch.get_rng_state()

    def work(net: ThreadNet) -> tuple[Any, Tensor]:
        aggregator = method.aggregator(net, optimizer_is_sgd=True)
        grad = np.random.default_rng([seed, net.rank]).standard_normal(layout.numel, dtype=np.float32)
        mean = mean_of(aggregator, ExchangeContext(layout, 3, hypers, weights), torch.from_numpy(grad))
        return net.traffic, mean

    results = ThreadWorld(size).run(work)
    assert torch.equal(before, torch.get_rng_state())
    if not isinstance(method, Noop):
        assert all(torch.equal(mean, results[0][1]) for _, mean in results)
    return [counters for counters, _ in results]


def slices(numel: int, size: int) -> list[int]:
    return [numel * (r + 1) // size - numel * r // size for r in range(size)]


def ceil4(bits: int) -> int:
    return plain.padded(math.ceil(bits / 8))
