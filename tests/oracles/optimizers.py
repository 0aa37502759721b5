"""torch.optim.SGD and Adam in NumPy, their schedules, and builders of the torch originals.

An optimizer here is a frozen description; start() gives a function step(w, g, t) that changes w in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from oracles.problem import Params

Step = Callable[[Params, Params, int], None]
CYCLE_STEPS = 20
FACTORS: dict[str, Callable[[int], float]] = {
    "constant": lambda t: 1.0,
    "decreasing": lambda t: 1.0 / (1.0 + 0.3 * t),
    "increasing": lambda t: 0.2 + 0.1 * t,
    "staircase": lambda t: 1.0 if t < 8 else 0.1,
}


def one_cycle(t: int, start: float, middle: float, end: float) -> float:
    """torch's OneCycleLR, cosine: start -> middle over 30 % of CYCLE_STEPS, then middle -> end."""
    peak, last = 0.3 * CYCLE_STEPS - 1, CYCLE_STEPS - 1
    a, b, done = (start, middle, t / peak) if t <= peak else (middle, end, (t - peak) / (last - peak))
    return b + (a - b) / 2 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True)
class SGD:
    """torch.optim.SGD. schedule: a LambdaLR factor, or "onecycle" (learning rate and momentum both move).

    bias_group: 1-D parameters are a second param group, without weight decay and at twice the learning rate.
    """

    lr: float = 0.1
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    schedule: str = "constant"
    bias_group: bool = False

    def lr_at(self, t: int, name: str) -> float:
        lr = self.lr * (2 if self.bias_group and name.endswith("bias") else 1)
        if self.schedule == "onecycle":
            return one_cycle(t, lr / 25, lr, lr / 25 / 1e4)
        return lr * FACTORS[self.schedule](t)

    def momentum_at(self, t: int) -> float:
        return one_cycle(t, 0.95, 0.85, 0.95) if self.schedule == "onecycle" else self.momentum

    def weight_decay_of(self, name: str) -> float:
        return 0.0 if self.bias_group and name.endswith("bias") else self.weight_decay

    def start(self) -> Step:
        buffers: Params = {}

        def step(w: Params, g: Params, t: int) -> None:
            m = self.momentum_at(t)
            for name in w:
                d = g[name] + self.weight_decay_of(name) * w[name]
                buffers[name] = m * buffers.get(name, 0.0) + d
                update = d + m * buffers[name] if self.nesterov else buffers[name]
                w[name] -= self.lr_at(t, name) * update

        return step

    def build(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        groups: list[dict] = [{"params": [p for n, p in model.named_parameters()], "lr": self.lr}]
        if self.bias_group:
            groups = [
                {"params": [p for n, p in model.named_parameters() if not n.endswith("bias")], "lr": self.lr},
                {
                    "params": [p for n, p in model.named_parameters() if n.endswith("bias")],
                    "lr": 2 * self.lr,
                    "weight_decay": 0.0,
                },
            ]
        return torch.optim.SGD(groups, momentum=self.momentum, nesterov=self.nesterov, weight_decay=self.weight_decay)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        if self.schedule == "onecycle":
            peaks = [group["lr"] for group in optimizer.param_groups]
            return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=peaks, total_steps=CYCLE_STEPS)
        return torch.optim.lr_scheduler.LambdaLR(optimizer, FACTORS[self.schedule])


@dataclass(frozen=True)
class Adam:
    """torch.optim.Adam, or AdamW with decoupled=True."""

    lr: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False

    def start(self) -> Step:
        first: Params = {}
        second: Params = {}
        b1, b2 = self.betas

        def step(w: Params, g: Params, t: int) -> None:
            for name in w:
                d = g[name]
                if self.decoupled:
                    w[name] *= 1 - self.lr * self.weight_decay
                else:
                    d = d + self.weight_decay * w[name]
                first[name] = b1 * first.get(name, 0.0) + (1 - b1) * d
                second[name] = b2 * second.get(name, 0.0) + (1 - b2) * d * d
                m_hat = first[name] / (1 - b1 ** (t + 1))
                v_hat = second[name] / (1 - b2 ** (t + 1))
                w[name] -= self.lr * m_hat / (np.sqrt(v_hat) + self.eps)

        return step

    def build(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        kind = torch.optim.AdamW if self.decoupled else torch.optim.Adam
        return kind(model.parameters(), lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, FACTORS["constant"])
