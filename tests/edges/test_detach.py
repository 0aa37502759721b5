"""Leaving: momentum and leftovers are handed back, threads and groups end, and a detached wire says so."""

from __future__ import annotations

import gc
import os
import sys
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers
from cluster import Cluster
from torch.nn.parallel import DistributedDataParallel as DDP
from workers import DGC, Run, Training, close, digest, flat, own_part, sentence_of

import thinwire

EXACT = thinwire.DGC(density=1.0, factor_masking=False, values="fp32")


@pytest.mark.parametrize("optimizer", ["heavy", "nesterov-decay", "groups", "maximize"])
def test_attaching_and_detaching_at_density_one_does_not_change_the_trajectory(
    cluster: Cluster, optimizer: str
) -> None:
    """Momentum buffers are handed over and back: plain, attached, plain again is all the same to SGD."""
    events = {3: ("attach", EXACT), 6: ("detach",), 8: ("attach", thinwire.GTopK(density=1.0)), 10: ("detach",)}
    runs = [Run(None, optimizer, 12, "net"), Run(None, optimizer, 12, "net", events=events)]
    for plain, other in cluster.run(workers.train, 2, runs):
        torch.testing.assert_close(other["trajectory"], plain["trajectory"], rtol=1e-5, atol=3e-6)


def leaves(group: dist.ProcessGroup) -> None:
    N = dist.get_world_size(group)
    training = Training(
        group, Run(thinwire.DGC(density=0.02, dense_below=0, values="fp32", factor_masking=True), "heavy")
    )
    for step in range(3):
        training.step(step)
    saved = own_part(training.wire.state_dict())["aggregator"]["memory"]
    everybody = [None] * N
    dist.all_gather_object(everybody, saved, group=group)
    rest = training.wire.detach()
    for name, parameter in training.module.named_parameters():
        velocity = sum(memory["velocity"][name] for memory in everybody) / N
        residual = sum(memory["residual"][name] for memory in everybody) / N
        close(training.optimizer.state[parameter]["momentum_buffer"], velocity.view_as(parameter), name)
        close(rest[name], residual.view_as(parameter), name)
        assert rest[name].shape == parameter.shape
    assert training.wire.detach() == {}


def test_detach_hands_back_the_mean_velocity_and_returns_the_mean_leftover(cluster: Cluster) -> None:
    cluster.run(leaves, 3)


def test_detach_from_a_local_mode_leaves_equal_replicas(cluster: Cluster) -> None:
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


def after_detach(group: dist.ProcessGroup) -> None:
    training = Training(group, Run(DGC, "heavy"))
    training.step(0)
    wire = training.wire
    state = wire.state_dict()
    wire.detach()
    assert wire.stats.steps == 1 and "1 steps" in str(wire.stats)
    for action in (lambda: wire.switch(thinwire.Dense()), lambda: wire.load_state_dict(state), wire.state_dict):
        assert "detached" in sentence_of(thinwire.DetachedError, action)


def test_detached_wire_says_so(cluster: Cluster) -> None:
    cluster.run(after_detach, 2)


def steps_after_detach(group: dist.ProcessGroup) -> None:
    for method in (DGC, thinwire.GTopK(density=0.02)):
        training = Training(group, Run(method, "heavy"))
        training.step(0)
        training.wire.detach()
        text = sentence_of(thinwire.DetachedError, lambda training=training: training.step(1))
        assert "attach" in text and "DistributedDataParallel" in text
        with torch.no_grad():
            training.loss(1)  # evaluation
        with training.model.no_sync():
            training.loss(1).backward()  # nothing to exchange
        training.model.eval()
        training.loss(1)
        training.model.train()
        sentence_of(thinwire.DetachedError, lambda training=training: training.step(1))
        for again in (method, thinwire.BlockSign(dense_below=1)):
            training.wire = thinwire.attach(training.model, training.optimizer, again)
            training.step(1)
            training.step(2)
            assert training.wire.stats.steps == 2
            bits = [None] * dist.get_world_size(group)
            dist.all_gather_object(bits, digest(flat(training.module)), group=group)
            assert len(set(bits)) == 1
            training.wire.detach()
        training.model.eval()  # as with frozen batch norm: the forward pass cannot know that backward follows
        try:
            training.loss(1).backward()
        except RuntimeError as error:
            assert "detached" in str(error)
        else:
            raise AssertionError("a step after detach went through")


def test_training_step_after_detach_is_refused_before_ddp_breaks(cluster: Cluster) -> None:
    """Evaluation still works, and so does attaching again; in eval mode the error comes from the backward pass."""
    cluster.run(steps_after_detach, 2)


def old_and_new_wire(group: dist.ProcessGroup) -> None:
    training = Training(group, Run(DGC, "heavy"))
    old = training.wire
    training.step(0)
    old.detach()
    training.happen("attach", thinwire.BlockSign(dense_below=1))
    assert old.detach() == {}
    old.abandon()
    training.step(1)
    assert training.wire.stats.steps == 1 and old.stats.steps == 1
    training.wire.detach()


def test_old_wire_cannot_detach_the_new_one(cluster: Cluster) -> None:
    cluster.run(old_and_new_wire, 2)


def failed_exchange(group: dist.ProcessGroup) -> bool:
    """Rank 0 alone fails; what it does then must not wait for the others."""
    model = DDP(torch.nn.Linear(4, 3), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wire = thinwire.attach(model, optimizer, "dgc")
    if dist.get_rank(group) == 0:
        wire.reducer.exchange = _fail  # type: ignore[method-assign]
        with pytest.raises(OSError):
            model(torch.ones(2, 4)).sum().backward()
        assert wire.detach() == {}
        assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
        with pytest.raises(thinwire.DetachedError):
            wire.state_dict()
    return True


def _fail(*_: Any, **__: Any) -> None:
    raise OSError("for this test")


def test_detach_after_a_failed_exchange_waits_for_nobody(cluster: Cluster) -> None:
    assert cluster.run(failed_exchange, 2, timeout_s=30) == [True, True]


def attached_again_and_again(group: dist.ProcessGroup, hierarchy: Any) -> int:
    """Threads that a process has more after the last of many attach and detach than after the second."""
    rank = dist.get_rank(group)
    training = Training(group, Run(None, "heavy", hierarchy=hierarchy))
    known = 0
    for step in range(8):
        training.happen("attach", DGC if step % 2 else thinwire.GTopK(density=0.02))
        training.step(step)
        time.sleep(0.02 * ((rank + step) % 3))  # ranks leave at different times
        training.wire.detach()
        if step == 1:
            known = len(os.listdir("/proc/self/task"))
    return len(os.listdir("/proc/self/task")) - known


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
@pytest.mark.parametrize("n, last, hierarchy", [(5, False, None), (3, True, None), (5, False, [[0, 1], [2, 3, 4]])])
def test_attaching_and_detaching_again_costs_no_more_threads(
    cluster: Cluster, n: int, last: bool, hierarchy: Any
) -> None:
    """A Gloo group has threads that poll: a wire that is left must not leave its groups behind."""
    assert max(cluster.run(attached_again_and_again, n, hierarchy, last=last)) <= 2


def crossing_wires(group: dist.ProcessGroup) -> None:
    """First and second attach, first leaves, third attaches: all on one subgroup, and the second one goes on."""
    runs = [
        Run(DGC, "heavy", task="net"),
        Run(thinwire.BlockSign(dense_below=1), "nesterov"),
        Run("gtopk:density=0.02", "adam"),
    ]
    first, second = Training(group, runs[0]), Training(group, runs[1])
    for step in range(3):
        first.step(step)
        second.step(step)
        first.happen("detach")
        second.step(step + 10)
        third = Training(group, runs[2])
        third.step(step)
        second.step(step + 20)
        first.happen("attach", DGC)
        third.wire.detach()
    bits = [None] * dist.get_world_size(group)
    dist.all_gather_object(bits, digest(flat(first.module), flat(second.module)), group=group)
    assert len(set(bits)) == 1
    first.wire.detach()
    second.wire.detach()


def test_wires_of_one_subgroup_that_come_and_go_have_groups_of_their_own(cluster: Cluster) -> None:
    cluster.run(crossing_wires, 3, last=True)


def left_alive(group: dist.ProcessGroup) -> list[str]:
    """What survives of a training whose every name is gone: attached, and detached."""
    alive = []
    for detach, form in ((False, {}), (True, {}), (False, {"find_unused_parameters": True})):
        training = Training(group, Run(DGC, "heavy", ddp=form))
        training.step(0)
        if detach:
            training.wire.detach()
        watched = {
            "module": weakref.ref(training.module),
            "optimizer": weakref.ref(training.optimizer),
            "wire": weakref.ref(training.wire),
        }
        del training
        for _ in range(50):  # the worker's thread may just be letting go of its last job
            gc.collect()
            if not any(ref() for ref in watched.values()):
                break
            time.sleep(0.05)
        how = f"{'detached' if detach else 'attached'} {form}"
        alive += [f"{name}, {how}" for name, ref in watched.items() if ref()]
    return alive


def test_attached_models_are_freed_with_their_last_reference(cluster: Cluster) -> None:
    assert cluster.run(left_alive, 2) == [[], []]
