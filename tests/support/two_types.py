"""A model with parameters of two types."""

from __future__ import annotations

import torch
from torch import Tensor


class TwoTypes(torch.nn.Module):
    """Layers of float32 and bfloat16 in turn, whose gradients DDP puts into different buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = torch.nn.Linear(6, 24), torch.nn.Linear(24, 24), torch.nn.Linear(24, 3)
        self.second.to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(torch.tanh(self.first(x)).to(torch.bfloat16)).to(torch.float32))
