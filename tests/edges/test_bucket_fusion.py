"""Which buckets travel together: the best grouping of given times, the same on all ranks, and never another result."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from thinwire.edges import bucket_fusion as merging
from thinwire.edges.bucket_fusion import BucketFusion, FusedBuckets, Spent, best_groups, finish, fixed_cost
from thinwire.transport import ThreadNet, ThreadWorld, TorchNet
from thinwire.transport.processes import PAIRWISE_FROM

times = st.floats(0.0, 10.0)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    gaps=st.lists(times, min_size=1, max_size=7), data=st.data(), saving=st.floats(0.0, 1.0), each=st.floats(0.0, 1.0)
)
def test_best_groups_end_as_early_as_any_grouping(
    gaps: list[float], data: st.DataObject, saving: float, each: float
) -> None:
    """Up to a hundredth; and among those that end as early none has fewer groups."""
    ready = [sum(gaps[: i + 1]) for i in range(len(gaps))]
    cost = [saving + data.draw(times) for _ in gaps]
    plan, last = best_groups(ready, cost, saving, each), len(gaps) - 1
    groupings = [(*inner, last) for n in range(last + 1) for inner in combinations(range(last), n)]
    assert plan in groupings
    ends = {grouping: finish(ready, cost, saving, grouping, each) for grouping in groupings}
    enough = 1.01 * min(ends.values())
    assert ends[plan] <= enough + 1e-9
    assert not [g for g, end in ends.items() if len(g) < len(plan) and end <= enough - 1e-9]


def test_best_groups_join_for_latency_and_part_for_backward() -> None:
    """High latency joins everything, a long backward hides what comes early, and no exchange is made for nothing."""
    assert best_groups([0, 1, 2], [5.0, 5.0, 5.0], 4.9) == (2,)
    assert best_groups([0, 1, 2], [1.5, 1.5, 1.5], 0.0) == (0, 1, 2)
    assert best_groups([0, 1, 2], [0.5, 0.5, 0.5], 0.0) == (1, 2)  # the first two end before the last begins anyway
    assert best_groups([0, 1, 100, 100.1], [5.0, 5.0, 5.0, 5.0], 4.0)[-2:] == (1, 3)
    assert best_groups([0, 1, 2], [1.5, 1.5, 1.5], 0.0, each=2.0) == (2,)  # what an exchange delays backward by
    assert best_groups([], [], 1.0) == ()
    assert fixed_cost([1, 2, 3], [1.1, 1.2, 1.3]) == pytest.approx(1.0)
    assert fixed_cost([1, 2, 3], [3.0, 2.0, 1.0]) == 1.0 and fixed_cost([2, 2], [3.0, 4.0]) == 3.0


def test_crowding_tells_busy_cores() -> None:
    free, shared = Spent(1.0, 1.0, 0), Spent(3.0, 1.5, 0)
    assert merging.crowding([merging._Pass(spent=[free, free])]) == 0.0
    assert merging.crowding([merging._Pass(spent=[free]), merging._Pass(spent=[shared])]) == pytest.approx(0.6)
    assert merging.crowding([merging._Pass(spent=[shared, shared])]) == 1.0
    assert merging.crowding([merging._Pass(spent=[Spent(1.0, 0.0, 0)])]) == 0.0


def test_merger_makes_the_same_plan_on_ranks_with_other_times() -> None:
    """Agreed on in the fourth pass of equal buckets; other buckets end the plan, on all ranks alike."""

    def work(net: ThreadNet) -> list[Any]:
        merger, seen = BucketFusion(), []
        for buckets in ([9, 5], *[[9, 7, 5, 0]] * 6, [9, 6, 0], [9, 6, 0]):
            begins = []
            for ordinal in buckets:
                begins.append(merger.arrived(ordinal, 1000 * (ordinal + 1), ordinal == buckets[-1]))
                if begins[-1]:
                    spent = Spent(0.2 + 0.1 * net.rank, 0.2, 1000)
                    merger.exchanged(spent, ordinal == buckets[-1], net)
            seen.append((begins, merger.plan))
        assert net.traffic.handed == 0
        return seen

    everybody = ThreadWorld(3).run(work)
    assert everybody[0] == everybody[1] == everybody[2]
    passes = everybody[0]
    assert all(begins == [True] * len(begins) and plan is None for begins, plan in passes[:4])
    assert passes[4][1] == (3,)  # backward took no time here, so that all is joined
    assert passes[5] == ([False, False, False, True], (3,)) and passes[6] == passes[5]
    assert passes[7] == ([False, True, True], None)


@pytest.mark.parametrize("rounds", [1, 3])
def test_merging_counts_every_latency(monkeypatch: pytest.MonkeyPatch, rounds: int) -> None:
    """Latency 1 s and nothing else: an exchange costs its rounds, and joining two saves as much."""
    asked: list[tuple[list[float], float]] = []

    def best(ready: Any, cost: Any, saving: float, each: float = 0.0) -> tuple[int, ...]:
        asked.append(([round(one, 3) for one in cost], round(saving, 3)))
        return (len(cost) - 1,)

    monkeypatch.setattr(merging, "_all_gather_s", lambda net, nbytes, calls: 1.0)
    monkeypatch.setattr(merging, "best_groups", best)

    def work(net: ThreadNet) -> None:
        merger = BucketFusion(rounds=rounds)
        for _ in range(5):
            for ordinal in (9, 0):
                if merger.arrived(ordinal, 1000, ordinal == 0):
                    merger.exchanged(Spent(0.0, 0.0, 1000), ordinal == 0, net)

    ThreadWorld(2).run(work)
    assert asked == [([float(rounds)] * 2, float(rounds))] * 2


def measured(group: dist.ProcessGroup) -> tuple[int, int]:
    """How many rounds the all-gathers need by which buckets are grouped: of tiny frames and of long ones."""
    net = TorchNet(group, torch.device("cpu"))
    rounds: list[int] = []

    def counted(*operations: Any, **options: Any) -> None:
        rounds.append(1)
        TorchNet._point_to_point(net, *operations, **options)

    net._point_to_point = counted  # type: ignore[method-assign]
    merging._all_gather_s(net, 64, 1)
    tiny = len(rounds)
    merging._all_gather_s(net, PAIRWISE_FROM, 1)
    return tiny, len(rounds) - tiny


def test_merging_measures_bandwidth_the_way_that_frames_go(cluster: Any) -> None:
    assert cluster.run(measured, 3) == [(0, 2)] * 3


def trained(group: dist.ProcessGroup, spec: str, way: str) -> tuple[torch.Tensor, Any]:
    """Eight steps of a model of several buckets; its parameters and the plan."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(5)]
    model = DDP(nn.Sequential(*layers, nn.Linear(64, 3)), process_group=group, bucket_cap_mb=0.02)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    choose = merging.best_groups
    ways = {"alone": lambda r, *_: tuple(range(len(r))), "all": lambda r, *_: (len(r) - 1,), "measured": choose}
    merging.best_groups = ways[way]
    try:
        wire = thinwire.attach(model, optimizer, spec)
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(dist.get_rank(group)))
        for _ in range(8):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        plan = wire.edge._plan.fusion.plan if isinstance(wire.edge._plan, FusedBuckets) else None
        wire.detach()
    finally:
        merging.best_groups = choose
    return torch.cat([p.detach().flatten() for p in model.parameters()]), plan


@pytest.mark.parametrize(
    "spec",
    [
        "dgc:density=0.05,dense_below=0,values=fp32,factor_masking=true",
        "terngrad:dense_below=0",
        "blocksign:dense_below=1",
    ],
)
def test_merging_changes_no_bit(cluster: Any, spec: str) -> None:
    results = {way: cluster.run(trained, 3, spec, way) for way in ("alone", "all", "measured")}
    for way, ranks in results.items():
        assert all(torch.equal(ranks[0][0], parameters) for parameters, _ in ranks)
        assert all(plan == ranks[0][1] and plan is not None for _, plan in ranks), way
        assert torch.equal(ranks[0][0], results["alone"][0][0]), way
    assert len(results["alone"][0][1]) > 2 and len(results["all"][0][1]) == 1


def forced(group: dist.ProcessGroup, how: str) -> tuple[torch.Tensor, int]:
    """Eight steps with THINWIRE_MERGE; the parameters, and the exchanges of the last step."""
    calls: list[int] = []
    exchange = thinwire.Reducer.exchange

    def counted(reducer: Any, gradients: Any, hypers: Any, step: int, *arguments: Any, **named: Any) -> None:
        calls.append(step)
        exchange(reducer, gradients, hypers, step, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("THINWIRE_MERGE", how)
        patch.setattr(thinwire.Reducer, "exchange", counted)
        parameters, plan = trained(group, "dgc:density=0.05,dense_below=0,values=fp32,factor_masking=true", "measured")
    assert plan is None
    return parameters, calls.count(max(calls))


def test_merging_can_be_forced_by_the_environment(cluster: Any) -> None:
    (alone, many), (together, one) = cluster.run(forced, 2, "none")[0], cluster.run(forced, 2, "all")[0]
    assert many > 2 and one == 1 and torch.equal(alone, together)


def mixed(group: dist.ProcessGroup) -> str:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError) as raised:
        patch.setenv("THINWIRE_MERGE", ("all", "none")[dist.get_rank(group)])
        model = DDP(nn.Linear(2, 2), process_group=group)
        thinwire.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "terngrad")
    return str(raised.value)


def test_merging_must_be_forced_alike_on_all_ranks(cluster: Any) -> None:
    assert all("THINWIRE_MERGE" in said for said in cluster.run(mixed, 2))


def test_merging_of_an_unknown_kind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THINWIRE_MERGE", "some")
    with pytest.raises(ValueError, match="THINWIRE_MERGE must be one of auto, none, all, not 'some'"):
        merging.choice()


@pytest.mark.parametrize("spec", ["gtopk", "dense", "noop", "dgc:values=int8", "dgc:values=int4", "dgc:values=int2"])
def test_merging_leaves_whole_models_and_fixed_groups_alone(cluster: Any, spec: str) -> None:
    assert all(plan is None for _, plan in cluster.run(trained, 2, spec, "measured"))
