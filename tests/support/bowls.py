"""Trainings of a bowl with local steps, whose gradients NumPy has as well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from oracles import local_steps as oracle
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from workers import digest

import thinwire

SIZES = {"w": (7, 5), "v": (11,)}
NUMEL, SPLIT = 46, 35
SPARSE = "(dropping:density=0.25,values=fp32)"


class Bowl(nn.Module):
    """The gradient of every element x is s x + noise(rank, step)."""

    def __init__(self) -> None:
        super().__init__()
        start = torch.from_numpy(begin().astype(np.float32))
        self.w, self.v = nn.Parameter(start[:SPLIT].view(7, 5).clone()), nn.Parameter(start[SPLIT:].clone())

    def forward(self, rank: int, step: int) -> Tensor:
        x = torch.cat([self.w.reshape(-1), self.v])
        s, noise = (torch.from_numpy(part.astype(np.float32)) for part in (slopes(), pull(rank, step)))
        return (0.5 * s * x * x + noise * x).sum()


def begin() -> np.ndarray:
    return np.random.default_rng(1).standard_normal(NUMEL).astype(np.float32).astype(np.float64)


def slopes() -> np.ndarray:
    return np.random.default_rng(2).uniform(0.2, 1.0, NUMEL).astype(np.float32).astype(np.float64)


def pull(rank: int, step: int) -> np.ndarray:
    return np.random.default_rng([3, rank, step]).standard_normal(NUMEL).astype(np.float32).astype(np.float64)


def gradient(rank: int, x: np.ndarray, step: int) -> np.ndarray:
    return slopes() * x + pull(rank, step)


def flat(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def everybody(group: Any, mine: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    return found


def is_equal(group: Any, module: nn.Module) -> bool:
    return len(set(everybody(group, digest(flat(module))))) == 1


def plain_sgd(bowl: Any) -> Any:
    return torch.optim.SGD(bowl.parameters(), lr=0.1)


def _heavy(bowl: Any) -> Any:
    return torch.optim.SGD(bowl.parameters(), lr=0.05, momentum=0.9)


def _adamw(bowl: Any) -> Any:
    return torch.optim.AdamW(bowl.parameters(), lr=0.05, weight_decay=0.1)


def _two(bowl: Any) -> Any:
    return [torch.optim.SGD([bowl.w], lr=0.1), torch.optim.AdamW([bowl.v], lr=0.05, weight_decay=0.1)]


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {"sgd": plain_sgd, "heavy": _heavy, "adamw": _adamw, "two": _two}


def own_two(rank: int) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    first, second = oracle.sgd(0.1)(rank), oracle.adamw(0.05, 0.1)(rank)
    return lambda x, g: np.concatenate([first(x[:SPLIT], g[:SPLIT]), second(x[SPLIT:], g[SPLIT:])])


INNER: dict[str, Any] = {
    "sgd": oracle.sgd(0.1),
    "heavy": oracle.sgd(0.05, 0.9),
    "adamw": oracle.adamw(0.05, 0.1),
    "two": own_two,
}


class Loop:
    """A training of a bowl with local steps; of the bare module, or in DDP."""

    def __init__(self, group: Any, optimizer: str, method: Any, ddp: bool = False, **options: Any) -> None:
        self.group, self.rank, self.bowl = group, dist.get_rank(group), Bowl()
        self.model: Any = DDP(self.bowl, process_group=group) if ddp else self.bowl
        made = OPTIMIZERS[optimizer](self.bowl)
        self.optimizers = made if isinstance(made, list) else [made]
        options |= {} if ddp else {"group": group}
        self.wire = thinwire.attach(self.model, made, method, **options)

    def step(self, step: int) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.model(self.rank, step).backward()
        for optimizer in self.optimizers:
            optimizer.step()

    def train(self, first: int, last: int) -> list[Tensor]:
        trajectory = []
        for step in range(first, last):
            self.step(step)
            trajectory.append(flat(self.bowl))
        return trajectory


class Watched:
    """Copies of what entered a reducer and of what came out of it, one vector per round."""

    def __init__(self, wire: thinwire.Wire) -> None:
        self.given: list[Tensor] = []
        self.means: list[Tensor] = []
        reduce = wire.reducer.reduce

        def watched(differences: dict[str, Tensor]) -> None:
            self.given.append(torch.cat([d.reshape(-1) for d in differences.values()]).clone())
            reduce(differences)
            self.means.append(torch.cat([d.reshape(-1) for d in differences.values()]).clone())

        wire.reducer.reduce = watched  # type: ignore[method-assign,assignment]


def residual(wire: thinwire.Wire) -> Tensor:
    kept = wire.reducer.running.kept("residual")
    return torch.cat([kept[name] for name in SIZES])
