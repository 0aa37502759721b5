"""The cost model plans what really travels together: the model's own groups with int8 and int4 values, else buckets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from crossed import Crossed
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from thinwire.advisor import profile
from thinwire.advisor.cost import ExchangeCost, TimedBucket, Workload, bucket_layouts, plan_exchange, predict
from thinwire.advisor.cost.plans import exchanged_rows
from thinwire.advisor.link import Link
from thinwire.advisor.profile import buckets_of, exchanges_of, measure_exchange
from thinwire.engine import fixed_groups as grouping
from thinwire.engine.fixed_groups import fixed_groups
from thinwire.transport import ThreadNet, ThreadWorld

MB = 1 << 18  # elements of float32 in a mebibyte

# Declared in this order, and ready in another: the second tensor, which its group needs, comes last of all.
NUMELS = [30 * MB, 1 * MB, 20 * MB, 6 * MB, 2 * MB]
ROWS = [(f"t{i}", i, torch.Size([64, numel // 64])) for i, numel in enumerate(NUMELS)]
BUCKETS = [
    TimedBucket(0.2, (ROWS[4],)),
    TimedBucket(0.5, (ROWS[0],)),
    TimedBucket(0.7, (ROWS[2], ROWS[3])),
    TimedBucket(0.9, (ROWS[1],)),
]
WORK = Workload(1.0, tuple(BUCKETS))
GROUPED, BUCKETED = ["dgc", "dgc:values=int4"], ["dgc:values=fp32", "terngrad", "blocksign"]


def ordinals(rows: Any) -> tuple[int, ...]:
    return tuple(ordinal for _, ordinal, _ in rows)


@pytest.mark.parametrize("spec", GROUPED)
def test_planned_groups_wait_for_their_last_bucket(spec: str) -> None:
    assert fixed_groups(NUMELS) == [(4,), (3, 2), (1, 0)]
    found = exchanged_rows(thinwire.parse_method(spec), [bucket.rows for bucket in BUCKETS])
    assert [(ordinals(rows), place) for rows, place in found] == [((4,), 0), ((2, 3), 2), ((0, 1), 3)]


@pytest.mark.parametrize("spec", BUCKETED)
def test_planned_exchanges_of_other_methods_are_buckets(spec: str) -> None:
    found = exchanged_rows(thinwire.parse_method(spec), [bucket.rows for bucket in BUCKETS])
    assert [(ordinals(rows), place) for rows, place in found] == [((4,), 0), ((0,), 1), ((2, 3), 2), ((1,), 3)]


def test_planned_exchange_of_the_whole_model_waits_for_the_last_bucket() -> None:
    ((rows, place),) = exchanged_rows(thinwire.parse_method("gtopk:values=int8"), [one.rows for one in BUCKETS])
    assert sorted(ordinals(rows)) == [0, 1, 2, 3, 4] and place == 3


def test_prediction_sends_groups_when_they_are_ready() -> None:
    """A link of nothing but latency, hidden behind backward until the last group: three exchanges, not four."""
    method, hosts = thinwire.parse_method("dgc"), 5
    latency_s = 0.01
    one = predict(method, WORK, Link(latency_s, 0.0), ExchangeCost(0.0), hosts)
    rounds = hosts - 1  # of an all-gather
    assert one.wire_s == pytest.approx(3 * rounds * latency_s)
    assert one.step_s == pytest.approx(0.9 + rounds * latency_s + 0.1)  # what the last group waited for came at 0.9
    plans = [plan_exchange(method, layout, hosts) for layout in bucket_layouts(method, [b.rows for b in BUCKETS])]
    assert one.nbytes == sum(plan.nbytes for plan in plans)


def test_workload_of_known_size_is_ready_from_its_last_tensor_on() -> None:
    """So that its groups become ready on the way, as those of a real model do, and not all at the end."""
    work = Workload.of_size(25_600_000, 0.2)
    buckets = [bucket.rows for bucket in work.buckets]
    found = exchanged_rows(thinwire.parse_method("dgc"), buckets)
    assert [set(ordinals(rows)) for rows, _ in found] == [set(ordinals(rows)) for rows in buckets]
    assert [place for _, place in found] == list(range(len(buckets))) and len(buckets) > 3


def test_rehearsal_of_cut_tensors_keeps_the_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups are found before tensors are cut to a share: cut, all of them would fit into one."""
    method, seen = thinwire.parse_method("dgc"), []

    class Seen(profile.ExchangeBenchmark):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            seen.append([tuple(sorted(s.ordinal for s in layout.segments)) for layout in self.layouts])

    monkeypatch.setattr(profile, "ExchangeBenchmark", Seen)
    rows = tuple((f"t{i}", i, torch.Size([64, 8192])) for i in range(4))  # 2 MiB each
    work = Workload(1.0, (TimedBucket(0.5, rows[2:]), TimedBucket(0.9, rows[:2])))
    assert [ordinals(one) for one in exchanges_of(method, work)] == [(3,), (0, 1, 2)]
    link = Link(0.0, 1e-3)  # so slow that a share is rehearsed

    def work_on(net: ThreadNet) -> None:
        measure_exchange(net, method, work, link, True, torch.device("cpu"), 1, more_hosts=True, longest_s=0.1)

    ThreadWorld(2).run(work_on)
    assert seen == [[(3,), (0, 1, 2)]] * 2


def planned_and_exchanged(group: dist.ProcessGroup) -> tuple[list[Any], list[Any]]:
    """What the cost model says that exchanges of a step carry, and what a wire really exchanges."""
    kept = grouping.FIRST_NBYTES, grouping.LATER_NBYTES
    grouping.FIRST_NBYTES, grouping.LATER_NBYTES = 10_000, 35_000  # several groups in a small model
    try:
        torch.manual_seed(0)
        model = DDP(Crossed((3, 0, 5, 1, 4, 2)), process_group=group, bucket_cap_mb=0.03)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        parameters = dict(model.module.named_parameters())
        work = Workload(1.0, tuple(buckets_of(parameters, {name: float(-i) for i, name in enumerate(parameters)})))
        planned = [tuple(sorted(ordinals(rows))) for rows in exchanges_of(thinwire.DGC(), work)]
        wire = thinwire.attach(model, optimizer, "dgc")
        exchange, exchanged = wire.reducer.exchange, set()

        def noting(gradients: Any, *rest: Any, **options: Any) -> None:
            exchanged.add(tuple(sorted(gradients)))
            exchange(gradients, *rest, **options)

        wire.reducer.exchange = noting  # type: ignore[method-assign]
        for _ in range(3):
            model(torch.ones(4, 64)).square().mean().backward()
        wire.stats  # noqa: B018  # all exchanges are done
        wire.detach()
        return planned, list(exchanged)
    finally:
        grouping.FIRST_NBYTES, grouping.LATER_NBYTES = kept


def test_planned_exchanges_are_those_that_happen(cluster: Any) -> None:
    for planned, exchanged in cluster.run(planned_and_exchanged, 2):
        assert sorted(planned) == sorted(exchanged) and len(planned) == 3
