"""What the processes of the cluster run: training loops with and without thinwire, described by a Run.

Functions that assert on every rank themselves stand beside the test that runs them.
"""

from __future__ import annotations

import copy
import hashlib
import io
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from oracles.problem import Problem
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire

SHAPES = {"a": (40, 30), "b": (50,), "c": (70, 60), "d": (3, 5), "e": ()}  # 5466 elements; c is cut into slices
LR = 0.1


class Dot(torch.nn.Module):
    """The sum of <p, g> over its parameters: the gradient of p is g, whatever the parameters are."""

    def __init__(self, shapes: dict[str, tuple[int, ...]] = SHAPES) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(noise(shape, 99, 99, name)))

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        return sum((getattr(self, name) * g.to(getattr(self, name).dtype)).sum() for name, g in gradients.items())


def noise(shape: tuple[int, ...], rank: int, step: int, name: str) -> Tensor:
    """Numbers that depend on their arguments alone and leave every global generator alone."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{rank}/{step}/{name}".encode()))
    return torch.randn(shape, generator=generator)


def pulls(rank: int, step: int, shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, Tensor]:
    return {name: noise(shape, rank, step, name) for name, shape in shapes.items()}


DGC = thinwire.DGC(density=0.05, dense_below=0, values="fp32", factor_masking=True)
EXACT = thinwire.DGC(density=1.0, factor_masking=False, dense_below=0, values="fp32")
DOT_NUMEL = sum(noise(shape, 0, 0, "").numel() for shape in SHAPES.values())


@dataclass(frozen=True)
class Run:
    """One training. task: "dot" (constant pulls) or "net" (a tanh network). events: step -> what happens before it.

    Events: ("attach", method), ("switch", method), ("detach",), ("reload",), or several of them in a list.
    """

    method: Any = None
    optimizer: str = "plain"
    steps: int = 10
    task: str = "dot"
    ddp: dict[str, Any] = field(default_factory=dict)
    hierarchy: Any = None
    events: dict[int, Any] = field(default_factory=dict)
    trajectory: bool = True
    onecycle: bool = False


def sgd(**options: Any) -> Callable[[torch.nn.Module], torch.optim.Optimizer]:
    return lambda module: torch.optim.SGD(module.parameters(), **{"lr": LR, **options})


def _groups(module: torch.nn.Module) -> torch.optim.Optimizer:
    first, second, *rest = module.parameters()
    return torch.optim.SGD(
        [
            {"params": [first], "lr": 0.05, "momentum": 0.9, "weight_decay": 0.02, "nesterov": True},
            {"params": [second], "lr": 0.2, "momentum": 0.5},
            {"params": rest, "weight_decay": 0.1, "maximize": True},
        ],
        lr=LR,
    )


OPTIMIZERS: dict[str, Callable[[torch.nn.Module], torch.optim.Optimizer]] = {
    "plain": sgd(),
    "heavy": sgd(momentum=0.9),
    "nesterov": sgd(momentum=0.9, nesterov=True),
    "half": sgd(momentum=0.5),  # whose tail is over after 30 steps
    "half-nesterov": sgd(momentum=0.5, nesterov=True),
    "decay": sgd(momentum=0.9, weight_decay=0.02),
    "nesterov-decay": sgd(momentum=0.9, nesterov=True, weight_decay=0.02),
    "maximize-plain": sgd(maximize=True),
    "maximize": sgd(lr=0.02, momentum=0.9, weight_decay=0.02, maximize=True),
    "maximize-nesterov": sgd(lr=0.02, momentum=0.9, weight_decay=0.02, maximize=True, nesterov=True),
    "groups": _groups,
    "tiny": sgd(lr=0.003, momentum=0.9),
    "adam": lambda module: torch.optim.Adam(module.parameters(), lr=0.01),
    "adamw": lambda module: torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.1),
}


def flat(module: torch.nn.Module) -> Tensor:
    """All parameters as one vector."""
    return torch.cat([p.detach().reshape(-1).to(torch.float32) for p in module.parameters()])


def digest(*tensors: Tensor) -> str:
    """The bits of tensors, as a short text."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:16]


def through_a_file(state: Any) -> Any:
    """What torch.load(weights_only=True) gives back of what torch.save wrote."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


class Training:
    """One rank of a Run."""

    def __init__(self, group: dist.ProcessGroup, run: Run) -> None:
        self.group, self.run, self.rank = group, run, dist.get_rank(group)
        self.problem = Problem()
        self.module = Dot() if run.task == "dot" else self.problem.module()
        self.optimizer = OPTIMIZERS[run.optimizer](self.module)
        self.model = DDP(self.module, process_group=group, **run.ddp)
        self.wire: thinwire.Wire | None = None
        self.leftover: dict[str, Tensor] = {}
        self.scheduler: Any = None
        if run.onecycle:
            self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=LR, total_steps=run.steps)
        if run.method is not None:
            self.happen("attach", run.method)

    def loss(self, step: int) -> Tensor:
        if self.run.task == "dot":
            return self.model(pulls(self.rank, step))
        return self.problem.loss(self.model, self.rank, step)

    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.loss(step).backward()
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()

    def happen(self, event: str, *arguments: Any) -> None:
        if event == "attach":
            self.wire = thinwire.attach(self.model, self.optimizer, *arguments, hierarchy=self.run.hierarchy)
        elif event == "switch":
            assert self.wire is not None
            self.wire.switch(*arguments)
        elif event == "detach":
            assert self.wire is not None
            self.leftover = self.wire.detach()
            self.wire = None
            self.model = DDP(self.module, process_group=self.group, **self.run.ddp)
        else:
            self.reload()

    def reload(self) -> None:
        """Save everything, and go on with a new model, optimizer, DDP and wire."""
        assert self.wire is not None
        state = {"model": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}
        saved = through_a_file({**state, "wire": self.wire.state_dict()})
        method = self.wire.method
        self.wire.detach()
        self.module = copy.deepcopy(self.module)
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.zero_()
        self.optimizer = OPTIMIZERS[self.run.optimizer](self.module)
        self.optimizer.load_state_dict(saved["optimizer"])
        self.model = DDP(self.module, process_group=self.group, **self.run.ddp)
        self.module.load_state_dict(saved["model"])  # behind DDP, which gives all ranks what rank 0 has
        self.happen("attach", method)
        self.wire.load_state_dict(saved["wire"])

    def train(self) -> dict[str, Any]:
        snapshots = []
        for step in range(self.run.steps):
            events = self.run.events.get(step, [])
            for event in events if isinstance(events, list) else [events]:
                self.happen(*event)
            self.step(step)
            if self.run.trajectory:
                snapshots.append(flat(self.module))
        result: dict[str, Any] = {"stats": self.wire.stats if self.wire is not None else None}
        if self.wire is not None:
            result["state"] = digest(*tensors_of(self.wire.state_dict()))
            self.leftover = self.wire.detach()
        result["final"] = flat(self.module)
        rest = [self.leftover.get(name, torch.zeros_like(p)) for name, p in self.module.named_parameters()]
        result["leftover"] = torch.cat([r.reshape(-1) for r in rest])
        result["trajectory"] = torch.stack(snapshots) if snapshots else torch.zeros(0)
        return result


def own_part(state: dict[str, Any]) -> dict[str, Any]:
    """What a wire's state holds of its rank alone."""
    (part,) = (value for key, value in state.items() if key.startswith("rank "))
    return part


def tensors_of(state: Any) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state]
    if isinstance(state, dict):
        return [tensor for key in sorted(state, key=str) for tensor in tensors_of(state[key])]
    return []


def train(group: dist.ProcessGroup, runs: list[Run]) -> list[dict[str, Any]]:
    """All runs one after the other; a result each."""
    return [Training(group, run).train() for run in runs]


# --- what functions assert with on every rank -------------------------------------------------------


def close(a: Tensor, b: Tensor, what: str = "", atol: float = 3e-6) -> None:
    torch.testing.assert_close(a, b, rtol=1e-5, atol=atol, msg=lambda found: f"{what}: {found}")


def sentence_of(kind: type[Exception], action: Callable[[], Any]) -> str:
    """The message of the exception that action raises, which must be of exactly this kind and be one sentence."""
    try:
        action()
    except Exception as error:
        assert type(error) is kind, f"{type(error).__name__} instead of {kind.__name__}: {error}"
        text = str(error)
        assert text and "\n" not in text and not text.rstrip(".").count(". "), text
        return text
    raise AssertionError(f"nothing was raised, expected a {kind.__name__}")
