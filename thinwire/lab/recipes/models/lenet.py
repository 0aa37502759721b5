"""LeNet for 28 x 28 images, in the form of TernGrad's MNIST experiment: 431,080 parameters."""

from __future__ import annotations

from torch import nn


def lenet(num_classes: int = 10) -> nn.Module:
    """(B, 1, 28, 28) to (B, num_classes): two convolutions of 5 x 5 with pooling, two dense layers."""
    return nn.Sequential(
        nn.Conv2d(1, 20, 5),
        nn.MaxPool2d(2),
        nn.Conv2d(20, 50, 5),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(50 * 4 * 4, 500),
        nn.ReLU(),
        nn.Linear(500, num_classes),
    )
