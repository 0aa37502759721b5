"""What the scripts of this folder train, and how their ranks are compared."""

from __future__ import annotations

import hashlib
import json
import os
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

METHOD = "dgc:density=0.05,dense_below=64"
DRIFTING = "dropping:density=0.05,dense_below=64,local=partial,sync_every=50"
torch.set_num_threads(1)


class Net(nn.Module):
    """Gives what a transformers.Trainer expects."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:  # (B, 64) and (B,)
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def digits(number: int = 512) -> list[dict[str, Tensor]]:
    with resources.files("thinwire").joinpath("lab/data/digits.npz").open("rb") as file, np.load(file) as arrays:
        images = torch.from_numpy(arrays["images"]).flatten(1).float() / 16
        labels = torch.from_numpy(arrays["labels"]).long()
    return [{"x": x, "labels": y} for x, y in zip(images[:number], labels[:number], strict=True)]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def values_of(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])


def digest(model: nn.Module) -> str:
    return hashlib.sha256(values_of(model).numpy().tobytes()).hexdigest()[:16]


def everybody(value: Any) -> list[Any]:
    """What this is on all ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def mean_of_ranks(values: Tensor) -> Tensor:
    total = values.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def finish(found: dict[str, Any]) -> None:
    """Rank 0 writes what all ranks found where the test looks for it."""
    ranks = everybody(found)
    if dist.get_rank() == 0:
        Path(os.environ["FOLDER"], "found.json").write_text(json.dumps(ranks))
    dist.barrier()
    dist.destroy_process_group()
