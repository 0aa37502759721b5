"""A collective says how many latencies an exchange contains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from workers import noise

import thinwire
from thinwire.engine.aggregators import Exchange
from thinwire.engine.context import ExchangeContext, Hyper
from thinwire.engine.layout import Layout
from thinwire.transport import ThreadNet, ThreadWorld

SPECS = ["dgc", "dropping", "gtopk", "terngrad:dense_below=0", "terngrad:dense_below=0,share_scaler=false",
         "terngrad:dense_below=0,topology=server", "blocksign", "blocksign:topology=server", "blocksign:two_way=false",
         "signsgd", "signsgd:topology=server"]  # fmt: skip


class CountingNet(ThreadNet):
    """Counts how often this rank waits for others; one call may be made of others."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        super().__init__(world, rank)
        self.waits = self._depth = 0

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in ("all_gather", "gather_each", "all_to_all", "all_reduce", "swap"):
            return found

        def counted(*args: Any, **options: Any) -> Any:
            self.waits += not self._depth
            self._depth += 1
            result = found(*args, **options)
            result = iter(list(result)) if name == "gather_each" else result
            self._depth -= 1
            return result

        return counted


def waits(net: ThreadNet, spec: str) -> tuple[float, int]:
    """What a collective says, and what an exchange of it does."""
    method, counting = thinwire.parse_method(spec), CountingNet(net.world, net.rank)
    layout = method.layout([("a", 0, torch.Size([40, 500])), ("b", 1, torch.Size([30]))])
    weights = tuple(torch.ones(segment.numel) for segment in layout.segments)
    gradient = torch.cat([noise((s.numel,), net.rank, 0, s.name) for s in layout.segments])
    aggregator = method.aggregator(counting, True)
    assert isinstance(aggregator, Exchange)
    aggregator.reduce(ExchangeContext(layout, 0, (Hyper(0.1, 0.9),) * 2, weights), list(layout.split(gradient)))
    return aggregator.waits(layout), counting.waits


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("spec", SPECS)
def test_collective_says_how_often_its_ranks_wait(spec: str, size: int) -> None:
    for said, done in ThreadWorld(size).run(lambda net: waits(net, spec)):
        assert said == done


def test_global_topk_takes_two_more_rounds_beyond_a_power_of_two() -> None:
    aggregator, layout = thinwire.GTopK().aggregator(ThreadNet(ThreadWorld(1), 0), True), Layout.of([("a", 0, 9, True)])
    assert [aggregator.plan(layout, size).waits for size in (1, 2, 3, 4, 5, 8, 9)] == [0, 1, 3, 2, 4, 3, 5]
