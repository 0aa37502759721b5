"""What a loop does beside the exchange and plain DDP would not forgive either is said once; nothing else is."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cluster import Cluster
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from workers import noise, sentence_of

import thinwire
from thinwire.edges.drift_warning import DriftWarning

DRIFTING = "dropping:density=0.1,local=partial,sync_every=5"
BYPASSED, EVALUATED, SAVED = "were not exchanged", "model is evaluated", "state was taken"


class Loop:
    """A small model on one rank, attached, with the warnings that it caused."""

    def __init__(self, group: dist.ProcessGroup, method: str, **ddp: Any) -> None:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Conv2d(2, 2, 1), nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(16, 3))
        self.rank, self.model = dist.get_rank(group), DDP(module, process_group=group, **ddp)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.wire = thinwire.attach(self.model, self.optimizer, method)
        self.x = noise((4, 2, 4, 4), self.rank, 0, "x")

    def loss(self, model: nn.Module | None = None) -> torch.Tensor:
        return (model or self.model)(self.x).square().mean()

    def step(self, model: nn.Module | None = None) -> None:
        self.optimizer.zero_grad()
        self.loss(model).backward()
        self.optimizer.step()

    def warned(self, *actions: Callable[[], Any]) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for action in actions:
                action()
        told = [one for one in caught if issubclass(one.category, RuntimeWarning)]
        assert all(one.filename == __file__ for one in told), "the line of this loop"
        return [str(one.message) for one in told]


def evaluated(loop: Loop, model: nn.Module, grad: bool = False) -> None:
    loop.model.eval()
    with torch.set_grad_enabled(grad):
        model(loop.x)
    loop.model.train()


def one_of(told: list[str], words: str) -> None:
    assert len(told) == 1 and words in told[0], told


def drifts(group: dist.ProcessGroup) -> None:
    for grad, bare in ((False, True), (False, False), (True, True), (True, False)):
        loop = Loop(group, DRIFTING)
        model = loop.model.module if bare else loop.model
        assert not loop.warned(lambda: evaluated(loop, model), loop.model.module.state_dict, loop.step)  # noqa: B023
        one_of(loop.warned(lambda: evaluated(loop, model, grad)), EVALUATED)  # noqa: B023
        assert not loop.warned(lambda: evaluated(loop, model, grad), loop.step)  # noqa: B023
        save = loop.model.module.state_dict if bare else loop.model.state_dict
        assert not loop.warned(loop.wire.state_dict, save, loop.step), "this rank's own, to resume"
        assert not loop.warned(save, loop.wire.state_dict, loop.step)
        one_of(loop.warned(save, loop.step if bare else loop.wire.detach), SAVED)
        loop.wire.detach()
    loop = Loop(group, DRIFTING)
    loop.step()
    with loop.wire.averaged():
        assert not loop.warned(lambda: evaluated(loop, loop.model.module), loop.model.state_dict)
    for _ in range(4):
        assert not loop.warned(loop.step)
    assert not loop.warned(lambda: evaluated(loop, loop.model), loop.model.state_dict), "just averaged"
    loop.step()
    loop.wire.switch("dgc:density=0.1")
    assert not loop.warned(loop.step, lambda: evaluated(loop, loop.model.module), loop.model.state_dict)
    loop.wire.detach()

    loop = Loop(group, DRIFTING)
    loop.model.eval()
    assert not loop.warned(loop.step, loop.step), "a model may be trained in eval mode"
    loop.wire.detach()


def test_a_drifted_model_that_is_evaluated_or_saved_outside_averaged_is_told(cluster: Cluster) -> None:
    cluster.run(drifts, 2)


def test_a_model_that_is_saved_at_the_very_end_is_told() -> None:
    module, drift = nn.Linear(2, 2), DriftWarning(lambda: True)
    drift.watch(module)
    module.state_dict()
    with pytest.warns(RuntimeWarning, match=SAVED) as told:
        del module, drift
        gc.collect()
    assert told[0].filename == __file__


def bypasses(group: dist.ProcessGroup, method: str) -> None:
    loop = Loop(group, method)
    module = loop.model.module
    assert not loop.warned(loop.step)
    told = loop.warned(lambda: loop.step(module), lambda: loop.step(module), loop.step)
    if loop.rank == 0:
        one_of(told, BYPASSED)
    else:
        assert not told, "one rank speaks"
    loop.wire.detach()


def other_loops(group: dist.ProcessGroup, method: str, options: dict[str, Any]) -> None:
    """None of these bypasses anything."""
    loop = Loop(group, method, **options)
    optimizer, module = loop.optimizer, loop.model.module

    def accumulated() -> None:
        optimizer.zero_grad()
        with loop.model.no_sync():
            loop.loss().backward()
        loop.loss().backward()
        optimizer.step()

    def local() -> None:
        optimizer.zero_grad()
        with loop.model.no_sync():
            loop.loss().backward()
        optimizer.step()

    def never_cleared() -> None:
        for _ in range(2):
            loop.loss().backward()
            optimizer.step()

    def steps_again() -> None:
        optimizer.step()

    def closure() -> None:
        def closed() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loop.loss()
            loss.backward()
            return loss

        optimizer.step(closed)

    def looks_at_inputs() -> None:
        x = loop.x.clone().requires_grad_()
        module(x).sum().backward()  # a saliency map, whose gradients are thrown away
        loop.step()

    def evaluates() -> None:
        evaluated(loop, loop.model)
        evaluated(loop, module)
        evaluated(loop, loop.model, grad=True)
        with torch.no_grad():
            loop.model(loop.x)
            module(loop.x)
        loop.model.state_dict()

    again = (looks_at_inputs, local, accumulated) if not options.get("static_graph") else ()
    for act in (loop.step, never_cleared, closure, steps_again, evaluates, *again, evaluates, loop.step):
        assert not loop.warned(act), act.__name__
    loop.wire.detach()


@pytest.mark.parametrize("method", ["dgc:density=0.1", "dense"])
def test_a_step_on_gradients_that_went_past_ddp_is_told_once(cluster: Cluster, method: str) -> None:
    cluster.run(bypasses, 2, method)
    for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"find_unused_parameters": True}):
        cluster.run(other_loops, 2, method, options)
    cluster.run(other_loops, 1, method, {})


def reordered(group: dist.ProcessGroup) -> None:
    loop = Loop(group, "dgc:density=0.1")
    loop.step()
    loop.model.to(memory_format=torch.channels_last)
    text = sentence_of(ValueError, loop.loss)
    assert "memory format" in text and "'1.weight'" in text and "new DDP" in text
    loop.model.to(memory_format=torch.contiguous_format)
    loop.step()
    assert loop.wire.stats.steps == 2
    loop.wire.detach()


def test_another_memory_format_after_attach_is_refused(cluster: Cluster) -> None:
    cluster.run(reordered, 2)
