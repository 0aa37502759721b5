"""Gradients that lie in .grad when a step begins: of an earlier optimizer step, or of a loop that clears nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cluster import Cluster
from heard import Heard
from workers import Run, Training, close, flat, pulls

import thinwire

EXACT = "density=1.0,dense_below=0,values=fp32"
WORDS = "gradients of an earlier optimizer step were not cleared"


def listened(act: Callable[[], Any]) -> list[str]:
    """What thinwire logs meanwhile."""
    handler, log = Heard(), logging.getLogger("thinwire")
    log.addHandler(handler)
    try:
        act()
    finally:
        log.removeHandler(handler)
    return handler.sentences


def go_on(training: Training, step: int, passes: int, clears: bool) -> None:
    if clears:
        training.optimizer.zero_grad()
    for number in range(passes):
        training.model(pulls(training.rank, 10 * step + number)).backward()
    training.optimizer.step()


def not_cleared(group: dist.ProcessGroup) -> None:
    """The second pass takes the first one's exchange back, and not what lay there before it."""
    for method in (f"dgc:{EXACT},momentum_correction=false", f"dropping:{EXACT}", f"gtopk:{EXACT}", "dense"):
        for form in ({}, {"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-5}):
            plain, wired = Training(group, Run(None, ddp=form)), Training(group, Run(method, ddp=form))
            for step, (passes, clears) in enumerate([(1, True), (2, False), (3, False), (1, True), (2, False)]):
                for one in (plain, wired):
                    go_on(one, step, passes, clears)
                close(flat(wired.module), flat(plain.module), f"{method}, step {step}", atol=2e-5)
            wired.wire.detach()


def test_what_was_not_cleared_stays_where_several_passes_follow(cluster: Cluster) -> None:
    cluster.run(not_cleared, 2)


def told(group: dist.ProcessGroup, method: str, optimizer: str, clears: list[bool]) -> list[str]:
    training = Training(group, Run(method, optimizer))

    def train() -> None:
        for step, one in enumerate(clears):
            go_on(training, step, 1 + step // 4, one)

    found = [one for one in listened(train) if "too small" not in one]
    training.wire.detach()
    return found


@pytest.mark.parametrize("optimizer", ["heavy", "decay"])
def test_gradients_that_hold_momentum_and_were_not_cleared_are_told_once(cluster: Cluster, optimizer: str) -> None:
    for method in (f"dgc:{EXACT}", f"gtopk:{EXACT}", f"perlayer:c=(dgc:{EXACT}),*=dense"):
        first, second = cluster.run(told, 2, method, optimizer, [True, True, False, False, True, False])
        assert len(first) == 1 and WORDS in first[0] and "\n" not in first[0] and not second
        assert cluster.run(told, 2, method, optimizer, [True] * 6) == [[], []], "several passes are none of these"


@pytest.mark.parametrize("optimizer", ["plain", "heavy"])
def test_gradients_that_are_means_may_stay(cluster: Cluster, optimizer: str) -> None:
    own = f"dgc:{EXACT},momentum_correction=false" if optimizer == "heavy" else f"dgc:{EXACT}"
    for method in (own, "dense"):
        assert cluster.run(told, 2, method, optimizer, [True, False, False, True]) == [[], []]


def looks_for_unused(group: dist.ProcessGroup) -> list[str]:
    training = Training(group, Run("dgc:density=0.1,dense_below=0", "heavy", ddp={"find_unused_parameters": True}))
    found = listened(lambda: [go_on(training, step, 1, True) for step in range(6)])
    assert training.wire.edge._open._several is False, "and nothing is copied any more"
    training.wire.detach()
    return found


def test_looking_for_unused_parameters_is_not_taken_for_a_gradient_that_is_thrown_away(cluster: Cluster) -> None:
    assert cluster.run(looks_for_unused, 2) == [[], []]


def without_buffers(group: dist.ProcessGroup) -> None:
    """Behind detach, and behind a switch to a method that leaves momentum alone."""
    for optimizer in ("plain", "heavy"):
        training = Training(group, Run(f"dgc:{EXACT}", optimizer))
        for step in range(2):
            training.optimizer.zero_grad()
            training.model({name: pull for name, pull in pulls(training.rank, step).items()}).backward()
            training.optimizer.step()
        training.wire.switch("dense")
        state = training.optimizer.state
        assert all(("momentum_buffer" in state[p]) == (optimizer == "heavy") for p in training.module.parameters())
        training.wire.detach()
    training = Training(group, Run(f"dgc:{EXACT}", "heavy"))
    training.wire.detach()
    assert not any(isinstance(value, torch.Tensor) for s in training.optimizer.state.values() for value in s.values())


def test_sgd_gets_the_buffers_that_plain_training_would_have_made(cluster: Cluster) -> None:
    cluster.run(without_buffers, 2)


def thrown_away_late(group: dist.ProcessGroup, method: str) -> list[str]:
    training = Training(group, Run(method, "heavy"))
    for step in range(5):
        go_on(training, step, 1, True)

    def train() -> None:
        for number in range(3):
            training.optimizer.zero_grad()
            training.model(pulls(training.rank, 50 + number)).backward()
        training.optimizer.step()

    found = listened(train)
    training.wire.detach()
    return found


def test_a_gradient_that_is_thrown_away_late_is_told_where_some_parameters_keep_nothing(cluster: Cluster) -> None:
    for method in (f"perlayer:a=dense,*=(dgc:{EXACT})", f"perlayer:e=dense,*=(dgc:{EXACT})", f"dgc:{EXACT}"):
        first, second = cluster.run(thrown_away_late, 2, method)
        assert len(first) == 1 and "stays" in first[0] and not second, method


def passed_over(group: dist.ProcessGroup) -> list[str]:
    """A scaler passes over a step behind those in which copies are made."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    training = Training(group, Run(None, "heavy"))
    training.wire = thinwire.attach(training.model, training.optimizer, f"dgc:{EXACT}", scaler=scaler)

    def train() -> None:
        for step in range(6):
            training.optimizer.zero_grad()
            loss = training.model(pulls(training.rank, step)) * (float("inf") if step == 4 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(training.optimizer)
            scaler.update()

    found = [one for one in listened(train) if "too small" not in one]
    assert training.wire.stats.steps == 5 and training.wire.edge._open._several is False
    training.wire.detach()
    return found


def test_a_step_that_a_scaler_passes_over_is_not_taken_for_a_gradient_that_is_thrown_away(cluster: Cluster) -> None:
    assert cluster.run(passed_over, 2) == [[], []]
