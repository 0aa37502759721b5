"""VGG-16 with batch normalisation for 32 x 32 images: 13 convolutions, one dense layer, 14.7 M parameters."""

from __future__ import annotations

from torch import nn

POOL = 0
WIDTHS = (64, 64, POOL, 128, 128, POOL, 256, 256, 256, POOL, 512, 512, 512, POOL, 512, 512, 512, POOL)


def vgg16(num_classes: int = 10) -> nn.Module:
    """(B, 3, 32, 32) to (B, num_classes)."""
    layers: list[nn.Module] = []
    channels = 3
    for width in WIDTHS:
        if width == POOL:
            layers.append(nn.MaxPool2d(2))
            continue
        convolution = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
        layers += [convolution, nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        channels = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels, num_classes))
