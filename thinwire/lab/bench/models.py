"""Models whose steps are timed: real sizes and shapes, random data, small enough for a few cores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class BenchModel:
    """A model, the samples of one host's batch, and a batch of random inputs and labels."""

    make: Callable[[], nn.Module]
    samples: int
    inputs: Callable[[], Tensor]
    labels: Callable[[], Tensor]

    def loss(self, model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:  # -> ()
        scores = model(inputs)  # (..., classes)
        return nn.functional.cross_entropy(scores.flatten(0, -2), labels.flatten())


def vgg16() -> nn.Module:
    """VGG-16 with batch normalisation for 32 x 32 images: 14.7 M parameters."""
    layers: list[nn.Module] = []
    channels = 3
    for width in (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0):
        if width == 0:
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True)]
            channels = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10))


class LanguageModel(nn.Module):
    """Embedding, two LSTM layers and a decoder over 10,000 words (Penn Treebank's): 14.5 M parameters."""

    def __init__(self, words: int = 10_000, width: int = 512) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, num_layers=2)
        self.decoder = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:  # (T, B) int64 -> (T, B, words)
        hidden, _ = self.lstm(self.embedding(tokens))
        scores: Tensor = self.decoder(hidden)
        return scores


class Bottleneck(nn.Module):
    """ResNet's block of 1 x 1, 3 x 3 and 1 x 1 convolutions around a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.path = nn.Sequential(
            *self._conv(channels, width, 1, 1), nn.ReLU(True),
            *self._conv(width, width, 3, stride), nn.ReLU(True),
            *self._conv(width, out, 1, 1),
        )  # fmt: skip
        same = stride == 1 and channels == out
        self.shortcut = nn.Identity() if same else nn.Sequential(*self._conv(channels, out, 1, stride))

    @staticmethod
    def _conv(channels: int, out: int, size: int, stride: int) -> tuple[nn.Module, nn.Module]:
        return nn.Conv2d(channels, out, size, stride, size // 2, bias=False), nn.BatchNorm2d(out)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.path(x) + self.shortcut(x))


def resnet50() -> nn.Module:
    """ResNet-50 with 1,000 classes: 25.6 M parameters."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(True), nn.MaxPool2d(3, 2, 1)
    ]  # fmt: skip
    channels = 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            layers.append(Bottleneck(channels, width, stride if block == 0 else 1))
            channels = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


def _images(batch: int, size: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(batch, 3, size, size)


def _classes(batch: int, classes: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(0, classes, (batch,))


def tiny() -> nn.Module:
    """26 k parameters, for tests."""
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 128), nn.ReLU(), nn.Linear(128, 10))


MODELS = {
    "vgg16": BenchModel(vgg16, 16, _images(16, 32), _classes(16, 10)),
    "lstm": BenchModel(
        LanguageModel, 8, lambda: torch.randint(0, 10_000, (30, 8)), lambda: torch.randint(0, 10_000, (30, 8))
    ),
    "resnet50": BenchModel(resnet50, 8, _images(8, 64), _classes(8, 1000)),
    "tiny": BenchModel(tiny, 8, _images(8, 8), _classes(8, 10)),
}
