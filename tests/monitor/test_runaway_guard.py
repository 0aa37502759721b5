"""A training that runs away is noticed, and led back."""

from __future__ import annotations

import warnings
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers
from cluster import Cluster
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP
from workers import Run, Training, noise, own_part

import thinwire
from thinwire.engine.norms import Norms
from thinwire.monitor.health import Guard, measured_health
from thinwire.transport import ThreadNet, ThreadWorld


class Bowl(torch.nn.Module):
    """A quadratic whose largest curvature is 1: plain gradient descent converges below a learning rate of 2."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(2000))
        self.register_buffer("target", noise((2000,), 1, 1, "target"))
        self.register_buffer("curvature", torch.linspace(0.3, 1.0, 2000))

    def forward(self, wind: Tensor) -> Tensor:
        return 0.5 * ((self.w - self.target).square() * self.curvature).sum() + (wind * self.w).sum()


def descend(group: dist.ProcessGroup, method: str, lr: float, steps: int, **options: Any) -> dict[str, Any]:
    rank = dist.get_rank(group)
    module = Bowl()
    model = DDP(module, process_group=group, broadcast_buffers=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=lr)
    wire = thinwire.attach(model, optimizer, method, **options)
    losses, densities = [], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(steps):
            optimizer.zero_grad()
            loss = model(0.1 * noise((2000,), rank, step, "wind"))
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            densities.append(wire.stats.density)
    stats, state = wire.stats, wire.state_dict()
    # Another wire takes the raised density over with the state.
    model2 = DDP(Bowl(), process_group=group, broadcast_buffers=False)
    wire2 = thinwire.attach(model2, torch.optim.SGD(model2.parameters(), lr=lr), method, **options)
    wire2.load_state_dict(state)
    resumed = wire2.stats.density
    wire2.detach()
    wire.detach()
    said = [str(w.message) for w in caught if "thinwire" in str(w.message)]
    return {"losses": losses, "said": said, "stats": stats, "densities": densities, "resumed": resumed}


def diverging(group: dist.ProcessGroup, guard: str | None) -> dict[str, Any]:
    """No momentum correction, one entry in 2,000 at a learning rate that is fine without compression."""
    return descend(group, "gtopk:density=0.0005", 0.5, 420, guard=guard, guard_every=2)


def test_guard_warns_of_a_run_that_diverges_and_densifies_until_it_settles(cluster: Cluster) -> None:
    free, warned, led = (cluster.run(diverging, 2, guard) for guard in (None, "warn", "densify"))
    for one in free:
        assert one["losses"][-1] > 1e3 * one["losses"][0] and not one["said"]
        assert one["stats"].staleness is None and one["stats"].runaways == 0
    assert [one["losses"] for one in warned] == [one["losses"] for one in free], "watching changes nothing"
    assert len(warned[0]["said"]) == 1 and not warned[1]["said"], "one rank warns, once"
    for word in (
        "runs away at step",
        "gradients are",
        "residuals",
        "stays behind",
        "steps on average",
        "learning rate",
    ):
        assert word in warned[0]["said"][0]
    stats = warned[0]["stats"]
    assert stats.runaways > 1 and stats.staleness > 1 and 0 < stats.compression_error < 1
    assert led[0]["densities"] == led[1]["densities"], "all ranks decide alike, at the same step"
    raised = sorted(set(led[0]["densities"]))
    assert len(raised) > 1 and all(b == pytest.approx(4 * a) for a, b in pairwise(raised))
    assert led[0]["resumed"] == led[1]["resumed"] == raised[-1], "a resumed run goes on with the raised density"
    assert f"density is raised from 0.0005 to {raised[1]:.3g}" in led[0]["said"][0]
    assert led[0]["losses"][-1] < 1e-3 * free[0]["losses"][-1]
    peak = max(led[0]["losses"])
    assert max(led[0]["losses"][-20:]) < peak / 2, "it settles"


def healthy(group: dist.ProcessGroup, guard: str) -> list[list[str]]:
    said = []
    for method, lr in (
        ("gtopk:density=0.05", 0.1),
        ("dgc:density=0.02,dense_below=0,values=fp32,factor_masking=true", 0.05),
        ("blocksign:dense_below=0", 0.05),  # the bowl has one dimension
    ):
        if guard == "warn" or "density" in method:
            said.append(descend(group, method, lr, 120, guard=guard, guard_every=2)["said"])
    return said


@pytest.mark.parametrize("guard", ["warn", "densify"])
def test_guard_never_warns_of_a_healthy_run(cluster: Cluster, guard: str) -> None:
    """Residuals fill up, gradients shrink under them and are noisy at the end: none of that is a runaway."""
    for said in cluster.run(healthy, 2, guard):
        assert not any(said), said


def measured(group: dist.ProcessGroup) -> None:
    """The numbers of a step, against the definitions, with and without buckets."""
    for form in ({}, {"bucket_cap_mb": 1e-5}):
        training = Training(group, Run(None, "plain", ddp=form))
        training.wire = thinwire.attach(
            training.model, training.optimizer, "dgc:density=0.05,dense_below=0,momentum_correction=false,values=fp32",
            guard="warn", guard_every=3,
        )  # fmt: skip
        for step in range(5):
            if step == 2:
                before = own_part(training.wire.state_dict())["aggregator"]["memory"]["residual"]
            training.step(step)
            if step < 2:
                assert training.wire.stats.compression_error is None
            if step == 2:
                after = own_part(training.wire.state_dict())["aggregator"]["memory"]["residual"]
        gradients = workers.pulls(training.rank, 2)
        x = torch.cat([before[name] + gradients[name].reshape(-1) for name in before]).double()
        e = torch.cat([after[name] for name in after]).double()
        g = torch.cat([gradient.reshape(-1) for gradient in gradients.values()]).double()
        sums = torch.stack([g.square().sum(), x.square().sum(), x.abs().sum(), e.square().sum(), e.abs().sum()])
        dist.all_reduce(sums, group=group)
        g2, x2, x1, e2, e1 = sums.tolist()
        stats = training.wire.stats  # at step 4 still those of step 2
        assert stats.residual_to_gradient == pytest.approx((e2 / g2) ** 0.5, rel=1e-5)
        assert stats.compression_error == pytest.approx((e2 / x2) ** 0.5, rel=1e-5)
        assert stats.staleness == pytest.approx(e1 / (x1 - e1), rel=1e-4)
        training.wire.detach()


def test_guard_measures_the_numbers_of_the_definitions(cluster: Cluster) -> None:
    cluster.run(measured, 3)


def test_guard_takes_neither_spikes_nor_convergence_for_a_runaway() -> None:
    def verdicts(gradients: list[float], residuals: list[float]) -> list[int]:
        def watch(net: ThreadNet) -> list[int]:
            guard, found = Guard("warn", 1), []
            for step, (g, e) in enumerate(zip(gradients, residuals, strict=True)):
                norms = Norms.nothing().of_gradients([torch.tensor([g])])
                norms = norms.of_wanted(torch.tensor([e * 1.1])).of_left(torch.tensor([e]))
                guard.conclude(measured_health(step, norms, net), None)
                found.append(guard.runaways)
            return found

        first, second = ThreadWorld(2).run(watch)
        assert first == second
        return first

    spikes = [100.0 if step % 4 == 0 else 1.0 for step in range(60)]
    assert verdicts(spikes, spikes)[-1] == 0
    filling = [1.0 + step for step in range(60)]
    assert verdicts([1.0] * 60, filling)[-1] == 0, "a residual that fills up beside a steady gradient"
    falling = [0.9**step for step in range(60)]
    assert verdicts(falling, [1.0] * 60)[-1] == 0, "a gradient that shrinks below its residual"
    growing = [1.1**step for step in range(80)]
    assert verdicts(growing, growing)[-1] > 0
    slow = [1.02**step for step in range(400)]
    assert verdicts(slow, slow)[-1] > 0, "slow growth is growth too"


def refused(group: dist.ProcessGroup) -> list[str]:
    sentences = []
    for method, options in (
        ("noop", {"check_replicas_every": 5}), ("dgc", {"check_replicas_every": 0}), ("dgc", {"guard": "panic"}),
        ("dgc", {"guard": "warn", "guard_every": True}), ("blocksign", {"guard": "densify"}),
        ("dgc", {"guard": "warn" if dist.get_rank(group) else None}),
        ("dropping:local=sum,sync_every=none", {"check_replicas_every": 5}),
    ):  # fmt: skip
        training = Training(group, Run(None, "plain"))
        with pytest.raises(ValueError) as caught:
            thinwire.attach(training.model, training.optimizer, method, **options)
        sentences.append(str(caught.value))
    wire = thinwire.attach(training.model, training.optimizer, "gtopk", guard="densify", check_replicas_every=4)
    for method in ("terngrad", "noop"):
        with pytest.raises(ValueError) as caught:
            wire.switch(method)
        sentences.append(str(caught.value))
    wire.switch("dgc:density=0.1")
    wire.detach()
    return sentences


def test_guard_and_replica_check_refuse_what_cannot_be_watched(cluster: Cluster) -> None:
    words = ["goes its own way", "check_replicas_every must be", "guard must be", "guard_every must be",
             'guard="densify" needs a method with', "ranks differ in guard", "goes its own way", "terngrad",
             "density"]  # fmt: skip
    for sentences in cluster.run(refused, 2):
        assert all(word in sentence for word, sentence in zip(words, sentences, strict=True)), sentences
