"""`multi30k-transformer` and `multi30k-gru`: English to German, for the experiments with local gradients."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from thinwire.lab.recipes import rates
from thinwire.lab.recipes.data import multi30k
from thinwire.lab.recipes.data.subwords import PAD
from thinwire.lab.recipes.models.seq2seq_gru import GruTranslator
from thinwire.lab.recipes.models.seq2seq_transformer import TransformerTranslator
from thinwire.lab.recipes.translation import MAX_PIECES, TranslationRecipe


class Multi30k(TranslationRecipe):
    """29,000 sentence pairs, 8,000 subwords for both languages; Adam, 256 pairs per step; BLEU on test_2016_flickr.

    As in Aji and Heafield, section 4: Adam with a linear warm-up of the rate, averaging every 500 steps. They drop 99 %
    after a warm-up of three epochs; here 3 % in 8 bits are sent, for the same bytes.
    """

    epochs = 30
    batch_size = 256
    needs_data = True
    num_pieces = 8000
    lr: float = 1e-3
    clip_norm: float = 1.0
    settings = ("batch_size", "lr", "clip_norm")
    sign_lr_factor = 0.3
    default_method = "dropping:local=partial,sync_every=500,warmup=339"

    def __init__(self, data: Path | None = None, device: torch.device | None = None) -> None:
        super().__init__(data, device)
        self.keep(multi30k.read(data, "train"), multi30k.read(data, "test_2016_flickr"))

    def optimizer(self, parameters: Iterable[nn.Parameter], lr_factor: float) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, self.lr * lr_factor, betas=(0.9, 0.98))

    def schedule(self, optimizer: torch.optim.Optimizer, num_steps: int) -> LRScheduler:
        return rates.cosine(optimizer, num_steps, warmup=0.1)


class Multi30kTransformer(Multi30k):
    """Three layers each way, of width 256."""

    name = "multi30k-transformer"
    summary = "Multi30k English-German, a Transformer of 7.6 million parameters, Adam, BLEU"

    def model(self) -> nn.Module:
        return TransformerTranslator(
            len(self.subwords),
            width=256,
            num_layers=3,
            num_heads=4,
            max_length=MAX_PIECES + 60,
            dropout=0.2,
            pad=PAD,
        )


class Multi30kGru(Multi30k):
    """A bidirectional encoder and a decoder of two layers with attention, 512 units each."""

    name = "multi30k-gru"
    summary = "Multi30k English-German, GRUs with attention, 7.3 million parameters, Adam, BLEU"

    def model(self) -> nn.Module:
        return GruTranslator(len(self.subwords), width=256, units=512, dropout=0.3, pad=PAD)
