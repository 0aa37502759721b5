"""Sums that describe a training's health, for whoever watches it; left out of most steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thinwire.engine.flat_gradient import Gradient, as_flat


class Unmeasured:
    """The null object: nothing is added up."""

    def of_wanted(self, x: Gradient) -> Unmeasured:
        return self

    def of_left(self, x: Gradient) -> Unmeasured:
        return self


UNMEASURED = Unmeasured()


def _zero() -> Tensor:
    return torch.zeros((), dtype=torch.float64)


@dataclass(frozen=True)
class Norms:
    """g is the gradient, x what should be sent, e what remains of x after the exchange; each method returns the sums
    with one exchange's added."""

    g2: Tensor
    x2: Tensor
    x1: Tensor
    e2: Tensor
    e1: Tensor

    @classmethod
    def nothing(cls) -> Norms:
        return cls(_zero(), _zero(), _zero(), _zero(), _zero())

    def of_gradients(self, parts: Sequence[Tensor]) -> Norms:
        total = self.g2
        for part in parts:
            total = _plus(total, part, 2)
        return replace(self, g2=total)

    def of_wanted(self, x: Gradient) -> Norms:
        flat = as_flat(x)
        return replace(self, x2=_plus(self.x2, flat, 2), x1=_plus(self.x1, flat, 1))

    def of_left(self, x: Gradient) -> Norms:
        """After the memory kept the rest, x is the residual itself."""
        flat = as_flat(x)
        return replace(self, e2=_plus(self.e2, flat, 2), e1=_plus(self.e1, flat, 1))

    def as_bytes(self) -> Tensor:  # -> (40,) uint8
        sums = (self.g2, self.x2, self.x1, self.e2, self.e1)
        return torch.stack([one.to(self.g2.device) for one in sums]).view(torch.uint8)


def _plus(total: Tensor, vector: Tensor, order: int) -> Tensor:
    norm = torch.linalg.vector_norm(vector, order, dtype=torch.float64)
    return total.to(norm.device) + norm**order


Measured = Norms | Unmeasured
