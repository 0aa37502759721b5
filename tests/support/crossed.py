"""A model whose layers are used in another order than they are declared in."""

from __future__ import annotations

import torch
from torch import nn


class Crossed(nn.Module):
    """Six layers; ``order`` is the one in which they are used, which DDP's rebuilt buckets follow."""

    def __init__(self, order: tuple[int, ...]) -> None:
        super().__init__()
        self.layers, self.order = nn.ModuleList(nn.Linear(64, 64) for _ in order), order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for place in self.order:
            x = torch.tanh(self.layers[place](x))
        return x
