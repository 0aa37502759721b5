"""Trainings of models of fully_shard, for processes of a cluster of four that is not the session's.

Every mesh spans all ranks of that cluster, or leaves the last ones out; it is made once in a process, because groups
cannot be destroyed and made again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from workers import digest

import thinwire

INPUTS, OUTPUTS = 8, 3
NAMES = ("replica", "piece")
_meshes: dict[tuple[int, int], DeviceMesh] = {}

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "heavy": lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda net: torch.optim.AdamW(net.parameters(), lr=0.01),
}


def mesh_of(replicas: int, shards: int) -> DeviceMesh:
    """All ranks of the cluster call this alike, also those outside of the mesh."""
    shape = replicas, shards
    if shape not in _meshes:
        ranks = torch.arange(replicas * shards).view(shape)
        _meshes[shape] = DeviceMesh("cpu", ranks, mesh_dim_names=NAMES)
    return _meshes[shape]


def network(seed: int = 0) -> nn.Sequential:
    """Rows that two and four ranks cut unevenly, and parameters of which some ranks have nothing."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(INPUTS, 33), nn.Tanh(), nn.Linear(33, 17), nn.Tanh(), nn.Linear(17, OUTPUTS))


def sharded(mesh: DeviceMesh, seed: int = 0, **options: Any) -> Any:
    net = network(seed)
    for module in (net[0], net[2], net):  # the last layer is the root's
        fully_shard(module, mesh=mesh, **options)
    return net


def batch(rank: int, step: int, size: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(size, INPUTS, generator=generator)
    return x, torch.stack([x.sum(dim=1) / 3, x[:, 0] - x[:, 1], x[:, 2] + x[:, 3]], dim=1).tanh()


def loss_of(net: Any, rank: int, step: int) -> Tensor:
    x, y = batch(rank, step)
    return (net(x) - y).square().mean()


def whole(net: nn.Module) -> Tensor:
    """All parameters as one vector; a collective call where they are sharded."""
    parts = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in net.parameters()]
    return torch.cat([part.detach().flatten() for part in parts])


def rows_digest(net: nn.Module) -> str:
    """The bits of what this rank holds."""
    return digest(*(p.to_local() if hasattr(p, "to_local") else p for p in net.parameters()))


class ShardedTraining:
    """A model of fully_shard on a mesh with a wire; ``rank`` gives a batch per step."""

    def __init__(
        self, mesh: DeviceMesh, method: Any, optimizer: str = "heavy", seed: int = 0, options: Any = None, **more: Any
    ) -> None:
        self.rank, self.mesh = dist.get_rank(), mesh
        self.net = sharded(mesh[NAMES[1]], seed, **(options or {}))
        self.optimizer = OPTIMIZERS[optimizer](self.net)
        self.wire = thinwire.attach(self.net, self.optimizer, method, mesh=mesh, **more)

    def backward(self, step: int) -> float:
        loss = loss_of(self.net, self.rank, step)
        loss.backward()
        return float(loss.detach())

    def step(self, step: int) -> float:
        self.optimizer.zero_grad()
        loss = self.backward(step)
        self.optimizer.step()
        return loss

    def train(self, first: int, last: int) -> list[Tensor]:
        """The parameters after every step."""
        trajectory = []
        for step in range(first, last):
            self.step(step)
            trajectory.append(whole(self.net))
        return trajectory
