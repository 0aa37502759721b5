"""The wire: its numbers, its saved state, leaving it, changing the method, and the momentum that goes in and out."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
import workers
import workers_wire
from cluster import Cluster
from workers import LR, Run

import thinwire

EXACT = thinwire.DGC(density=1.0, factor_masking=False, values="fp32")
EVERY_METHOD = [
    ("groups", thinwire.DGC(density=0.02, warmup=16, values="fp32", factor_masking=True)),
    ("heavy", thinwire.DGC(density=0.02, clip_norm=2.0, values="int8", selection="sampled", factor_masking=True)),
    ("heavy", thinwire.GTopK(density=0.01, warmup=14)),
    ("groups", thinwire.DGC(density=0.02, dense_below=8, scope="model", factor_masking=True)),
    ("nesterov", thinwire.GTopK(density=0.02, factor_masking=True, values="int8")),
    ("groups", thinwire.DGC(density=0.02, lr_rescaling=True)),
    ("adam", thinwire.TernGrad(seed=5, dense_below=0)),
    ("nesterov", thinwire.BlockSign(dense_below=1)),
    ("groups", thinwire.BlockSign(block=100, topology="server", dense_below=1)),
    ("adamw", thinwire.GradientDropping(density=0.01, local="partial", sync_every=7, warmup=14)),
    ("groups", thinwire.GradientDropping(density=0.01, momentum_correction=True)),
    ("tiny", thinwire.SignSGD()),
    ("heavy", thinwire.Dense()),
    ("heavy", thinwire.Noop()),
]


def test_twenty_steps_are_ten_and_a_checkpoint_and_ten_for_every_method(cluster: Cluster) -> None:
    """Through torch.save and torch.load(weights_only=True), into a new module, optimizer, DDP and wire; bit-equal."""
    whole = [Run(method, optimizer, 20) for optimizer, method in EVERY_METHOD]
    cut = [replace(run, events={10: ("reload",)}) for run in whole]
    for results in cluster.run(workers.train, 3, whole + cut):
        for run, a, b in zip(whole, results[: len(whole)], results[len(whole) :], strict=True):
            if isinstance(run.method, thinwire.Dense):
                # A new DDP's first bucket has another order, and a ring adds up by place: so it is in plain DDP.
                torch.testing.assert_close(a["trajectory"], b["trajectory"], rtol=1e-5, atol=1e-6)
                continue
            assert torch.equal(a["trajectory"], b["trajectory"]), run.method
            assert a["state"] == b["state"], run.method


def test_a_checkpoint_taken_right_after_a_switch_keeps_what_is_pending(cluster: Cluster) -> None:
    whole = Run(thinwire.GTopK(density=0.01), "heavy", 8, events={4: ("switch", thinwire.BlockSign(dense_below=1))})
    cut = replace(whole, events={4: [("switch", thinwire.BlockSign(dense_below=1)), ("reload",)]})
    for a, b in cluster.run(workers.train, 3, [whole, cut]):
        assert torch.equal(a["trajectory"], b["trajectory"]) and a["state"] == b["state"]


def test_a_state_that_does_not_fit_raises_and_nothing_is_half_loaded(cluster: Cluster) -> None:
    cluster.run(workers_wire.wrong_states, 3)


def test_counted_bytes_are_the_formats_sizes(cluster: Cluster) -> None:
    cluster.run(workers_wire.counted_bytes, 3)
    cluster.run(workers_wire.counted_bytes, 2)


def test_one_rank_sends_nothing_and_has_no_ratio(cluster: Cluster) -> None:
    methods = [
        thinwire.DGC(),
        thinwire.GTopK(),
        thinwire.BlockSign(dense_below=1),
        thinwire.TernGrad(dense_below=0),
        thinwire.SignSGD(),
    ]
    methods += [thinwire.Dense(dtype=dtype) for dtype in ("fp32", "bf16")]
    (results,) = cluster.run(workers.train, 1, [Run(method, "tiny", 3) for method in methods])
    for method, result in zip(methods, results, strict=True):
        stats = result["stats"]
        assert (stats.frame_bytes, stats.bytes_sent, stats.bytes_received) == (0, 0, 0), method
        assert stats.ratio is None and stats.link_ratio is None and "nothing sent" in str(stats)
        assert stats.steps == 3 and stats.dense_bytes == 3 * 4 * workers.DOT_NUMEL


def test_stats_read_well_and_go_on_over_a_switch_and_after_detach(cluster: Cluster) -> None:
    cluster.run(workers_wire.readable_stats, 2)


@pytest.mark.parametrize("optimizer", ["heavy", "nesterov-decay", "groups", "maximize"])
def test_attaching_and_detaching_at_density_one_does_not_change_the_trajectory(
    cluster: Cluster, optimizer: str
) -> None:
    """Momentum buffers are handed over and back: plain, attached, plain again is all the same to SGD."""
    events = {3: ("attach", EXACT), 6: ("detach",), 8: ("attach", thinwire.GTopK(density=1.0)), 10: ("detach",)}
    runs = [Run(None, optimizer, 12, "net"), Run(None, optimizer, 12, "net", events=events)]
    for plain, other in cluster.run(workers.train, 2, runs):
        torch.testing.assert_close(other["trajectory"], plain["trajectory"], rtol=1e-5, atol=3e-6)


def test_detach_hands_back_the_mean_velocity_and_returns_the_mean_leftover(cluster: Cluster) -> None:
    cluster.run(workers_wire.leaves, 3)


PATHS: dict[str, list[Any]] = {
    "plain": [
        [thinwire.DGC(density=0.02, values="fp32", factor_masking=True), EXACT],
        [thinwire.DGC(density=0.02, values="fp32", factor_masking=True), thinwire.Dense()],
        [
            thinwire.GTopK(density=0.02, values="int8"),
            thinwire.BlockSign(dense_below=1),
            thinwire.DGC(density=0.05, values="fp32", factor_masking=True),
            EXACT,
        ],
        [
            thinwire.BlockSign(topology="server", dense_below=1),
            thinwire.GradientDropping(density=0.02),
            thinwire.GTopK(density=1.0),
        ],
    ],
    "heavy": [
        [thinwire.DGC(density=0.02, factor_masking=False, values="fp32"), EXACT],
        [thinwire.DGC(density=0.02, factor_masking=False, values="fp32"), thinwire.Dense()],
        [thinwire.BlockSign(dense_below=1), EXACT],
        [
            thinwire.BlockSign(dense_below=1),
            thinwire.GTopK(density=0.05, momentum_correction=True),
            thinwire.GTopK(density=1.0),
        ],
        [
            thinwire.Dense(),
            thinwire.DGC(density=0.02, factor_masking=False, values="fp32"),
            thinwire.BlockSign(block=50, dense_below=1),
            EXACT,
        ],
    ],
    "nesterov": [
        [thinwire.DGC(density=0.02, factor_masking=False, values="fp32"), thinwire.Dense()],
        [thinwire.BlockSign(dense_below=1), EXACT],
    ],
    "maximize-plain": [[thinwire.DGC(density=0.02, values="fp32", factor_masking=True), thinwire.Dense()]],
}


@pytest.mark.parametrize("optimizer", PATHS)
def test_switching_loses_and_invents_nothing(cluster: Cluster, optimizer: str) -> None:
    """Constant pulls: after the last switch, to something that leaves nothing out, the parameters are SGD's own."""
    runs = [Run(None, optimizer, 20)]
    for methods in PATHS[optimizer]:
        events = {4 * (place + 1): ("switch", method) for place, method in enumerate(methods[1:])}
        runs.append(Run(methods[0], optimizer, 20, events=events))
    for reference, *others in cluster.run(workers.train, 3, runs):
        for run, other in zip(runs[1:], others, strict=True):
            path = " -> ".join(map(str, [run.method, *(event[1] for event in run.events.values())]))
            apart = (other["trajectory"][3] - reference["trajectory"][3]).abs().max()
            assert apart > 0.01 or "dense" in str(run.method), path
            whole = other["final"] - (-LR if "max" in optimizer else LR) * other["leftover"]
            torch.testing.assert_close(
                whole, reference["final"], rtol=1e-4, atol=1e-4, msg=lambda m, path=path: f"{path}: {m}"
            )


def test_gradient_residuals_go_through_momentum_when_the_method_changes(cluster: Cluster) -> None:
    """What error feedback kept is gradient: the optimizer's momentum acts on it whenever it is applied."""
    events = {4: ("switch", thinwire.Dense())}
    runs = [Run(None, "heavy", 120, trajectory=False)]
    runs += [Run(method, "heavy", 120, events=events, trajectory=False)
             for method in (thinwire.GTopK(density=0.02), thinwire.GradientDropping(density=0.02))]  # fmt: skip
    for reference, *others in cluster.run(workers.train, 2, runs):
        for other in others:
            torch.testing.assert_close(other["final"], reference["final"], rtol=1e-4, atol=2e-4)


def test_the_mean_of_all_ranks_for_the_time_of_a_block(cluster: Cluster) -> None:
    cluster.run(workers_wire.averages_for_a_block, 3)


def test_leaving_a_local_mode_leaves_equal_replicas_that_stay_equal(cluster: Cluster) -> None:
    """Parameters and the optimizer's own state have drifted apart; both are averaged on switch and on detach."""
    local = thinwire.GradientDropping(density=0.02, local="sum", sync_every=100)
    runs = [
        Run(method, optimizer, 8, "net", events={4: event})
        for optimizer in ("heavy", "adam")
        for method in (local, thinwire.Noop())
        for event in (("switch", thinwire.Dense()), ("detach",))
    ]
    for run, *results in zip(runs, *cluster.run(workers.train, 3, runs), strict=True):
        assert len({workers.digest(result["trajectory"][3]) for result in results}) == 3
        for step in (4, 7):
            assert len({workers.digest(result["trajectory"][step]) for result in results}) == 1, f"{run} after {step}"


def test_a_switch_that_is_refused_changes_nothing(cluster: Cluster) -> None:
    cluster.run(workers_wire.refused_switches, 2)


def test_a_detached_wire_says_so(cluster: Cluster) -> None:
    cluster.run(workers_wire.after_detach, 2)


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
@pytest.mark.parametrize("n, last, hierarchy", [(5, False, None), (3, True, None), (5, False, [[0, 1], [2, 3, 4]])])
def test_attaching_again_and_again_costs_no_more_threads(cluster: Cluster, n: int, last: bool, hierarchy: Any) -> None:
    """A Gloo group has threads that poll: a wire that is left must not leave its groups behind."""
    assert max(cluster.run(workers_wire.attached_again_and_again, n, hierarchy, last=last)) <= 2


def test_two_wires_of_one_subgroup_that_come_and_go_have_groups_of_their_own(cluster: Cluster) -> None:
    cluster.run(workers_wire.crossing_wires, 3, last=True)
