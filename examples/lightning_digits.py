"""A Lightning Trainer with one added callback. Run it on two processes of this machine:

torchrun --nproc_per_node 2 examples/lightning_digits.py
"""

import os
from importlib import resources

import lightning.pytorch as pl
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from thinwire.integrations.lightning import ThinwireCallback


class Digits(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.layers(images), labels)

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        images, labels = batch
        right = (self.layers(images).argmax(dim=1) == labels).float().mean()
        self.log("accuracy", right, sync_dist=True, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def main() -> None:
    with resources.files("thinwire").joinpath("lab/data/digits.npz").open("rb") as file, np.load(file) as arrays:
        images = torch.from_numpy(arrays["images"]).flatten(1).float() / 16
        labels = torch.from_numpy(arrays["labels"]).long()
    train, test = TensorDataset(images[:1437], labels[:1437]), TensorDataset(images[1437:], labels[1437:])

    pl.seed_everything(0, verbose=False)
    callback = ThinwireCallback()  # <- the added lines: this one chooses a method and says which
    trainer = pl.Trainer(
        strategy="ddp", accelerator="cpu", devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        max_epochs=int(os.environ.get("EPOCHS", "10")), logger=False,
        default_root_dir="runs/lightning_digits", callbacks=[callback],  # <- and this
    )  # fmt: skip
    trainer.fit(Digits(), DataLoader(train, 16, shuffle=True), DataLoader(test, 360))
    if trainer.is_global_zero and callback.wire is not None:
        print(f"test accuracy {100 * trainer.callback_metrics['accuracy']:.1f}%")
        print(callback.wire.stats)


if __name__ == "__main__":
    main()
