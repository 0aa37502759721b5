"""Residual networks of 6 n + 2 layers for 32 x 32 images: He et al., section 4.2; 20 layers 0.27 M parameters."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

WIDTHS = (16, 32, 64)


class Block(nn.Module):
    """Two convolutions beside a shortcut without parameters (He et al., option A)."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.stride = 1 if channels == width else 2
        self.more = width - channels
        self.conv1 = _convolution(channels, width, self.stride)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = _convolution(width, width)
        self.norm2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        if self.more:  # every other pixel, and zeros for the channels that are new
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.more))
        return F.relu(x + y)


def resnet(num_layers: int, num_classes: int = 10) -> nn.Module:
    """(B, 3, 32, 32) to (B, num_classes), for 20, 32, 44, 56, 110 ... layers."""
    blocks, rest = divmod(num_layers - 2, 6)
    assert blocks > 0 and not rest, "a CIFAR ResNet has 6 n + 2 layers"
    layers: list[nn.Module] = [_convolution(3, WIDTHS[0]), nn.BatchNorm2d(WIDTHS[0]), nn.ReLU()]
    channels = WIDTHS[0]
    for width in WIDTHS:
        for _ in range(blocks):
            layers.append(Block(channels, width))
            channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))


def _convolution(channels: int, width: int, stride: int = 1) -> nn.Conv2d:
    convolution = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return convolution
