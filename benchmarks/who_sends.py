"""Which tensors the largest elements of a whole model belong to, beside what square roots of the sizes give them.

    python benchmarks/who_sends.py --data DIR [--network vgg16|resnet20] [--steps 240]

One worker trains on batches of 64 images of CIFAR-10 and sends the model's largest 0.6 % of velocities (DGC's u and v,
Eq. 4) after a short warm-up. Of every tensor: the share of its elements that was sent in the last 60 steps, and the
share that `scope="balanced"` would send. Four minutes for VGG-16 on two cores.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F

from thinwire import DGC
from thinwire.compressors.quotas import quotas
from thinwire.lab.recipes.data.cifar10 import TRAIN_FILES, read
from thinwire.lab.recipes.models.resnet_cifar import resnet
from thinwire.lab.recipes.models.vgg_cifar import vgg16

NETWORKS = {"vgg16": vgg16, "resnet20": lambda: resnet(20)}
BATCH, LR, MOMENTUM, DENSITY = 64, 0.05, 0.9, 0.006
RISE = 60  # steps until the learning rate is there
COUNTED = 60  # the last steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--network", choices=NETWORKS, default="vgg16")
    parser.add_argument("--steps", type=int, default=240)
    options = parser.parse_args()
    torch.manual_seed(0)
    images, labels = read(options.data, TRAIN_FILES)  # (N, 3, 32, 32) uint8, (N,) int64
    model = NETWORKS[options.network]()
    rows = [(name, place, p.shape) for place, (name, p) in enumerate(model.named_parameters())]
    layout = DGC().layout(rows)
    parameters = dict(model.named_parameters())
    u = {name: torch.zeros(p.numel()) for name, p in parameters.items()}
    v = {name: torch.zeros(p.numel()) for name, p in parameters.items()}
    coded = [segment.name for segment in layout.coded]
    sent = dict.fromkeys(coded, 0)
    for step in range(options.steps):
        chosen = torch.randint(0, len(labels), (BATCH,))
        model.zero_grad()
        F.cross_entropy(model(images[chosen].float() / 128 - 1), labels[chosen]).backward()
        rate = LR * min(1.0, (step + 1) / RISE)
        density = max(DENSITY, 0.25 * 0.93 ** (step // 2))
        with torch.no_grad():
            for name, p in parameters.items():
                u[name].mul_(MOMENTUM).add_(p.grad.reshape(-1))
                v[name].add_(u[name])
            k = round(density * layout.coded_numel)
            threshold = torch.cat([v[name].abs() for name in coded]).kthvalue(layout.coded_numel - k).values
            for name, p in parameters.items():
                mask = v[name].abs() > threshold if name in sent else torch.ones(p.numel(), dtype=torch.bool)
                p.view(-1).sub_(v[name] * mask, alpha=rate)
                v[name].mul_(~mask)
                if name in sent and step >= options.steps - COUNTED:
                    sent[name] += int(mask.sum())
    balanced = quotas("balanced", DENSITY, layout)
    print("| tensor | elements | of the model's largest, % | by square roots, % |\n|---|---|---|---|")
    for segment, own in zip(layout.coded, balanced, strict=True):
        share = 100 * sent[segment.name] / COUNTED / segment.numel
        print(f"| {segment.name} | {segment.numel:,} | {share:.2f} | {100 * own / segment.numel:.2f} |")


if __name__ == "__main__":
    main()
