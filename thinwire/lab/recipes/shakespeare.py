"""`shakespeare`: a small recurrent model of characters on plays that ship with the package."""

from __future__ import annotations

import lzma
import math
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from thinwire.lab.recipes import rates
from thinwire.lab.recipes.base import Metric
from thinwire.lab.recipes.language import LanguageRecipe
from thinwire.lab.recipes.models.gru_lm import GruLanguageModel

NUM_TEST = 50_000  # characters at the end, of 1,115,394


class Shakespeare(LanguageRecipe):
    """A GRU of 256 units over 65 characters, 0.27 M parameters; Nesterov SGD, pieces of 48 characters."""

    name = "shakespeare"
    summary = "Shakespeare's plays by characters, a GRU of 267 thousand parameters"
    metric = Metric(name="bits per character", unit="", difference_unit="bits", higher_is_better=False)
    epochs = 3
    batch_size = 128
    window = 48
    units: ClassVar[int] = 256
    embedding: ClassVar[int] = 64
    lr: float = 3.0
    momentum: float = 0.9
    clip_norm: float = 0.5
    settings = ("batch_size", "lr", "momentum", "clip_norm")
    sign_lr_factor = 0.002
    default_method = "dgc:warmup=172"  # one epoch of three

    def __init__(self, data: Path | None = None, device: torch.device | None = None) -> None:
        super().__init__(data, device)
        source = resources.files("thinwire").joinpath("lab/data/shakespeare.txt.xz")
        with source.open("rb") as file:
            content = torch.frombuffer(bytearray(lzma.decompress(file.read())), dtype=torch.uint8)  # (N,) ASCII
        characters, numbers = content.unique(return_inverse=True)
        self.num_characters = len(characters)
        self.keep(numbers[:-NUM_TEST], numbers[-NUM_TEST:])

    def model(self) -> nn.Module:
        return GruLanguageModel(self.num_characters, self.embedding, self.units)

    def optimizer(self, parameters: Iterable[nn.Parameter], lr_factor: float) -> torch.optim.Optimizer:
        nesterov = self.momentum > 0
        return torch.optim.SGD(parameters, self.lr * lr_factor, self.momentum, nesterov=nesterov)

    def schedule(self, optimizer: torch.optim.Optimizer, num_steps: int) -> LRScheduler:
        return rates.cosine(optimizer, num_steps, warmup=0.05)

    def judge(self, *totals: float) -> float:
        nats, count = totals
        return nats / count / math.log(2)
