"""Mistakes of a loop that plain DDP does not have, or forgives, are refused or told; legal neighbours are not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cluster import Cluster
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from workers import digest, flat, noise, sentence_of, tensors_of

import thinwire
from thinwire.errors import TRAINED_INSIDE
from thinwire.monitor import clip_warning, ranks_differ, scaler_check
from thinwire.monitor.stragglers import SAMPLE_EVERY

DGC, DRIFTING = "dgc:density=0.1,dense_below=8", "dropping:density=0.1,local=partial,sync_every=500"


def sgd(module: nn.Module, lr: Any = 0.01, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), **{"lr": lr, "momentum": 0.9, "weight_decay": 1e-3, **options})


class Loop:
    """A small model on one rank, and what its steps warned of, log included."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        method: str,
        make: Callable[..., torch.optim.Optimizer] = sgd,
        scaler: torch.amp.GradScaler | None = None,
        given: bool = False,
    ) -> None:
        """``given``: the scaler is handed over."""
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 4))
        self.rank, self.model, self.scaler = dist.get_rank(group), DDP(module, process_group=group), scaler
        self.optimizer, self.steps, self.told = make(module), 0, list[str]()
        self.wire = thinwire.attach(self.model, self.optimizer, method, scaler=scaler if given else None)

    def loss(self, overflow: bool = False) -> torch.Tensor:
        loss = self.model(noise((8, 6), self.rank, self.steps, "x")).square().mean()
        return loss * float("inf") if overflow and self.rank == 0 else loss

    def backward(self, overflow: bool = False) -> None:
        self.optimizer.zero_grad()
        loss = self.loss(overflow)
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def use(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        if self.scaler is None:
            (optimizer or self.optimizer).step()
        else:
            self.scaler.step(optimizer or self.optimizer)
            self.scaler.update()
        self.steps += 1

    def step(self, overflow: bool = False) -> None:
        self.backward(overflow)
        self.use()

    def warned(self, *actions: Callable[[], Any]) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for action in actions:
                action()
        told = [one for one in caught if issubclass(one.category, RuntimeWarning)]
        assert all(one.filename == __file__ for one in told), "the line of this loop"
        return [str(one.message) for one in told]

    def end(self) -> torch.Tensor:
        self.wire.detach()
        return flat(self.model.module)


def spoken_by_rank_0(loop: Loop, told: list[str], words: str) -> None:
    assert len(told) == (loop.rank == 0) and all(words in one for one in told), told


# -------------------------------------------------------------------------------------------- inside averaged()


def trains_inside(group: dist.ProcessGroup) -> None:
    loop, other = Loop(group, DRIFTING), Loop(group, DRIFTING)
    for one in (loop, other):
        one.step()
        one.step()
    before = digest(flat(loop.model.module), *tensors_of(loop.wire.state_dict()))
    for act in (loop.backward, loop.optimizer.step, loop.step):
        with loop.wire.averaged():
            assert sentence_of(ValueError, act) == TRAINED_INSIDE
        state = loop.wire.state_dict()
        assert digest(flat(loop.model.module), *tensors_of(state)) == before and state["step"] == 2
    with loop.wire.averaged():
        with torch.no_grad():
            loop.loss()
        x = noise((8, 6), 0, 0, "x").requires_grad_()
        loop.model.module(x).sum().backward()  # a saliency map
        loop.loss()  # with gradients that nobody asks for
    for one in (loop, other):
        one.step()
    assert torch.equal(loop.end(), other.end()), "it goes on as if nothing had been"
    loop = Loop(group, DGC)
    with loop.wire.averaged():
        loop.step()  # where ranks are equal the block changes nothing, and nothing is lost
    other = Loop(group, DGC)
    other.step()
    assert torch.equal(loop.end(), other.end())


def test_training_inside_averaged_is_refused_where_it_would_be_lost(cluster: Cluster) -> None:
    cluster.run(trains_inside, 2)


def reduces_inside(group: dist.ProcessGroup) -> None:
    weights = {"w": noise((40, 30), 9, 9, "w")}
    optimizer = torch.optim.SGD(weights.values(), lr=0.1)
    reducer = thinwire.Reducer(weights, DRIFTING, group, optimizer)
    with reducer.averaged():
        assert sentence_of(ValueError, lambda: reducer.reduce({"w": torch.ones(40, 30)})) == TRAINED_INSIDE
    reducer.reduce({"w": torch.ones(40, 30)})
    assert reducer.stats.steps == 1
    reducer.detach()


def test_reducing_inside_averaged_is_refused_where_it_would_be_lost(cluster: Cluster) -> None:
    cluster.run(reduces_inside, 2)


# ------------------------------------------------------------------------------------------ another optimizer


class Around(torch.optim.Optimizer):
    """An optimizer that lets another one step, as SAM and Lookahead do."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups[0]["params"], {"lr": 0.1})
        self.base = base

    def step(self, closure: Any = None) -> None:
        self.base.step()


def goes_on_with_another(group: dist.ProcessGroup) -> None:
    for method, told in ((DGC, True), ("gtopk:density=0.1", True), ("dense", False), ("terngrad", False)):
        loop = Loop(group, method)
        assert not loop.warned(loop.step)
        loop.optimizer = sgd(loop.model, 0.5)
        found = loop.warned(loop.step, loop.step)
        if told:
            spoken_by_rank_0(loop, found, "call wire.detach() and attach again")
            loop.wire.detach()
            loop.wire = thinwire.attach(loop.model, loop.optimizer, method)
            found = loop.warned(loop.step)
        assert not found, method
        loop.end()
    for inner in (True, False):
        loop = Loop(group, "gtopk:density=0.1,momentum_correction=false", (lambda m: Around(sgd(m))) if inner else sgd)
        around = loop.optimizer if inner else Around(loop.optimizer)
        assert not loop.warned(lambda: (loop.backward(), loop.use(around)), lambda: (loop.backward(), loop.use(around)))  # noqa: B023
        loop.end()
    loop = Loop(group, DGC)
    head = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)  # of another model
    assert not loop.warned(loop.step, head.step, loop.step)
    loop.end()


def test_another_optimizer_than_the_attached_one_is_told_once(cluster: Cluster) -> None:
    cluster.run(goes_on_with_another, 2)


# --------------------------------------------------------------------------------------------------- scalers


def uses_a_scaler(group: dist.ProcessGroup) -> None:
    scaler = lambda **options: torch.amp.GradScaler("cpu", init_scale=8.0, **options)  # noqa: E731
    for method in (DGC, "gtopk:density=0.1", "blocksign:dense_below=1", "dropping:density=0.1"):
        for options in ({}, {"fused": True}):
            loop = Loop(group, method, lambda m: sgd(m, **options), scaler())  # noqa: B023
            before = flat(loop.model.module)
            for _ in range(2):
                loop.backward()
                assert sentence_of(ValueError, loop.use) == scaler_check.SENTENCE
                loop.scaler = scaler()  # the one before has half done its step
            assert torch.equal(flat(loop.model.module), before), method
            loop.end()
    for method, given in ((DGC, scaler(enabled=False)), ("dense", scaler()), ("terngrad", scaler())):
        loop, plain = Loop(group, method, scaler=given), Loop(group, method)
        for one in (loop, plain):
            one.step()
            one.step()
        torch.testing.assert_close(loop.end(), plain.end())


def test_a_scaler_that_attach_does_not_know_is_refused_before_a_parameter_changes(cluster: Cluster) -> None:
    cluster.run(uses_a_scaler, 2)


def skips_with_fused(group: dist.ProcessGroup) -> None:
    for method in (DGC, "dropping:density=0.1,local=partial,sync_every=2", "dense"):
        found = []
        for fused in (False, True):
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
            loop = Loop(group, method, lambda m: sgd(m, fused=fused), scaler, given=True)  # noqa: B023
            for step in range(9):
                loop.step(overflow=step in (2, 5))
            state = loop.wire.state_dict()
            assert loop.wire.stats.steps == state["step"] == state["optimizer_steps"] == 7, f"{method} {fused=}"
            found.append(loop.end())
        torch.testing.assert_close(found[0], found[1])


def test_steps_that_a_scaler_skips_do_not_count_with_fused_optimizers(cluster: Cluster) -> None:
    cluster.run(skips_with_fused, 2)


def clips_with_a_scaler(group: dist.ProcessGroup, fused: bool) -> None:
    for clip, told in ((1e-4, True), (float("inf"), False), (1e6, False), (None, False)):
        scaler = torch.amp.GradScaler("cpu", init_scale=3000.0, growth_interval=2)
        loop = Loop(group, DGC, lambda m: sgd(m, fused=fused), scaler, given=True)

        def step(overflow: bool, loop: Loop = loop, clip: float | None = clip) -> None:
            loop.backward(overflow)
            if clip is not None:
                loop.scaler.unscale_(loop.optimizer)
                nn.utils.clip_grad_norm_(loop.model.parameters(), clip)
            loop.use()

        found = loop.warned(*(lambda overflow=number in (0, 2): step(overflow) for number in range(6)))
        if told:
            spoken_by_rank_0(loop, found, clip_warning.SENTENCE[:40])
        else:
            assert not found, (clip, found)
        loop.end()


@pytest.mark.parametrize("fused", [False, True])
def test_clipping_after_the_exchange_is_told_with_a_scaler_and_unscaling_is_not(cluster: Cluster, fused: bool) -> None:
    cluster.run(clips_with_a_scaler, 2, fused)


# ----------------------------------------------------------------------------------------- ranks that differ


def attaches_with_other_rates(group: dist.ProcessGroup) -> None:
    rank = dist.get_rank(group)
    for option, words in (({"lr": 0.1 + 0.1 * rank}, "lr=0.2"), ({"lr": 0.1, "momentum": 0.5 * rank}, "momentum=0.5")):
        said = sentence_of(ValueError, lambda: Loop(group, DGC, lambda m: sgd(m, **option)))  # noqa: B023
        assert "ranks differ in the optimizer's options: 0.weight is lr=0.1" in said and words in said, said
    loop = Loop(group, DGC, lambda m: sgd(m, torch.tensor(0.1) if rank else 0.1))
    assert not loop.warned(*[loop.step] * (SAMPLE_EVERY + 5)), "a tensor is not another rate"
    loop.end()


def test_ranks_that_attach_with_different_learning_rates_are_refused(cluster: Cluster) -> None:
    cluster.run(attaches_with_other_rates, 2)


def schedules_apart(group: dist.ProcessGroup) -> None:
    loop = Loop(group, DGC)
    for _ in range(2):
        loop.step()
    loop.optimizer.param_groups[0]["lr"] = 0.02 if loop.rank == 1 else 0.01  # as ReduceLROnPlateau by own losses
    found = loop.warned(*[loop.step] * (2 * SAMPLE_EVERY + 5))
    spoken_by_rank_0(loop, found, "different learning rates: on average over the parameters 0.01 on rank 0 and 0.02 on")
    loop.end()


def test_learning_rates_that_come_to_differ_are_told_once(cluster: Cluster) -> None:
    cluster.run(schedules_apart, 3)


def saves_on_rank_0(group: dist.ProcessGroup) -> None:
    for method, who, told in ((DGC, (0,), True), (DGC, (0, 1), False), ("dense", (0,), False)):
        loop = Loop(group, method)
        loop.step()
        if loop.rank in who:
            loop.wire.state_dict()
        found = loop.warned(*[loop.step] * (2 * SAMPLE_EVERY + 5))
        if told:
            spoken_by_rank_0(loop, found, "called on rank 0 and not on the others")
        else:
            assert not found, method
        loop.end()
    loop = Loop(group, DGC)
    loop.step()
    loop.wire.state_dict(all_ranks=True)
    assert not loop.warned(*[loop.step] * (2 * SAMPLE_EVERY + 5))
    loop.end()


def test_a_state_that_one_rank_alone_saves_is_told(cluster: Cluster) -> None:
    cluster.run(saves_on_rank_0, 2)


def test_ranks_that_save_one_after_the_other_are_not_told() -> None:
    differ = ranks_differ.RanksDiffer()
    for counts in ((0, 0), (1, 0), (1, 1), (2, 1), (2, 2)):
        differ.judge([[0.1, 0.9, 0.0, count] for count in counts])
    assert not differ.take_sentences()
    differ.judge([[0.1, 0.9, 0.0, 1], ranks_differ.UNKNOWN])
    assert not differ.take_sentences(), "a rank that ran out of inputs"
