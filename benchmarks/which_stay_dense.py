"""What BlockSign gains where small tensors and the output layer travel dense: ResNet-8 on a part of CIFAR-10.

    python benchmarks/which_stay_dense.py --data DIR

8 workers of 32 images as threads, 12,800 images, 12 epochs (600 steps), seed 0, on the CPU: some minutes a method.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn

from thinwire.lab.recipes.cifar10 import Cifar10
from thinwire.lab.recipes.events import Epoch, Outcome
from thinwire.lab.recipes.loop import TrainingPlan
from thinwire.lab.recipes.models.resnet_cifar import resnet
from thinwire.lab.recipes.threads import ThreadTraining
from thinwire.transport import ThreadNet, ThreadWorld

WORKERS, EPOCHS = 8, 12
METHODS = {
    "dense": "dense",
    "everything": "blocksign:topology=server,dense_below=0",
    "all but 1-D tensors": "blocksign:topology=server,dense_below=1",
    "all but 1-D tensors and the output layer": "blocksign:topology=server,dense_below=1,exclude=8.*",
    "the default: the first convolution, too": "blocksign:topology=server",
}


class SmallCifar10(Cifar10):
    """The first 12,800 training and 4,000 test images, ResNet-8."""

    name, summary = "cifar10-resnet8", "a part of CIFAR-10, ResNet-8"
    epochs, batch_size, lr, lr_warmup = EPOCHS, 32 * WORKERS, 0.1, 2 / EPOCHS

    def __init__(self, data: Path) -> None:
        super().__init__(data)
        self.train_images, self.train_labels = self.train_images[:12_800], self.train_labels[:12_800]
        self.test_images, self.test_labels = self.test_images[:4_000], self.test_labels[:4_000]

    def model(self) -> nn.Module:
        return resnet(8)


def trained(recipe: SmallCifar10, spec: str, workers: int, epochs: int, seed: int) -> Outcome:
    def report(event: object) -> None:
        if isinstance(event, Epoch):
            print(f"    epoch {event.epoch}: loss {event.loss:.3f}, accuracy {event.metric:.1f} %", flush=True)

    def work(net: ThreadNet) -> Outcome:
        plan, tell = TrainingPlan(epochs, seed=seed), report if net.rank == 0 else lambda _: None
        training = ThreadTraining(recipe, spec, plan, net, tell)
        return training.run(None, 0, [], lambda: False)

    outcome: Outcome = ThreadWorld(workers, timeout_s=300, one_at_a_time=True).run(work)[0]
    return outcome


def compare(
    recipe: SmallCifar10, methods: dict[str, str], workers: int = WORKERS, epochs: int = EPOCHS, seed: int = 0
) -> None:
    """Train with one method after the other and print how each did."""
    for label, spec in methods.items():
        print(f"{label} ({spec})", flush=True)
        outcome = trained(recipe, spec, workers, epochs, seed)
        print(f"{label}: {outcome.metric:.2f} %, loss {outcome.loss:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data"))
    recipe = SmallCifar10(parser.parse_args().data)
    torch.set_num_threads(2)
    compare(recipe, METHODS)


if __name__ == "__main__":
    main()
