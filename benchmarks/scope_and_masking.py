"""What parts of DGC (selection, masking, rescaling, decay, density) are worth on networks of many layers.

    python benchmarks/scope_and_masking.py --data DIR [--network vgg|resnet56] [--seed 0] [--only '*decay*']

A narrow VGG-16, whose layers differ much, or ResNet-56 on images of half the size. 4 workers of 32 images as threads,
12,800 images, 6 epochs (600 steps), on one core: three or six minutes a method.
"""

from __future__ import annotations

import argparse
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import nn
from which_stay_dense import SmallCifar10, compare

from thinwire.lab.recipes.models.resnet_cifar import resnet

WORKERS, EPOCHS = 4, 6
WARM = "warmup=200"
EACH = f"dgc:{WARM},scope=tensor"
HEAD = "dense_below=2048"  # of the narrow VGG-16 this adds the output layer, of 1,280 weights, to what travels dense
METHODS = {
    "dense": "dense",
    "balanced": f"dgc:{WARM}",
    "balanced, the output layer dense": f"dgc:{WARM},{HEAD}",
    "each tensor's largest": EACH,
    "each tensor's largest, the output layer dense": f"{EACH},{HEAD}",
    "each tensor's largest, the decay waits": f"{EACH},direct_decay=false",
    "each tensor's largest 5 %": f"{EACH},density=0.05",
    "each tensor's largest, masked": f"{EACH},factor_masking=true",
    "the model's largest": f"dgc:{WARM},scope=model",
    "the model's largest, the output layer dense": f"dgc:{WARM},scope=model,{HEAD}",
    "the model's largest, masked": f"dgc:{WARM},scope=model,factor_masking=true",
    "each tensor's largest, rescaled": f"{EACH},lr_rescaling=true",
    "the model's largest, masked, rescaled": f"dgc:{WARM},scope=model,factor_masking=true,lr_rescaling=true",
    "the largest of all ranks": f"gtopk:{WARM},density=0.01",
    "the largest of all ranks, masked": f"gtopk:{WARM},density=0.01,factor_masking=true",
    "the largest 3 % of all ranks": f"gtopk:{WARM},direct_decay=true",
    "the largest 3 % of all ranks, the decay waits": f"gtopk:{WARM}",
    "PowerSGD, rank 1": "powersgd:rank=1",
    "PowerSGD, rank 4": "powersgd:rank=4",
}
WIDTHS = ((16, 16), (32, 32), (64, 64, 64), (128, 128, 128), (128, 128, 128))  # a quarter of VGG-16's


class NarrowVgg(SmallCifar10):
    """0.92 million parameters."""

    name, summary = "cifar10-narrow-vgg", "a part of CIFAR-10, VGG-16 with a quarter of its channels"
    epochs, batch_size, lr, lr_warmup = EPOCHS, 32 * WORKERS, 0.05, 1 / EPOCHS

    def model(self) -> nn.Module:
        layers: list[nn.Module] = []
        before = 3
        for place, stage in enumerate(WIDTHS):
            for width in stage:
                layers += [nn.Conv2d(before, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
                before = width
            if place < len(WIDTHS) - 1:
                layers.append(nn.MaxPool2d(2))
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10))


class SmallImages(SmallCifar10):
    """ResNet-56, 0.85 million parameters."""

    name, summary = "cifar10-small-images", "a part of CIFAR-10, 16 x 16, ResNet-56"
    epochs, batch_size, lr, lr_warmup = EPOCHS, 32 * WORKERS, 0.1, 1 / EPOCHS

    def model(self) -> nn.Module:
        return nn.Sequential(nn.AvgPool2d(2), *resnet(56))


NETWORKS = {"vgg": NarrowVgg, "resnet56": SmallImages}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--network", choices=NETWORKS, default="vgg")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="*", help="the rows to run, as a pattern of their names")
    options = parser.parse_args()
    torch.set_num_threads(1)
    methods = {name: method for name, method in METHODS.items() if fnmatchcase(name, options.only)}
    compare(NETWORKS[options.network](options.data), methods, WORKERS, EPOCHS, options.seed)


if __name__ == "__main__":
    main()
