"""The same training through thinwire.attach on DDP; runs on every rank of a process group."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from oracles.optimizers import SGD, Adam
from oracles.problem import Params, Problem


def train(
    group: dist.ProcessGroup,
    problem: Problem,
    steps: int,
    optimizer: SGD | Adam,
    method: str | None,
    options: dict[str, Any],
    ddp_options: dict[str, Any],
) -> list[Params]:
    """This rank's parameters after each step, float32. method None: plain DDP, to check the harness."""
    rank = dist.get_rank(group)
    network = problem.module()
    model = DDP(network, process_group=group, **ddp_options)
    torch_optimizer = optimizer.build(network)
    scheduler = optimizer.scheduler(torch_optimizer)
    wire = None
    if method is not None:
        import thinwire

        wire = thinwire.attach(model, torch_optimizer, getattr(thinwire, method)(**options))
    trajectory = []
    for t in range(steps):
        torch_optimizer.zero_grad()
        problem.loss(model, rank, t).backward()
        torch_optimizer.step()
        scheduler.step()
        trajectory.append({name: p.detach().numpy().copy() for name, p in network.named_parameters()})
    if wire is not None:
        wire.detach()
    return trajectory
