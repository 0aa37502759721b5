"""`digits`: a small convolutional network on the 8x8 handwritten digits that ship with the package."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from importlib import resources
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from thinwire.lab.recipes.base import Batch, Metric, Recipe
from thinwire.lab.recipes.sharing import epoch_generator, part_of_batch

NUM_TEST = 600  # of 1,797; a third, so that one point of accuracy is six images and not three
SPLIT_SEED = 1998
SIDE = 8


class Digits(Recipe):
    """118,186 parameters; 1,197 training images, shifted by up to a pixel; 600 test images; Nesterov SGD."""

    name = "digits"
    summary = "8x8 handwritten digits (UCI), a convolutional network of 118 thousand parameters"
    metric = Metric(name="accuracy", unit="%", difference_unit="points", higher_is_better=True)
    epochs = 24
    batch_size = 64
    lr = 0.05
    num_lr_warmup_epochs = 2
    # A majority vote is +1 or -1 for every weight: the learning rate is the length of the step itself.
    sign_lr_factor = 0.02
    default_method = "dgc:warmup=36,dense_below=256"
    settings = ("batch_size", "lr")

    def __init__(self, data: Path | None = None, device: torch.device | None = None) -> None:
        super().__init__(data, device)
        source = resources.files("thinwire").joinpath("lab/data/digits.npz")
        with source.open("rb") as file, np.load(file) as arrays:
            images = torch.from_numpy(arrays["images"])  # (1797, 8, 8) uint8, 0..16
            labels = torch.from_numpy(arrays["labels"])  # (1797,) uint8
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SPLIT_SEED))
        x = images[order].unsqueeze(1).float() / 16  # (1797, 1, 8, 8) in [0, 1]
        y = labels[order].long()  # (1797,)
        self.x_test, self.y_test = x[:NUM_TEST], y[:NUM_TEST]
        self.x_train, self.y_train = x[NUM_TEST:], y[NUM_TEST:]

    def model(self) -> nn.Module:
        model = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * (SIDE // 2) ** 2, 96),
            nn.ReLU(),
            nn.Linear(96, 10),
        )
        for name, parameter in model.named_parameters():  # torch's own initialisation idles for three epochs
            if name.endswith("weight"):
                nn.init.kaiming_normal_(parameter, nonlinearity="relu")
            else:
                nn.init.zeros_(parameter)
        return model

    def optimizer(self, parameters: Iterable[nn.Parameter], lr_factor: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=self.lr * lr_factor, momentum=0.9, nesterov=True, weight_decay=5e-4)

    def schedule(self, optimizer: torch.optim.Optimizer, num_steps: int) -> LRScheduler:
        num_warmup = max(1, round(num_steps * self.num_lr_warmup_epochs / self.epochs))

        def factor(step: int) -> float:  # linear warm-up times cosine decay to zero
            return min(1.0, (step + 1) / num_warmup) * 0.5 * (1 + math.cos(math.pi * step / num_steps))

        return LambdaLR(optimizer, factor)

    def num_batches(self, world: int) -> int:
        return len(self.y_train) // self.batch_size

    def train_batches(self, epoch: int, *, seed: int, rank: int, world: int) -> Iterator[Batch]:
        # Order and shifts are drawn for the global batch and shared out: N workers see what one would see.
        part = part_of_batch(self, rank, world)
        generator = epoch_generator(seed, epoch)
        order = torch.randperm(len(self.y_train), generator=generator)
        for first in range(0, self.num_batches(world) * self.batch_size, self.batch_size):
            shifts = torch.randint(-1, 2, (self.batch_size, 2), generator=generator)  # (B, 2) rows, columns
            chosen = order[first : first + self.batch_size][part]
            yield shifted(self.x_train[chosen], shifts[part]).to(self.device), self.y_train[chosen].to(self.device)

    def test_batches(self, *, rank: int, world: int) -> Iterator[Batch]:
        if rank < NUM_TEST:
            yield self.x_test[rank::world].to(self.device), self.y_test[rank::world].to(self.device)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y)

    def score(self, model: nn.Module, batch: Batch) -> tuple[float, ...]:
        x, y = batch
        return float((model(x).argmax(dim=1) == y).sum()), len(y)

    def judge(self, *totals: float) -> float:
        right, count = totals
        return 100.0 * right / count


def shifted(x: Tensor, shifts: Tensor) -> Tensor:
    """Move each image by its own shift, zeros coming in. x: (B, 1, 8, 8); shifts: (B, 2) in -1..1."""
    padded = F.pad(x[:, 0], (1, 1, 1, 1))  # (B, 10, 10)
    index = torch.arange(SIDE) + 1
    rows = (index + shifts[:, :1])[:, :, None]  # (B, 8, 1)
    columns = (index + shifts[:, 1:])[:, None, :]  # (B, 1, 8)
    return padded[torch.arange(len(x))[:, None, None], rows, columns].unsqueeze(1)
