"""A wire's state: saved, loaded bit for bit, and refused as a whole where it does not fit."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import workers
from cluster import Cluster
from workers import Run, Training, digest, own_part, sentence_of, tensors_of

import thinwire

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


def test_every_method_resumes_bit_exact(cluster: Cluster) -> None:
    """Through torch.save and torch.load(weights_only=True), into a new module, optimizer, DDP and wire; bit-equal."""
    whole = [Run(method, optimizer, 20) for optimizer, method in EVERY_METHOD]
    cut = [replace(run, events={10: ("reload",)}) for run in whole]
    for results in cluster.run(workers.train, 3, whole + cut):
        for run, a, b in zip(whole, results[: len(whole)], results[len(whole) :], strict=True):
            assert torch.equal(a["trajectory"], b["trajectory"]), run.method
            assert a["state"] == b["state"], run.method


def test_hierarchy_with_a_ring_of_three_inside_a_machine_resumes_bit_exact(cluster: Cluster) -> None:
    methods = (thinwire.DGC(density=0.02, values="fp32"), thinwire.Dense())
    # Several buckets, and a machine of one rank beside: all ranks cut alike.
    options = {"hierarchy": [[0, 1, 2], [3]], "ddp": {"bucket_cap_mb": 0.01}}
    whole = [Run(method, "heavy", 12, **options) for method in methods]
    cut = [replace(run, events={6: ("reload",)}) for run in whole]
    for results in cluster.run(workers.train, 4, whole + cut):
        for run, a, b in zip(whole, results[:2], results[2:], strict=True):
            assert torch.equal(a["trajectory"], b["trajectory"]) and a["state"] == b["state"], run.method


def test_state_right_after_a_switch_keeps_what_is_pending(cluster: Cluster) -> None:
    whole = Run(thinwire.GTopK(density=0.01), "heavy", 8, events={4: ("switch", thinwire.BlockSign(dense_below=1))})
    cut = replace(whole, events={4: [("switch", thinwire.BlockSign(dense_below=1)), ("reload",)]})
    for a, b in cluster.run(workers.train, 3, [whole, cut]):
        assert torch.equal(a["trajectory"], b["trajectory"]) and a["state"] == b["state"]


def saved_and_resumed(group: dist.ProcessGroup, folder: str) -> tuple[Any, Any]:
    """The guide's save and resume: the same bits as without."""
    whole = Training(group, Run("dgc:density=0.02", "heavy"))
    for step in range(6):
        if step == 3:
            path = f"{folder}/{whole.rank}.pt"
            state = {"model": whole.module.state_dict(), "optimizer": whole.optimizer.state_dict()}
            torch.save({**state, "wire": whole.wire.state_dict()}, path)
        whole.step(step)
    resumed = Training(group, Run("dgc:density=0.02", "heavy"))
    saved = torch.load(path, weights_only=True)
    resumed.model.module.load_state_dict(saved["model"])
    resumed.optimizer.load_state_dict(saved["optimizer"])
    resumed.wire.load_state_dict(saved["wire"])
    for step in range(3, 6):
        resumed.step(step)
    resumed.wire.detach()
    whole.wire.detach()
    return workers.flat(resumed.module), workers.flat(whole.module)


def test_save_and_resume_of_the_readme_are_bit_exact(cluster: Cluster, tmp_path: Path) -> None:
    for resumed, whole in cluster.run(saved_and_resumed, 2, str(tmp_path)):
        assert torch.equal(resumed, whole)


def wrong_states(group: dist.ProcessGroup) -> None:
    rank = dist.get_rank(group)
    training = Training(group, Run(thinwire.BlockSign(dense_below=1), "heavy"))
    for step in range(3):
        training.step(step)
    wire = training.wire
    good = wire.state_dict()

    def changed(**changes: Any) -> dict[str, Any]:
        return {**copy.deepcopy(good), **changes}

    def without(key: str) -> dict[str, Any]:
        return {k: v for k, v in good.items() if k != key}

    def inside(room: str, kind: str, **vectors: Any) -> dict[str, Any]:
        state = copy.deepcopy(good)
        own_part(state)["aggregator"][room][kind].update(vectors)
        return state

    def parted(key: str, *value: Any) -> dict[str, Any]:
        state = copy.deepcopy(good)
        part = own_part(state)
        del part[key]
        if value:
            part[key] = value[0]
        return state

    other = Training(group, Run(thinwire.DGC(density=0.02, values="fp32", factor_masking=True), "heavy"))
    other.step(0)
    neighbour = [None] * dist.get_world_size(group)
    dist.all_gather_object(neighbour, good, group=group)
    served = next((name for name, _ in own_part(good)["aggregator"]["collective"]["residual"].items()), "a")
    cases = {
        "method": other.wire.state_dict(),
        "rank": neighbour[(rank + 1) % len(neighbour)],
        "world_size": changed(world_size=7),
        "format": changed(format=99),
        "state_dict": {},
        "'step'": without("step"),
        "'pending'": parted("pending"),
        "'aggregator'": parted("aggregator"),
        "'nowhere'": inside("memory", "residual", nowhere=torch.zeros(3)),
        "'a'": inside("memory", "velocity", a=torch.zeros(3)),
        "'b'": parted("pending", (("b", torch.zeros(3)),)),
    }
    gone = copy.deepcopy(good)
    del own_part(gone)["aggregator"]["collective"]
    cases["'collective'"] = gone
    cases["state"] = None
    stretch = inside("collective", "residual", **{served: torch.zeros(99_999)})
    # As many on every rank, since loading is collective; which tensor is served depends on the rank.
    for word, state in [*cases.items(), (served, stretch)]:
        text = sentence_of(ValueError, lambda state=state: wire.load_state_dict(state))
        assert word.strip("'") in text, (word, text)
        assert digest(*tensors_of(wire.state_dict())) == digest(*tensors_of(good)), f"{word}: something was loaded"
        assert wire.state_dict()["step"] == 3
    wire.load_state_dict(good)
    training.step(3)
    assert wire.stats.steps == 4
    # A hierarchy keeps residuals elsewhere: its state is not a flat wire's.
    flat_state = other.wire.state_dict()
    grouped = Training(
        group, Run(thinwire.DGC(density=0.02, values="fp32", factor_masking=True), "heavy", hierarchy=[[0], [1, 2]])
    )
    assert "hierarchy" in sentence_of(ValueError, lambda: grouped.wire.load_state_dict(flat_state))
    for wire in (training.wire, other.wire, grouped.wire):
        wire.detach()


def test_state_that_does_not_fit_is_refused_and_nothing_is_half_loaded(cluster: Cluster) -> None:
    cluster.run(wrong_states, 3)
