"""The user's optimizer: closures, cycled momentum, a step that raises, and Adam."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from cluster import Cluster
from torch import Tensor
from workers import EXACT, Run, Training, close, flat

import thinwire


def closures(group: dist.ProcessGroup) -> None:
    finals = []
    for method in (None, EXACT, thinwire.DGC(density=1.0, factor_masking=False, clip_norm=1e9, values="fp32")):
        training = Training(group, Run(method, "nesterov-decay", task="net"))

        def closure(training: Training = training) -> Tensor:
            training.optimizer.zero_grad()
            loss = training.loss(training.count)
            loss.backward()
            return loss

        for step in range(6):
            training.count = step
            assert float(training.optimizer.step(closure).detach()) > 0
            assert training.optimizer.param_groups[0]["momentum"] == 0.9
        finals.append(flat(training.module))
        if training.wire is not None:
            training.wire.detach()
    for other in finals[1:]:
        close(other, finals[0])


def test_closure_is_a_step_with_the_users_momentum(cluster: Cluster) -> None:
    cluster.run(closures, 2)


def cycled_momentum(group: dist.ProcessGroup) -> None:
    seen: list[list[Any]] = []
    finals = []
    for method in (None, EXACT):
        training = Training(group, Run(method, "decay", 12, "net", onecycle=True))
        seen.append([])
        for step in range(12):
            training.step(step)
            one = training.optimizer.param_groups[0]
            saved = training.optimizer.state_dict()["param_groups"][0]
            assert saved["momentum"] == one["momentum"] and saved["weight_decay"] == one["weight_decay"]
            seen[-1].append((one["lr"], one["momentum"], one["weight_decay"], one["nesterov"]))
        finals.append(flat(training.module))
        if training.wire is not None:
            training.wire.detach()
    assert seen[0] == seen[1] and len({row[1] for row in seen[0]}) > 5
    close(finals[1], finals[0])


def test_momentum_is_the_users_at_all_times_outside_step(cluster: Cluster) -> None:
    """OneCycleLR cycles it; optimizer.state_dict() too; and the trajectory is plain SGD's at density 1."""
    cluster.run(cycled_momentum, 2)


def failing_step(group: dist.ProcessGroup) -> None:
    """A user's hook raises inside step(), after momentum was switched off."""
    finals = []
    for method in (None, EXACT):
        training = Training(group, Run(method, "decay", task="net"))
        training.step(0)
        handle = training.optimizer.register_step_pre_hook(lambda *_: (_ for _ in ()).throw(KeyError("mine")))
        training.optimizer.zero_grad()
        training.loss(1).backward()
        try:
            training.optimizer.step()
        except KeyError:
            handle.remove()
        else:
            raise AssertionError("the hook did not raise")
        one = training.optimizer.state_dict()["param_groups"][0]
        assert (one["momentum"], one["weight_decay"]) == (0.9, 0.02)
        one = training.optimizer.param_groups[0]
        assert (one["momentum"], one["weight_decay"]) == (0.9, 0.02)
        training.optimizer.step()
        training.step(2)
        finals.append(flat(training.module))
        if training.wire is not None:
            training.wire.detach()
    close(finals[1], finals[0])


def test_step_that_raises_half_way_does_not_take_momentum_away(cluster: Cluster) -> None:
    cluster.run(failing_step, 2)


def learns(group: dist.ProcessGroup, pairs: list[tuple[str, Any]]) -> None:
    for optimizer, method in pairs:
        training = Training(group, Run(method, optimizer, task="net"))
        training.loss = lambda step, t=training: t.problem.loss(t.model, t.rank, 0)  # one batch: it can be learnt
        first = float(training.loss(0).detach())
        for step in range(15):
            training.step(step)
        assert float(training.loss(0).detach()) < first - 0.05, f"{method} with {optimizer}"
        training.wire.detach()


def test_adam_and_adamw_train_with_every_method_that_leaves_momentum_alone(cluster: Cluster) -> None:
    methods = [
        thinwire.TernGrad(dense_below=0),
        thinwire.GradientDropping(density=0.1),
        thinwire.BlockSign(dense_below=1),
        thinwire.SignSGD(),
    ]
    methods += [thinwire.DGC(density=0.1, momentum_correction=False, values="fp32"), thinwire.GTopK(density=0.1)]
    cluster.run(learns, 3, [(optimizer, method) for method in methods for optimizer in ("adam", "adamw")])
