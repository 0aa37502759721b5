"""Ranks that take steps alone: the parameters that they have in common, and the step that these take together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.engine.layout import memory_flat, shaped_like

LONGEST = 2**15  # the root of how many steps a round may have at a learning rate of almost 0


@dataclass(frozen=True)
class OuterRule:
    """How often ranks meet, and what becomes of the mean d of their differences there.

    m = momentum m + d;  theta -= rate (d + momentum m with Nesterov, else m; d alone without momentum)

    In the first ``start`` steps they meet behind each one. With ``qsr`` rounds grow while the learning rate falls, and
    with ``most_apart`` they become shorter while ranks go further than this share of |theta| in one.
    """

    every: int  # optimizer steps
    rate: float = 1.0
    momentum: float = 0.0
    nesterov: bool = True
    start: int = 0
    qsr: float | None = None
    most_apart: float | None = None

    def steps(self, step: int, lr: float) -> int:
        """How many steps a round has that goes on behind optimizer step ``step`` (0, 1, ...), made with rate ``lr``."""
        if step < self.start:
            return 1
        if self.qsr is None:
            return self.every
        return max(self.every, math.floor(min(self.qsr / lr, LONGEST) ** 2)) if lr > 0 else LONGEST**2


class OuterStep:
    """theta and m, by parameter name, and how far this rank is in its round.

    ``parameters`` are this rank's own, x_i. Those that are shorter than float32 have a theta in float32, whose rounded
    form is where a round begins; ``buffers`` are kept beside them, so that a saved state is all that a rank needs.
    """

    def __init__(self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        self.parameters, self.buffers = dict(parameters), dict(buffers)
        own = {name: p.detach() for name, p in parameters.items()}
        self.theta = {name: p.clone() if p.itemsize > 2 else p.to(torch.float32) for name, p in own.items()}
        self.momentum: dict[str, Tensor] = {}
        self.in_round = 0  # steps since the ranks were equal
        self.rounds = 0
        self.distance: float | None = None  # of the last round, see Stats
        self.halvings = 0  # of the length of rounds, because ranks went too far

    def prepare(self, rule: OuterRule) -> None:
        """Momentum is there from the beginning, so that every saved state has the same tensors."""
        if rule.most_apart is None:
            self.halvings = 0
        if not rule.momentum:
            self.momentum = {}
        elif not self.momentum:
            self.momentum = {name: torch.zeros_like(theta) for name, theta in self.theta.items()}

    def differences(self) -> dict[str, Tensor]:  # float32, of the parameters' shapes
        """theta - x_i: what this rank's optimizer made of the round so far."""
        found = {}
        for name, p in self.parameters.items():
            begin = self.theta[name].to(p.dtype).to(self.theta[name].dtype)  # where the round began, to the bit
            found[name] = (begin - p.detach()).to(torch.float32)
        return found

    def step(self, mean: Mapping[str, Tensor], rule: OuterRule) -> None:
        """Move theta by the mean difference, and begin the next round there."""
        for name, theta in self.theta.items():
            d = mean[name].to(theta.dtype)
            if rule.momentum:
                m = self.momentum[name].mul_(rule.momentum).add_(d)
                d = d.add(m, alpha=rule.momentum) if rule.nesterov else m
            theta.sub_(d, alpha=rule.rate)
        self.rounds += 1
        self.go_back()

    def watch(self, rule: OuterRule, took: int) -> bool:
        """Make rounds half as long where ranks went too far in the last one, of ``took`` steps, and longer again where
        they did not go half as far; whether they became shorter. All ranks know the same distance."""
        if rule.most_apart is None or self.distance is None:
            return False
        if self.distance > rule.most_apart:
            self.halvings += took > 1
            return took > 1
        self.halvings -= self.halvings > 0 and self.distance < rule.most_apart / 2
        return False

    def go_back(self) -> None:
        """x_i = theta."""
        with torch.no_grad():
            for name, p in self.parameters.items():
                p.copy_(self.theta[name])
        self.in_round = 0

    def length(self) -> float:
        """|theta|."""
        return math.sqrt(square_sum(list(self.theta.values())))

    # ---------------------------------------------------------------------------------------------------- a state

    @property
    def _kept(self) -> dict[str, dict[str, Tensor]]:
        all_kinds = {"theta": self.theta, "momentum": self.momentum, "own": self.parameters, "buffers": self.buffers}
        return {kind: tensors for kind, tensors in all_kinds.items() if tensors}

    @property
    def kinds(self) -> list[str]:
        return list(self._kept)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Flat copies by kind and name. x_i itself is kept and not its difference, which rounding would change."""
        tensors = self._kept.items()
        kept = {kind: {name: memory_flat(t.detach()).clone() for name, t in v.items()} for kind, v in tensors}
        return {**kept, "counters": {"in_round": self.in_round, "rounds": self.rounds, "halvings": self.halvings}}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]], *, anew: bool) -> int:
        """Take up where ``state_dict`` left off, or ``anew`` from theta: then return how many steps since theta the
        rank had made that saved it."""
        _fill(self.theta, state["theta"])
        _fill(self.momentum, state.get("momentum", {}))
        _fill(self.buffers, state.get("buffers", {}))
        counters = state["counters"]
        self.rounds, self.halvings, saved = counters["rounds"], counters.get("halvings", 0), counters["in_round"]
        if anew:
            self.go_back()
            return int(saved)
        _fill(self.parameters, state["own"])
        self.in_round = saved
        return 0


def square_sum(tensors: Sequence[Tensor]) -> float:
    """Of all elements, in float64; one transfer from a GPU."""
    norms = torch._foreach_norm(list(tensors), 2, dtype=torch.float64)
    return float(torch.stack(norms).square().sum())


def _fill(tensors: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Copy flat vectors into tensors; one that is not there was zero."""
    with torch.no_grad():
        for name, tensor in tensors.items():
            flat = saved.get(name)
            if flat is None:
                tensor.zero_()
            else:
                tensor.copy_(shaped_like(flat.to(tensor.device, tensor.dtype), tensor))
