"""`mnist-lenet`: TernGrad's experiment of Figure 3."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from thinwire.lab.recipes import rates
from thinwire.lab.recipes.data import mnist
from thinwire.lab.recipes.images import ImageRecipe
from thinwire.lab.recipes.models.lenet import lenet


class MnistLenet(ImageRecipe):
    """TernGrad, section 4.1: 64 images per step, 10 thousand steps, polynomial decay of power 0.5, no augmentation.

    For plain SGD the paper takes momentum 0 and a rate of 0.1.
    """

    name = "mnist-lenet"
    summary = "MNIST, LeNet of 431 thousand parameters (TernGrad's Figure 3)"
    epochs = 11  # of 937 steps: 10,307
    batch_size = 64
    lr = 0.01
    pixel_mean = (0.1307,)
    pixel_std = (0.3081,)
    sign_lr_factor = 0.01
    default_method = "terngrad:dense_below=0"  # the paper's

    def __init__(self, data: Path | None = None, device: torch.device | None = None) -> None:
        super().__init__(data, device)
        self.keep(mnist.read(data, "train"), mnist.read(data, "t10k"))

    def model(self) -> nn.Module:
        return lenet()

    def schedule(self, optimizer: torch.optim.Optimizer, num_steps: int) -> LRScheduler:
        return rates.polynomial(optimizer, num_steps, power=0.5)
