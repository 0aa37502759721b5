"""Exact means inside a machine, compressed means between machines, whatever the machines' sizes."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers
from cluster import Cluster
from means import mean_of
from torch.nn.parallel import DistributedDataParallel as DDP
from workers import LR, Run, Training, own_part

import thinwire
from thinwire.engine.aggregators import DenseMean
from thinwire.engine.context import ExchangeContext, Hyper
from thinwire.engine.hierarchy import Hierarchy, machine_groups
from thinwire.engine.layout import Layout
from thinwire.errors import NonFiniteError
from thinwire.lab import peers
from thinwire.transport import ThreadNet, ThreadWorld

EXACT = thinwire.DGC(density=1.0, factor_masking=False, values="fp32")
GROUPS = {
    "2+2": (4, [[0, 1], [2, 3]]),
    "2+3": (5, [[0, 1], [2, 3, 4]]),
    "4+1, mixed order": (5, [[3, 0, 4, 1], [2]]),
    "one each": (3, [[0], [1], [2]]),
    "all in one": (3, [[0, 1, 2]]),
}


@pytest.mark.parametrize("name", GROUPS)
def test_hierarchy_with_dense_or_density_one_is_ddp(cluster: Cluster, name: str) -> None:
    N, groups = GROUPS[name]
    methods = [thinwire.Dense(), EXACT, thinwire.GTopK(density=1.0)]
    runs = [Run(None, "groups", 6, "net"), *(Run(m, "groups", 6, "net", hierarchy=groups) for m in methods)]
    for reference, *others in cluster.run(workers.train, N, runs):
        for method, other in zip(methods, others, strict=True):
            torch.testing.assert_close(
                other["trajectory"], reference["trajectory"], rtol=1e-5, atol=3e-6, msg=lambda m, t=method: f"{t}: {m}"
            )


@pytest.mark.parametrize("name", ["2+2", "2+3", "4+1, mixed order"])
def test_hierarchy_loses_nothing_and_all_ranks_have_the_same_bits(cluster: Cluster, name: str) -> None:
    N, groups = GROUPS[name]
    methods = [thinwire.DGC(density=0.02, factor_masking=False, values="int8"), thinwire.BlockSign(dense_below=1)]
    methods += [thinwire.GTopK(density=0.02, momentum_correction=True), thinwire.GradientDropping(density=0.02)]
    optimizers = ["heavy", "heavy", "heavy", "plain"]
    runs = [Run(None, optimizer, 12) for optimizer in ("heavy", "plain")]
    runs += [Run(m, o, 12, hierarchy=groups) for m, o in zip(methods, optimizers, strict=True)]
    everybody = cluster.run(workers.train, N, runs)
    for heavy, plain, *others in everybody:
        for method, optimizer, other in zip(methods, optimizers, others, strict=True):
            reference = heavy if optimizer == "heavy" else plain
            whole = other["final"] - LR * other["leftover"]
            torch.testing.assert_close(
                whole, reference["final"], rtol=1e-4, atol=1e-4, msg=lambda m, t=method: f"{t}: {m}"
            )
            assert other["leftover"].abs().max() > 0.1
    for run, *results in zip(runs, *everybody, strict=True):
        assert len({workers.digest(result["final"]) for result in results}) == 1, run.method


@pytest.mark.parametrize("optimizer", ["heavy", "maximize-nesterov"])
def test_hierarchy_hands_momentum_in_and_out(cluster: Cluster, optimizer: str) -> None:
    """Only first ranks keep velocities; attaching, switching and detaching still leave SGD's trajectory alone."""
    events = {2: ("attach", EXACT), 4: ("switch", thinwire.Dense()), 6: ("switch", EXACT), 8: ("detach",)}
    runs = [Run(None, optimizer, 11, "net")]
    runs += [Run(None, optimizer, 11, "net", events=events, hierarchy=[[0, 1, 2], [3, 4]])]
    for plain, other in cluster.run(workers.train, 5, runs):
        torch.testing.assert_close(other["trajectory"], plain["trajectory"], rtol=1e-5, atol=3e-6)


def test_hierarchy_loses_and_invents_nothing_when_the_method_changes(cluster: Cluster) -> None:
    sparse = thinwire.DGC(density=0.02, factor_masking=False, values="fp32")
    paths = [(sparse, EXACT), (sparse, thinwire.Dense()), (thinwire.BlockSign(dense_below=1), EXACT)]
    runs = [Run(None, "heavy", 10)]
    runs += [Run(a, "heavy", 10, events={5: ("switch", b)}, hierarchy=[[0, 1], [2, 3, 4]]) for a, b in paths]
    for reference, *others in cluster.run(workers.train, 5, runs):
        for path, other in zip(paths, others, strict=True):
            torch.testing.assert_close(
                other["final"], reference["final"], rtol=1e-4, atol=1e-4, msg=lambda m, p=path: f"{p}: {m}"
            )


def test_hierarchy_resumes_from_a_checkpoint(cluster: Cluster) -> None:
    whole = Run(thinwire.BlockSign(dense_below=1), "heavy", 8, hierarchy=2)
    cut = Run(thinwire.BlockSign(dense_below=1), "heavy", 8, hierarchy=2, events={4: ("reload",)})
    for a, b in cluster.run(workers.train, 4, [whole, cut]):
        torch.testing.assert_close(a["trajectory"], b["trajectory"], rtol=1e-5, atol=1e-5)


def test_hierarchy_counts_bytes_inside_apart_and_only_first_ranks_talk_outside(cluster: Cluster) -> None:
    results = cluster.run(
        workers.train, 4, [Run(thinwire.DGC(density=0.02, values="fp32", factor_masking=True), "heavy", 3, hierarchy=2)]
    )
    stats = [result["stats"] for (result,) in results]
    assert all(s.bytes_inside > 0 for s in stats)
    for leader, follower in ((0, 1), (2, 3)):
        assert stats[leader].frame_bytes > 0 and stats[leader].world_size == 2
        assert stats[follower].frame_bytes == stats[follower].bytes_sent == 0 and stats[follower].ratio is None
        assert stats[follower].residual_norm == 0 < stats[leader].residual_norm
        assert "nothing sent" in str(stats[follower])


@pytest.mark.parametrize("value", [
    0, -1, 4, True, 2.5, "three", "", [], [[]], [[], [0, 1, 2]], [0, 1, 2], [[0, 1]], [[0, 1], [1, 2]], [[0, 1, 2, 3]],
    [[0, "a", 2]], [["x"]], [[0, None, 2]], {"a": 1}, pytest.param(object(), id="an object"),
], ids=repr)  # fmt: skip
def test_hierarchy_of_a_senseless_value_is_refused(value: object) -> None:
    text = workers.sentence_of(ValueError, lambda: machine_groups(value, 3))
    assert "hierarchy" in text


@pytest.mark.parametrize("value", [None, "many", "0", "-2", "2"])
def test_hierarchy_auto_needs_a_number_that_divides_the_ranks(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    if value is None:
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", value)
    assert "hierarchy" in workers.sentence_of(ValueError, lambda: machine_groups("auto", 3))


def auto_hierarchy(group: dist.ProcessGroup) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    try:
        training = Training(
            group, Run(thinwire.DGC(density=0.02, values="fp32", factor_masking=True), "heavy", hierarchy="auto")
        )
        training.step(0)
        assert training.wire.stats.world_size == 2
        assert training.wire.state_dict()["hierarchy"] == ((0, 1), (2, 3))
        training.wire.detach()
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]


def test_hierarchy_auto_reads_local_world_size(monkeypatch: pytest.MonkeyPatch, cluster: Cluster) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert machine_groups("auto", 6) == ((0, 1), (2, 3), (4, 5))
    assert machine_groups(3, 6) == ((0, 1, 2), (3, 4, 5))
    assert machine_groups(None, 6) is None
    cluster.run(auto_hierarchy, 4)


def _context(numel: int, step: int = 0) -> ExchangeContext:
    return ExchangeContext(Layout.of([("w", 0, numel, True)]), step, (Hyper(0.1),))


class _Failing:
    """An aggregator whose exchange fails."""

    whole_model, clock = False, None

    def reduce(self, context: ExchangeContext, parts: Any, norms: Any) -> Any:
        raise thinwire.FrameError("bad frame from rank 1: for this test")


@pytest.mark.parametrize("case", ["nan", "failure"])
def test_hierarchy_ends_all_ranks_of_a_machine_alike(case: str) -> None:
    """Dense looks at no gradient: its first rank went on with a nan where the others stopped; and a first rank that
    failed left the others waiting."""

    def work(net: ThreadNet) -> str:
        inner: Any = DenseMean(ThreadNet(ThreadWorld(1), 0), torch.float32) if case == "nan" else _Failing()
        grad = torch.tensor([1.0, float("nan") if case == "nan" and net.rank == 1 else 2.0])
        with pytest.raises(Exception) as caught:
            mean_of(Hierarchy(inner, net, ((0, 1, 2),)), _context(2), grad)
        return type(caught.value).__name__

    expected = [NonFiniteError.__name__] * 3 if case == "nan" else ["FrameError", "ExchangeError", "ExchangeError"]
    assert ThreadWorld(3, timeout_s=10).run(work) == expected


def followers_hold_nothing(group: dist.ProcessGroup) -> list[str]:
    model = DDP(torch.nn.Linear(4, 3), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    wire = thinwire.attach(model, optimizer, "dgc", hierarchy=2)
    held = [kind for kind, vectors in own_part(wire.state_dict())["aggregator"]["memory"].items() if vectors]
    wire.detach()
    return held


def test_hierarchy_gives_the_velocity_to_first_ranks_alone(cluster: Cluster) -> None:
    assert cluster.run(followers_hold_nothing, 4) == [["velocity", "residual"], [], ["velocity", "residual"], []]


# --- all ranks on one machine ------------------------------------------------------------------------


EVERYBODY = [
    thinwire.DGC(density=0.02),
    thinwire.DGC(density=0.02, factor_masking=True, values="fp32", dense_below=0),
    thinwire.GTopK(density=0.02),
    thinwire.GTopK(density=0.02, momentum_correction=True),
    thinwire.TernGrad(dense_below=0),
    thinwire.TernGrad(scaler="model", dense_below=0),
    thinwire.BlockSign(dense_below=1),
    thinwire.BlockSign(topology="server", dense_below=1),
    thinwire.GradientDropping(density=0.02),
    thinwire.GradientDropping(density=0.02, local="partial"),
    thinwire.Dense(dtype="bf16"),
    peers.parse("powersgd"),
]


@pytest.mark.parametrize("n", [2, 3])
def test_hierarchy_of_one_machine_is_dense_with_every_method(cluster: Cluster, n: int) -> None:
    for optimizer in ("heavy", "nesterov-decay"):
        dense = Run(thinwire.Dense(), optimizer, 8, "net")
        runs = [dense, *(Run(method, optimizer, 8, "net", hierarchy=n) for method in EVERYBODY)]
        for reference, *others in cluster.run(workers.train, n, runs):
            for method, other in zip(EVERYBODY, others, strict=True):
                if n == 2 and optimizer == "heavy":  # a sum of two has one order
                    assert torch.equal(other["trajectory"], reference["trajectory"]), method
                torch.testing.assert_close(
                    other["trajectory"],
                    reference["trajectory"],
                    rtol=1e-6,
                    atol=1e-6,
                    msg=lambda m, t=method: f"{t}: {m}",
                )
                assert other["stats"].residual_norm == 0 and not other["leftover"].any(), method
                assert other["stats"].bytes_sent == other["stats"].frame_bytes == 0, method


@pytest.mark.parametrize("method", ["dgc:density=0.02,values=fp32", "blocksign:dense_below=1", "gtopk:density=0.02"])
def test_hierarchy_of_two_machines_goes_on_exactly_on_one(cluster: Cluster, method: str) -> None:
    """What the machines had kept back is sent with the first step, and momentum is not lost."""
    for one, reference in cluster.run(from_two_machines_to_one, 4, method):
        torch.testing.assert_close(one, reference, rtol=1e-5, atol=1e-5)


def from_two_machines_to_one(group: dist.ProcessGroup, method: str) -> tuple[Any, Any]:
    # What gTop-k held back enters momentum late, which is another training; without momentum it is the same sum.
    optimizer = "plain" if method.startswith("gtopk") else "heavy"
    two = Training(group, Run(method, optimizer, hierarchy=2))
    for step in range(4):
        two.step(step)
    assert two.wire is not None
    states: list[Any] = [None] * 4
    dist.all_gather_object(states, two.wire.state_dict(), group=group)
    one = Training(group, Run(method, optimizer, hierarchy=4))
    one.module.load_state_dict(two.module.state_dict())
    one.wire.load_state_dict(states)
    reference = Training(group, Run(None, optimizer))
    for step in range(6):
        reference.step(step)
    for step in range(4, 6):
        one.step(step)
    assert one.wire.stats.residual_norm == 0
    one.wire.detach()
    two.wire.detach()
    return workers.flat(one.module), workers.flat(reference.module)
