"""Changing the method: residuals and momentum go along, nothing is lost or invented, and a refusal changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers
from cluster import Cluster
from workers import DGC, LR, Run, Training, close, digest, flat, sentence_of, tensors_of

import thinwire

EXACT = thinwire.DGC(density=1.0, factor_masking=False, values="fp32")


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
def test_switch_loses_and_invents_nothing(cluster: Cluster, optimizer: str) -> None:
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


def test_switch_sends_gradient_residuals_through_momentum(cluster: Cluster) -> None:
    """What error feedback kept is gradient: the optimizer's momentum acts on it whenever it is applied."""
    events = {4: ("switch", thinwire.Dense())}
    runs = [Run(None, "heavy", 120, trajectory=False)]
    runs += [Run(method, "heavy", 120, events=events, trajectory=False)
             for method in (thinwire.GTopK(density=0.02), thinwire.GradientDropping(density=0.02))]  # fmt: skip
    for reference, *others in cluster.run(workers.train, 2, runs):
        for other in others:
            torch.testing.assert_close(other["final"], reference["final"], rtol=1e-4, atol=2e-4)


PAIRED = [
    "dgc:density=0.02", "dgc:density=0.02,momentum_correction=false,residual=bf16,values=fp32", "gtopk:density=0.02",
    "gtopk:density=0.02,momentum_correction=true", "terngrad:dense_below=0", "blocksign:dense_below=1",
    "dropping:density=0.02", "dropping:density=0.02,local=partial,sync_every=3", "signsgd", "dense", "noop",
]  # fmt: skip


def three_steps(group: dist.ProcessGroup, method: str, optimizer: str = "heavy") -> Training:
    training = Training(group, Run(method, optimizer))
    for step in range(3):
        training.step(step)
    return training


def left(training: Training) -> dict[str, torch.Tensor]:
    """What detach returns, the velocity that it hands back, and the parameters: all of them the group's mean."""
    rest = training.wire.detach()
    parameters = dict(training.module.named_parameters())
    kept = [rest.get(name, torch.zeros_like(p)).reshape(-1) for name, p in parameters.items()]
    states = [training.optimizer.state[p] for p in parameters.values()]
    velocity = [
        state.get("momentum_buffer", torch.zeros_like(p)).reshape(-1)
        for state, p in zip(states, parameters.values(), strict=True)
    ]
    return {"kept": torch.cat(kept), "velocity": torch.cat(velocity), "parameters": flat(training.module)}


def every_switch(group: dist.ProcessGroup, first: str) -> None:
    """Leaving right behind a switch is leaving without it: what was kept is still kept, or was just applied."""
    before = left(three_steps(group, first))
    for second in PAIRED:
        switched = three_steps(group, first)
        switched.wire.switch(second)
        after = left(switched)
        applied = (before["parameters"] - after["parameters"]) / LR
        rounding = 0.05 if "bf16" in first + second else 1e-4
        close(after["kept"] + applied, before["kept"], f"{first} -> {second}: kept", atol=rounding)
        close(after["velocity"], before["velocity"], f"{first} -> {second}: velocity", atol=rounding)
        going_on = three_steps(group, first)
        going_on.wire.switch(second)
        going_on.step(3)
        going_on.step(4)
        going_on.wire.detach()
        assert flat(going_on.module).isfinite().all()


@pytest.mark.parametrize("first", PAIRED)
def test_switch_between_any_two_methods_keeps_residuals_and_momentum(cluster: Cluster, first: str) -> None:
    cluster.run(every_switch, 2, first)


def refused_switches(group: dist.ProcessGroup) -> None:
    rank = dist.get_rank(group)
    training = Training(group, Run(DGC, "heavy"))
    training.step(0)
    wire = training.wire
    before = digest(*tensors_of(wire.state_dict()))
    refused = {
        "unknown method": "dcg:density=0.1",
        "matches no parameter": thinwire.DGC(exclude=("nope",)),
        "not 5": 5,
        "ranks differ": thinwire.DGC(density=0.1 + rank / 10),
        "density": "dgc:density=2" if rank else "dgc",
    }
    for word, method in refused.items():
        assert word in sentence_of(ValueError, lambda method=method: wire.switch(method)), word
        assert wire.method is DGC and digest(*tensors_of(wire.state_dict())) == before
    wire.switch("blocksign:dense_below=1,topology=server")
    training.step(1)
    wire.detach()
    adam = Training(group, Run(thinwire.TernGrad(dense_below=0), "adam"))
    text = sentence_of(ValueError, lambda: adam.wire.switch(thinwire.DGC()))
    assert "momentum_correction=False" in text and "Adam" in text
    adam.step(0)
    adam.wire.detach()


def test_switch_that_is_refused_changes_nothing(cluster: Cluster) -> None:
    cluster.run(refused_switches, 2)


def with_rate(training: Training, rate: float) -> Training:
    for each in training.optimizer.param_groups:
        each["lr"] = rate
    return training


def pull_nothing(training: Training, steps: int) -> None:
    for _ in range(steps):
        training.optimizer.zero_grad()
        training.model({name: torch.zeros(shape) for name, shape in workers.SHAPES.items()}).backward()
        training.optimizer.step()


def switched_at_rate_zero(group: dist.ProcessGroup) -> None:
    """No gradient comes any more, so whatever moves is momentum's tail and what the old method had kept."""
    for optimizer, momentum, nesterov in (("plain", 0.0, False), ("half", 0.5, False), ("half-nesterov", 0.5, True)):
        for first in ("dgc:density=0.02,values=fp32", "blocksign:dense_below=1", "gtopk:momentum_correction=false"):
            before = left(with_rate(three_steps(group, first, optimizer), 0.0))
            assert before["kept"].norm() > 1
            kept = before["kept"] / (1 - momentum) if first.startswith("gtopk") else before["kept"]
            tail = momentum**2 * (momentum if nesterov else 1) / (1 - momentum)  # a step goes by at a rate of 0
            expected = before["parameters"] - LR * (kept + tail * before["velocity"])
            for second in ("dense", "dropping:density=1,values=fp32", "gtopk:density=1,momentum_correction=false"):
                training = with_rate(three_steps(group, first, optimizer), 0.0)
                training.wire.switch(second)
                pull_nothing(training, 1)
                close(flat(training.module), before["parameters"])
                training.reload()
                pull_nothing(with_rate(training, LR), 30 if momentum else 1)
                close(flat(training.module), expected, f"{optimizer}: {first} -> {second}", atol=2e-5)
                assert not any(rest.any() for rest in training.wire.detach().values())


def test_switch_at_a_learning_rate_of_zero_keeps_what_was_not_sent(cluster: Cluster) -> None:
    cluster.run(switched_at_rate_zero, 2)


def detached_at_rate_zero(group: dist.ProcessGroup) -> None:
    training = with_rate(three_steps(group, "dgc:density=0.02,values=fp32", "plain"), 0.0)
    before = left(with_rate(three_steps(group, "dgc:density=0.02,values=fp32", "plain"), 0.0))
    for method in ("dense", "gtopk:density=0.02,momentum_correction=false", "terngrad", "dgc:density=0.02", "dense"):
        training.wire.switch(method)
        pull_nothing(training, 1)
    rest = training.wire.detach()
    close(torch.cat([rest[name].reshape(-1) for name in workers.SHAPES]), before["kept"], atol=1e-5)


def test_switches_and_detach_at_a_learning_rate_of_zero_lose_nothing(cluster: Cluster) -> None:
    cluster.run(detached_at_rate_zero, 2)
