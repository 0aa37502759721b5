"""An optimizer of one's own, whose groups have no learning rate."""

from __future__ import annotations

from typing import Any

import torch


class Rateless(torch.optim.Optimizer):
    """Finds its own step length, as Adafactor does."""

    def __init__(self, parameters: Any, length: float) -> None:
        super().__init__(parameters, {})
        self.length = length

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=self.length)
