"""Exact means inside a machine, compressed means between machines, whatever the machines' sizes."""

from __future__ import annotations

import pytest
import torch
import workers
import workers_wire
from cluster import Cluster
from workers import LR, Run

import thinwire
from thinwire.engine.hierarchy import machine_groups

EXACT = thinwire.DGC(density=1.0, factor_masking=False, values="fp32")
GROUPS = {
    "2+2": (4, [[0, 1], [2, 3]]),
    "2+3": (5, [[0, 1], [2, 3, 4]]),
    "4+1, mixed order": (5, [[3, 0, 4, 1], [2]]),
    "one each": (3, [[0], [1], [2]]),
    "all in one": (3, [[0, 1, 2]]),
}


@pytest.mark.parametrize("name", GROUPS)
def test_dense_between_machines_is_ddp_and_so_is_dgc_at_density_one(cluster: Cluster, name: str) -> None:
    N, groups = GROUPS[name]
    methods = [thinwire.Dense(), EXACT, thinwire.GTopK(density=1.0)]
    runs = [Run(None, "groups", 6, "net"), *(Run(m, "groups", 6, "net", hierarchy=groups) for m in methods)]
    for reference, *others in cluster.run(workers.train, N, runs):
        for method, other in zip(methods, others, strict=True):
            torch.testing.assert_close(
                other["trajectory"], reference["trajectory"], rtol=1e-5, atol=3e-6, msg=lambda m, t=method: f"{t}: {m}"
            )


@pytest.mark.parametrize("name", ["2+2", "2+3", "4+1, mixed order"])
def test_nothing_is_lost_between_machines_and_all_ranks_have_the_same_bits(cluster: Cluster, name: str) -> None:
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
def test_momentum_goes_in_and_out_of_a_hierarchy(cluster: Cluster, optimizer: str) -> None:
    """Only first ranks keep velocities; attaching, switching and detaching still leave SGD's trajectory alone."""
    events = {2: ("attach", EXACT), 4: ("switch", thinwire.Dense()), 6: ("switch", EXACT), 8: ("detach",)}
    runs = [Run(None, optimizer, 11, "net")]
    runs += [Run(None, optimizer, 11, "net", events=events, hierarchy=[[0, 1, 2], [3, 4]])]
    for plain, other in cluster.run(workers.train, 5, runs):
        torch.testing.assert_close(other["trajectory"], plain["trajectory"], rtol=1e-5, atol=3e-6)


def test_switching_in_a_hierarchy_loses_and_invents_nothing(cluster: Cluster) -> None:
    sparse = thinwire.DGC(density=0.02, factor_masking=False, values="fp32")
    paths = [(sparse, EXACT), (sparse, thinwire.Dense()), (thinwire.BlockSign(dense_below=1), EXACT)]
    runs = [Run(None, "heavy", 10)]
    runs += [Run(a, "heavy", 10, events={5: ("switch", b)}, hierarchy=[[0, 1], [2, 3, 4]]) for a, b in paths]
    for reference, *others in cluster.run(workers.train, 5, runs):
        for path, other in zip(paths, others, strict=True):
            torch.testing.assert_close(
                other["final"], reference["final"], rtol=1e-4, atol=1e-4, msg=lambda m, p=path: f"{p}: {m}"
            )


def test_a_checkpoint_in_a_hierarchy_is_bit_equal(cluster: Cluster) -> None:
    whole = Run(thinwire.BlockSign(dense_below=1), "heavy", 8, hierarchy=2)
    cut = Run(thinwire.BlockSign(dense_below=1), "heavy", 8, hierarchy=2, events={4: ("reload",)})
    for a, b in cluster.run(workers.train, 4, [whole, cut]):
        torch.testing.assert_close(a["trajectory"], b["trajectory"], rtol=1e-5, atol=1e-5)


def test_only_first_ranks_talk_between_machines_and_bytes_inside_are_counted_apart(cluster: Cluster) -> None:
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


def test_auto_reads_local_world_size(monkeypatch: pytest.MonkeyPatch, cluster: Cluster) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert machine_groups("auto", 6) == ((0, 1), (2, 3), (4, 5))
    assert machine_groups(3, 6) == ((0, 1, 2), (3, 4, 5))
    assert machine_groups(None, 6) is None
    cluster.run(workers_wire.auto_hierarchy, 4)


@pytest.mark.parametrize("value", [
    0, -1, 4, True, 2.5, "three", "", [], [[]], [[], [0, 1, 2]], [0, 1, 2], [[0, 1]], [[0, 1], [1, 2]], [[0, 1, 2, 3]],
    [[0, "a", 2]], [["x"]], [[0, None, 2]], {"a": 1}, pytest.param(object(), id="an object"),
], ids=repr)  # fmt: skip
def test_values_that_make_no_sense_are_refused_in_a_sentence(value: object) -> None:
    text = workers.sentence_of(ValueError, lambda: machine_groups(value, 3))
    assert "hierarchy" in text


@pytest.mark.parametrize("value", [None, "many", "0", "-2", "2"])
def test_auto_needs_a_number_that_divides_the_ranks(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    if value is None:
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", value)
    assert "hierarchy" in workers.sentence_of(ValueError, lambda: machine_groups("auto", 3))
