"""The contract of a recipe: what is trained, on what, and how well it did."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

Batch = tuple[Tensor, ...]


class MissingData(ValueError):
    """The data folder does not hold what a recipe needs; says what is expected where."""


@dataclass(frozen=True)
class Metric:
    """How the number that judges a model is called and read."""

    name: str  # "accuracy"
    unit: str  # "%"
    difference_unit: str  # "points"
    higher_is_better: bool


class Recipe(ABC):
    """A training set-up, the same for every method and any number of workers.

    A subclass sets the class attributes and fills in the abstract methods. What every rank must agree on (the
    initial parameters, the order of the data, the augmentation) depends on nothing but the arguments of these
    methods and the seed given to `torch.manual_seed` before `model()`: methods differ only in what they send.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    metric: ClassVar[Metric]
    epochs: ClassVar[int]
    #: Samples per optimizer step, all workers together: any number of workers does the same optimisation.
    batch_size: ClassVar[int]
    #: Learning-rate factor by method name, where updates are not on the scale of a gradient. Users see it.
    lr_factors: ClassVar[Mapping[str, float]] = {}

    def __init__(self, data: Path | None = None, device: torch.device | None = None) -> None:
        """Read the data, from the folder ``data`` where the recipe needs one, else raise MissingData.

        Batches are made on ``device`` (the CPU unless told), where the model will be, too.
        """
        self.device = device or torch.device("cpu")

    def lr_factor(self, method: str) -> float:
        """The factor on this recipe's learning rate for the method of this name ("dgc", "signsgd", ...)."""
        return self.lr_factors.get(method, 1.0)

    @abstractmethod
    def model(self) -> nn.Module:
        """A fresh model, initialised from torch's global generator."""

    @abstractmethod
    def optimizer(self, parameters: Iterable[nn.Parameter], lr_factor: float) -> torch.optim.Optimizer:
        """The optimizer, its learning rate multiplied by `lr_factor`."""

    @abstractmethod
    def schedule(self, optimizer: torch.optim.Optimizer, num_steps: int) -> LRScheduler:
        """The learning-rate schedule over `num_steps` optimizer steps; stepped after every one of them."""

    @abstractmethod
    def num_batches(self, world: int) -> int:
        """Optimizer steps in an epoch: the same on every rank."""

    @abstractmethod
    def train_batches(self, epoch: int, *, seed: int, rank: int, world: int) -> Iterator[Batch]:
        """This rank's part of each of the epoch's `num_batches(world)` global batches, all of one size."""

    @abstractmethod
    def test_batches(self, *, rank: int, world: int) -> Iterator[Batch]:
        """This rank's part of the test set; the parts of all ranks are disjoint and make up the whole."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """() The mean training loss over the batch."""

    @abstractmethod
    def score(self, model: nn.Module, batch: Batch) -> tuple[float, int]:
        """(sum, count) for one test batch; added up over batches and ranks and given to `judge`."""

    @abstractmethod
    def judge(self, total: float, count: int) -> float:
        """The metric's value from the added-up scores."""


def samples_in(batch: Batch) -> int:
    """How many samples a batch holds: the length of its first tensor."""
    return len(batch[0])
