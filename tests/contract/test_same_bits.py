"""Same inputs, same bits: on every rank, on every rerun, and never a draw from the user's generators."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import workers
from cluster import Cluster
from workers import Run, Training

import thinwire

STEPS = 50
METHODS = [
    ("heavy", thinwire.DGC(density=0.01, warmup=20, values="fp32", factor_masking=True)),
    ("heavy", thinwire.GTopK(density=0.01)),
    ("adam", thinwire.TernGrad(seed=3, dense_below=0)),
    ("nesterov", thinwire.BlockSign(dense_below=1)),
    ("adam", thinwire.GradientDropping(density=0.01)),
    ("tiny", thinwire.SignSGD()),
    ("heavy", thinwire.Dense(dtype="bf16")),
]
VARIANTS = [
    ("groups", thinwire.DGC(density=0.02, selection="sampled", values="int8", dense_below=0, factor_masking=True)),
    ("heavy", thinwire.DGC(density=0.02, clip_norm=2.0, values="fp16", indices="delta16", factor_masking=True)),
    ("groups", thinwire.GTopK(density=0.02, momentum_correction=True, values="int8", dense_below=100)),
    ("heavy", thinwire.TernGrad(share_scaler=False, topology="server", exclude=("d",), dense_below=0)),
    ("groups", thinwire.BlockSign(block=64, topology="server", dense_below=1)),
    ("adamw", thinwire.BlockSign(two_way=False, dense_below=1)),
    ("adamw", thinwire.SignSGD()),
    ("nesterov", thinwire.Dense(dtype="fp16")),
    ("nesterov", thinwire.Dense()),
]


@pytest.mark.parametrize("N", [2, 3, 4, 5])
def test_all_ranks_have_the_same_bits_after_50_steps_of_every_method(cluster: Cluster, N: int) -> None:
    runs = [Run(method, optimizer, STEPS, trajectory=False) for optimizer, method in METHODS]
    if N == 3:
        runs += [Run(method, optimizer, STEPS, trajectory=False) for optimizer, method in VARIANTS]
    everybody = cluster.run(workers.train, N, runs)
    for run, *results in zip(runs, *everybody, strict=True):
        digests = {workers.digest(result["final"]) for result in results}
        assert len(digests) == 1, f"{run.method}: the replicas differ"
        assert results[0]["final"].isfinite().all()


def test_rerun_gives_the_same_bits_of_parameters_and_of_everything_kept(cluster: Cluster) -> None:
    runs = [Run(method, optimizer, 6, "net", trajectory=False) for optimizer, method in METHODS]
    runs += [Run(thinwire.GradientDropping(density=0.05, local="error", sync_every=4), "adam", 6)]
    for results in cluster.run(workers.train, 4, runs + runs):
        first, second = results[: len(runs)], results[len(runs) :]
        for run, a, b in zip(runs, first, second, strict=True):
            assert torch.equal(a["final"], b["final"]), run.method
            assert a["state"] == b["state"], run.method


@pytest.mark.parametrize("N", [2, 5])
def test_local_modes_are_equal_right_after_an_averaging_and_apart_in_between(cluster: Cluster, N: int) -> None:
    base = Run(optimizer="adam", steps=9)
    runs = [
        replace(base, method=thinwire.GradientDropping(density=0.02, local=mode, sync_every=4))
        for mode in ("sum", "partial", "error")
    ]
    runs += [replace(runs[0], optimizer="groups"), replace(runs[1], method="dropping:local=partial,sync_every=1")]
    for run, *results in zip(runs, *cluster.run(workers.train, N, runs), strict=True):
        every = 1 if isinstance(run.method, str) else 4
        for step in range(run.steps):
            digests = {workers.digest(result["trajectory"][step]) for result in results}
            expected = 1 if (step + 1) % every == 0 else N
            assert len(digests) == expected, f"{run.method} after step {step}"


def test_noop_sends_nothing_and_every_rank_goes_its_own_way(cluster: Cluster) -> None:
    results = cluster.run(workers.train, 3, [Run(thinwire.Noop(), "heavy", 4)])
    assert len({workers.digest(result["trajectory"][-1]) for (result,) in results}) == 3
    assert all(result["stats"].bytes_sent == 0 and result["stats"].ratio is None for (result,) in results)


def generators_untouched(group: dist.ProcessGroup, methods: list[Any]) -> list[str]:
    """The methods that moved a global random generator of torch, NumPy or Python."""

    def state() -> str:
        return repr((torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()))

    touched = []
    for method in methods:
        training = Training(group, Run(None, "tiny"))
        before = state()
        training.happen("attach", method)
        for step in range(3):
            training.step(step)
        training.happen("switch", thinwire.Dense())
        if state() != before:
            touched.append(str(method))
        training.happen("detach")
    return touched


def test_users_generators_are_not_touched(cluster: Cluster) -> None:
    methods: list[Any] = [method for _, method in METHODS]
    methods += [thinwire.DGC(density=0.02, selection="sampled", values="fp32", factor_masking=True), thinwire.SignSGD()]
    assert cluster.run(generators_untouched, 3, methods) == [[]] * 3
