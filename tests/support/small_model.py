"""A small model with one step of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def small(group: Any) -> tuple[DDP, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs, labels = torch.randn(8, 64), torch.randint(0, 10, (8,))
    return model, optimizer, lambda: nn.functional.cross_entropy(model(inputs), labels).backward()
