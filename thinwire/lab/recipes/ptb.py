"""`ptb-lstm` and `ptb-lstm-1500`: the language models of DGC's Table 2 and gTop-k's Figure 7."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from thinwire.lab.recipes import rates
from thinwire.lab.recipes.data import words
from thinwire.lab.recipes.language import LanguageRecipe
from thinwire.lab.recipes.models.lstm_lm import LstmLanguageModel


class PtbLstm(LanguageRecipe):
    """Two LSTM layers of 650 units (Zaremba et al.'s medium size), tied embeddings: 13.3 M parameters.

    gTop-k, Table V: 40 epochs, 100 sequences of 35 words per step, a rate of 1; momentum 0.9 and Nesterov as in DGC,
    with the gradient's norm clipped at 0.25. The rate falls with half a cosine.
    """

    name = "ptb-lstm"
    summary = "Penn Treebank, a 2-layer LSTM of 13.3 million parameters (gTop-k's Figure 7)"
    epochs = 40
    batch_size = 100
    window = 35
    needs_data = True
    units: ClassVar[int] = 650
    dropout: ClassVar[float] = 0.5
    init_range: ClassVar[float] = 0.05
    lr: float = 1.0
    momentum: float = 0.9
    clip_norm: float = 0.25
    settings = ("batch_size", "lr", "momentum", "clip_norm")
    sign_lr_factor = 0.0005
    default_method = "dgc:density=0.006,warmup=265"  # an epoch, as in DGC; 0.6 % was within 1 % of dense

    def __init__(self, data: Path | None = None, device: torch.device | None = None) -> None:
        super().__init__(data, device)
        train, test, vocabulary = words.read(words.PTB, data, "ptb.train.txt", "ptb.test.txt")
        self.num_words = len(vocabulary)
        self.keep(train, test)

    def model(self) -> nn.Module:
        return LstmLanguageModel(self.num_words, self.units, 2, self.dropout, self.init_range)

    def optimizer(self, parameters: Iterable[nn.Parameter], lr_factor: float) -> torch.optim.Optimizer:
        nesterov = self.momentum > 0
        return torch.optim.SGD(parameters, self.lr * lr_factor, self.momentum, nesterov=nesterov)

    def schedule(self, optimizer: torch.optim.Optimizer, num_steps: int) -> LRScheduler:
        return rates.cosine(optimizer, num_steps)


class PtbLstm1500(PtbLstm):
    """The same with 1,500 units: 51.0 M parameters, the 194.68 MiB of gradients in DGC's Table 2."""

    name = "ptb-lstm-1500"
    summary = "Penn Treebank, a 2-layer LSTM of 51 million parameters (DGC's Table 2)"
    units = 1500
    dropout = 0.65
    init_range = 0.04
