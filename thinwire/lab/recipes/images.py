"""What image recipes have in common: data that lives on the device as bytes, augmentation there, accuracy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from thinwire.lab.recipes import rates
from thinwire.lab.recipes.base import Batch, Metric, Recipe
from thinwire.lab.recipes.sharing import epoch_generator, part_of_batch

TEST_BATCH = 1000


class ImageRecipe(Recipe):
    """A classifier of small images. A subclass reads the data with `keep` and gives the model.

    The whole training set stays on the device as bytes, and the random numbers of an epoch go there in one piece, so
    that a step costs a handful of small kernels and never waits for the host.
    """

    metric = Metric(name="accuracy", unit="%", difference_unit="points", higher_is_better=True)
    needs_data = True
    fixed_shapes = True
    pixel_mean: ClassVar[tuple[float, ...]]  # by channel, of values in 0..1
    pixel_std: ClassVar[tuple[float, ...]]
    padding: ClassVar[int] = 0  # a random crop out of the image with so many zeros around it; 0: none
    flips: ClassVar[bool] = False
    lr: float
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 5e-4
    lr_warmup: float = 0.0  # the share of the run in which the learning rate rises
    solver: str = "sgd"
    #: "bf16": activations in bfloat16 (torch.autocast), channels last: the order that tensor cores and oneDNN read.
    precision: str = "fp32"
    settings: ClassVar[tuple[str, ...]] = (
        "batch_size",
        "lr",
        "momentum",
        "nesterov",
        "weight_decay",
        "solver",
        "precision",
    )
    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {"solver": ("sgd", "adam"), "precision": ("fp32", "bf16")}

    def keep(self, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> None:
        """Put (N, C, H, W) uint8 images and (N,) labels on the device."""
        self.train_images, self.train_labels = (tensor.to(self.device) for tensor in train)
        self.test_images, self.test_labels = (tensor.to(self.device) for tensor in test)
        self.mean = (255 * torch.tensor(self.pixel_mean)).view(1, -1, 1, 1).to(self.device)  # (1, C, 1, 1)
        self.std = (255 * torch.tensor(self.pixel_std)).view(1, -1, 1, 1).to(self.device)  # (1, C, 1, 1)

    def placed(self, module: nn.Module) -> nn.Module:
        module = module.to(self.device)
        if self.precision == "bf16":
            module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return module

    def optimizer(self, parameters: Iterable[nn.Parameter], lr_factor: float) -> torch.optim.Optimizer:
        rate = self.lr * lr_factor
        if self.solver == "adam":
            return torch.optim.Adam(parameters, lr=rate, weight_decay=self.weight_decay)
        return torch.optim.SGD(parameters, rate, self.momentum, nesterov=self.nesterov, weight_decay=self.weight_decay)

    def schedule(self, optimizer: torch.optim.Optimizer, num_steps: int) -> LRScheduler:
        return rates.cosine(optimizer, num_steps, warmup=self.lr_warmup)

    def num_batches(self, world: int) -> int:
        return len(self.train_labels) // self.batch_size

    def train_batches(self, epoch: int, *, seed: int, rank: int, world: int) -> Iterator[Batch]:
        # Order, crops and flips are drawn for the global batch and shared out: N workers see what one would see.
        part = part_of_batch(self, rank, world)
        generator = epoch_generator(seed, epoch)
        shape = (self.num_batches(world), self.batch_size)
        order = torch.randperm(len(self.train_labels), generator=generator)[: shape[0] * shape[1]].view(shape)
        corners = torch.randint(0, 2 * self.padding + 1, (2, *shape), generator=generator)
        flips = torch.randint(0, 2 if self.flips else 1, shape, generator=generator).bool()
        mine = [values[..., part].to(self.device) for values in (order, corners, flips)]
        for chosen, corner, flip in zip(mine[0], mine[1].unbind(1), mine[2], strict=True):
            images = self.train_images[chosen]
            if self.padding or self.flips:
                images = cropped(images, corner, flip, self.padding)
            yield self.normalised(images), self.train_labels[chosen]

    def test_batches(self, *, rank: int, world: int) -> Iterator[Batch]:
        images, labels = self.test_images[rank::world], self.test_labels[rank::world]
        for first in range(0, len(labels), TEST_BATCH):
            yield self.normalised(images[first : first + TEST_BATCH]), labels[first : first + TEST_BATCH]

    def normalised(self, images: Tensor) -> Tensor:
        """(B, C, H, W) float32 with mean 0 and deviation 1 by channel, from bytes."""
        return (images.float() - self.mean) / self.std

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        images, labels = batch
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            logits = model(images)
        return F.cross_entropy(logits.float(), labels)

    def score(self, model: nn.Module, batch: Batch) -> tuple[float, ...]:
        images, labels = batch
        return float((model(images).argmax(dim=1) == labels).sum()), len(labels)

    def judge(self, *totals: float) -> float:
        right, count = totals
        return 100.0 * right / count


def cropped(images: Tensor, corners: Tensor, flips: Tensor, padding: int) -> Tensor:
    """Each image cut out of itself with zeros around it, and mirrored where told, in one gather.

    images: (B, C, H, W); corners: (2, B) row and column in 0..2*padding; flips: (B,) bool.
    """
    height, width = images.shape[2:]
    padded = F.pad(images, (padding,) * 4)  # (B, C, H + 2p, W + 2p)
    rows = torch.arange(height, device=images.device) + corners[0, :, None]  # (B, H)
    columns = torch.arange(width, device=images.device).expand(len(images), width)  # (B, W)
    columns = torch.where(flips[:, None], width - 1 - columns, columns) + corners[1, :, None]
    sample = torch.arange(len(images), device=images.device)
    # Index tensors on both sides of the channels put these last: (B, H, W, C).
    picked = padded[sample[:, None, None], :, rows[:, :, None], columns[:, None, :]]
    # Not channels last, as the gather leaves them: where the weights are not, either, gradients would become it and not
    # fit DDP's buckets.
    return picked.permute(0, 3, 1, 2).contiguous()
