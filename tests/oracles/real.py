"""The same training through thinwire.attach on DDP; runs on every rank of a process group."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from oracles.optimizers import SGD, Adam
from oracles.problem import Params, Problem, SharpProblem

SHARES = (0.3, 0.7)  # of a loss, each with a backward pass of its own


class Loop:
    """One model and its optimizer, trained by one backward pass per step."""

    scaler: torch.amp.GradScaler | None = None

    def __init__(
        self,
        group: dist.ProcessGroup,
        problem: Problem,
        optimizer: SGD | Adam,
        method: Any,
        ddp_options: dict[str, Any],
    ) -> None:
        self.problem, self.rank, self.network = problem, dist.get_rank(group), problem.module()
        self.model = DDP(self.network, process_group=group, **ddp_options)
        self.optimizer = optimizer.build(self.network)
        self.scheduler = optimizer.scheduler(self.optimizer)
        self.wire = None
        if method is not None:
            import thinwire

            self.wire = thinwire.attach(self.model, self.optimizer, method, scaler=self.scaler)

    def backward(self, t: int) -> None:
        self.problem.loss(self.model, self.rank, t).backward()

    def step(self, t: int) -> None:
        self.optimizer.zero_grad(set_to_none=t % 2 == 0)
        self.backward(t)
        self.optimizer.step()

    def detach(self) -> None:
        if self.wire is not None:
            self.wire.detach()


class TwoLosses(Loop):
    """A backward pass for each part of the loss."""

    def backward(self, t: int) -> None:
        for share in SHARES:
            (share * self.problem.loss(self.model, self.rank, t)).backward()


class Scaled(Loop):
    """The same under a GradScaler."""

    def __init__(self, *args: Any) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=4)
        super().__init__(*args)

    def step(self, t: int) -> None:
        assert self.scaler is not None
        self.optimizer.zero_grad(set_to_none=t % 2 == 0)
        for share in SHARES:
            self.scaler.scale(share * self.problem.loss(self.model, self.rank, t)).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


class Sharp(TwoLosses):
    """SAM: a pass that is thrown away, and another one where it leads to, for a step from where it began."""

    def step(self, t: int) -> None:
        assert isinstance(self.problem, SharpProblem)
        self.optimizer.zero_grad(set_to_none=t % 2 == 0)
        self.backward(t + 1)
        before = {name: p.detach().clone() for name, p in self.network.named_parameters()}
        with torch.no_grad():
            for name, p in self.network.named_parameters():
                p.add_(torch.from_numpy(self.problem.away(t)[name]).to(p.dtype))
        self.optimizer.zero_grad(set_to_none=t % 2 == 0)
        self.backward(t)
        with torch.no_grad():
            for name, p in self.network.named_parameters():
                p.copy_(before[name])
        self.optimizer.step()


class Adversarial(TwoLosses):
    """A second attached model, whose loss goes through the first one, as a generator's through its discriminator."""

    def __init__(self, group: dist.ProcessGroup, problem: Problem, optimizer: SGD | Adam, *args: Any) -> None:
        super().__init__(group, problem, optimizer, *args)
        self.maker = TwoLosses(group, replace(problem, seed=problem.seed + 1), optimizer, *args)

    def step(self, t: int) -> None:
        super().step(t)
        maker = self.maker
        maker.optimizer.zero_grad(set_to_none=t % 2 == 0)
        (maker.problem.loss(maker.model, self.rank, t) + self.problem.loss(self.model, self.rank, t + 1)).backward()
        maker.optimizer.step()
        maker.scheduler.step()

    def detach(self) -> None:
        super().detach()
        self.maker.detach()


LOOPS = {loop.__name__: loop for loop in (Loop, TwoLosses, Scaled, Sharp, Adversarial)}


def train(
    group: dist.ProcessGroup,
    problem: Problem,
    steps: int,
    optimizer: SGD | Adam,
    method: str | None,
    options: dict[str, Any],
    ddp_options: dict[str, Any],
    loop: str = "Loop",
) -> list[Params]:
    """This rank's parameters after each step, float32. method None: plain DDP, to check the harness."""
    chosen = None
    if method is not None:
        import thinwire

        chosen = getattr(thinwire, method)(**options)
    one = LOOPS[loop](group, problem, optimizer, chosen, ddp_options)
    trajectory = []
    for t in range(steps):
        one.step(t)
        one.scheduler.step()
        trajectory.append({name: p.detach().numpy().copy() for name, p in one.network.named_parameters()})
    one.detach()
    return trajectory
