"""A CifarNet after TernGrad's Table 1, for 32 x 32 images: 1,756,426 parameters."""

from __future__ import annotations

from torch import nn

NEIGHBOURS = 9  # channels that a response is normalised by


def cifarnet(num_classes: int = 10) -> nn.Module:
    """(B, 3, 32, 32) to (B, num_classes): two convolutions of 5 x 5, pooled and normalised, and three dense layers."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1),
        nn.LocalResponseNorm(NEIGHBOURS, alpha=0.01, beta=0.75),
        nn.Conv2d(64, 64, 5, padding=2),
        nn.ReLU(),
        nn.LocalResponseNorm(NEIGHBOURS, alpha=0.01, beta=0.75),
        nn.MaxPool2d(3, stride=2, padding=1),
        nn.Flatten(),
        nn.Linear(64 * 8 * 8, 384),
        nn.ReLU(),
        nn.Linear(384, 192),
        nn.ReLU(),
        nn.Linear(192, num_classes),
    )
