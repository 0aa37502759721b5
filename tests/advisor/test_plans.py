"""Plans count what the collectives really send."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from workers import noise

import thinwire
from thinwire.advisor.cost import bucket_layouts, plan_exchange
from thinwire.engine.context import ExchangeContext, Hyper
from thinwire.transport import ThreadNet, ThreadWorld

ROWS = [("a.weight", 0, torch.Size([64, 300])), ("a.bias", 1, torch.Size([64])), ("b.weight", 2, torch.Size([9000, 4])),
        ("b.scale", 3, torch.Size([5000]))]  # fmt: skip
SPECS = ["dgc:density=0.01", "dgc:density=0.001,scope=model,dense_below=0", "gtopk:density=0.01",
         "terngrad:dense_below=0",
         "terngrad:dense_below=0,share_scaler=false", "blocksign:dense_below=1",
         "blocksign:dense_below=1,two_way=false", "blocksign:dense_below=1,block=512", "signsgd", "dropping", "dense",
         "dense:dtype=bf16", "noop", "terngrad:dense_below=0,exclude=b.*", "terngrad:dense_below=0,topology=server",
         "signsgd:topology=server", "terngrad:dense_below=0,scaler=model", "terngrad", "terngrad:topology=server",
         "terngrad:exclude=?.weight", "blocksign:topology=server", "blocksign:exclude=?.weight"]  # fmt: skip


def sent(net: ThreadNet, spec: str, *buckets: Any) -> int:
    method = thinwire.parse_method(spec)
    aggregator = method.aggregator(net, True)
    for layout in bucket_layouts(method, buckets or [ROWS]):
        hypers = (Hyper(0.1, 0.9),) * len(layout.segments)
        weights = tuple(torch.zeros(segment.numel) for segment in layout.segments)
        gradient = torch.cat([noise((segment.numel,), net.rank, 0, segment.name) for segment in layout.segments])
        aggregator.reduce(ExchangeContext(layout, 0, hypers, weights), layout.split(gradient))
    return max(net.traffic.sent, net.traffic.received)


@pytest.mark.parametrize("spec", ["dgc:density=0.01,values=fp32", "dropping:density=0.01,scope=balanced"])
def test_plan_of_balanced_quotas_is_right_for_every_bucket(spec: str) -> None:
    """A tensor's quota depends on the whole model, also where it travels with a part of it."""
    method, buckets = thinwire.parse_method(spec), (ROWS[2:], ROWS[:2])
    plans = [plan_exchange(method, layout, 3).nbytes for layout in bucket_layouts(method, buckets)]
    assert sum(plans) == max(ThreadWorld(3).run(lambda net: sent(net, spec, *buckets)))


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("spec", SPECS)
def test_plan_counts_the_bytes_that_cross_the_busiest_link(spec: str, size: int) -> None:
    counted = max(ThreadWorld(size).run(lambda net: sent(net, spec)))
    method = thinwire.parse_method(spec)
    planned = plan_exchange(method, bucket_layouts(method, [ROWS])[0], size).nbytes
    if spec.endswith("topology=server"):  # up and down share the busiest link one after the other
        assert counted <= planned <= 2 * counted
    else:
        # small tensors are served whole by one rank: the ranks' shards differ by that much
        assert planned == pytest.approx(counted, rel=0.12, abs=200), spec


def test_plan_of_a_method_without_a_cost_model_is_refused() -> None:
    class Odd(thinwire.Method):
        name = "odd"

    with pytest.raises(ValueError, match="no cost model of the method 'odd'"):
        plan_exchange(Odd(), bucket_layouts(Odd(), [ROWS])[0], 2)
