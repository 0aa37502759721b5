"""`wikitext2-transformer`: a Transformer language model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from thinwire.lab.recipes import rates
from thinwire.lab.recipes.base import Batch
from thinwire.lab.recipes.data import words
from thinwire.lab.recipes.language import LanguageRecipe
from thinwire.lab.recipes.models.transformer_lm import TransformerLanguageModel
from thinwire.lab.recipes.sharing import epoch_generator, part_of_batch, seed_dropout


class Wikitext2Transformer(LanguageRecipe):
    """4 layers of width 256, tied embeddings: 11.7 M parameters; AdamW, 64 windows of 128 words per step.

    Momentum correction needs SGD; with Adam, sparse methods keep plain error feedback.
    """

    name = "wikitext2-transformer"
    summary = "WikiText-2, a 4-layer Transformer of 11.7 million parameters, Adam"
    epochs = 20
    batch_size = 64
    window = 128
    needs_data = True
    width: ClassVar[int] = 256
    num_layers: ClassVar[int] = 4
    num_heads: ClassVar[int] = 4
    dropout: ClassVar[float] = 0.3
    lr: float = 1e-3
    clip_norm: float = 1.0
    settings = ("batch_size", "lr", "clip_norm", "precision")
    sign_lr_factor = 0.3
    default_method = "dgc:density=0.01,momentum_correction=false,warmup=508,values=fp32"  # two epochs

    def __init__(self, data: Path | None = None, device: torch.device | None = None) -> None:
        super().__init__(data, device)
        train, test, vocabulary = words.read(words.WIKITEXT2, data, "train.txt", "test.txt")
        self.num_words = len(vocabulary)
        self.keep(train, test)

    def model(self) -> nn.Module:
        return TransformerLanguageModel(
            self.num_words,
            width=self.width,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            max_length=self.window,
            dropout=self.dropout,
        )

    def num_batches(self, world: int) -> int:
        return (len(self.train_stream) - self.window - 1) // self.window // self.batch_size

    def train_batches(self, epoch: int, *, seed: int, rank: int, world: int) -> Iterator[Batch]:
        # Nothing is carried on, so windows come in random order, cut at another place in every epoch.
        seed_dropout(seed, epoch, rank)
        part = part_of_batch(self, rank, world)
        generator = epoch_generator(seed, epoch)
        first = int(torch.randint(0, self.window, (), generator=generator))
        count = self.num_batches(world) * self.batch_size
        order = torch.randperm(count, generator=generator).view(-1, self.batch_size)[:, part]
        starts = (first + order * self.window).to(self.device)  # (steps, B / world)
        offsets = torch.arange(self.window + 1, device=self.device)
        for chosen in starts:
            windows = self.train_stream[chosen[:, None] + offsets]  # (B / world, window + 1)
            yield windows[:, :-1], windows[:, 1:]

    def optimizer(self, parameters: Iterable[nn.Parameter], lr_factor: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, self.lr * lr_factor, betas=(0.9, 0.98), weight_decay=0.01)

    def schedule(self, optimizer: torch.optim.Optimizer, num_steps: int) -> LRScheduler:
        return rates.cosine(optimizer, num_steps, warmup=0.05)
