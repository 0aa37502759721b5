"""The contract of a recipe: what is trained, on what, and how well it did."""

from __future__ import annotations

import difflib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from thinwire.methods import Method, PerLayer

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
    #: Learning-rate factor for methods whose updates are +-1 and not on the scale of a gradient. Users see it.
    sign_lr_factor: ClassVar[float] = 1.0
    #: The method that suits this recipe, with its options, for those who name none.
    default_method: ClassVar[str] = "dgc"
    #: The gradient's norm is clipped at this; see `adapted` and `clip`.
    clip_norm: float | None = None
    #: Whether the constructor needs a data folder.
    needs_data: ClassVar[bool] = False
    #: How many numbers `score` returns, also where a rank has no test batch.
    num_scores: ClassVar[int] = 2
    #: Whether all training batches of a run have one shape, nothing is carried between them, and the model draws no
    #: random numbers.
    fixed_shapes: ClassVar[bool] = False
    #: Attributes that `set` may change before anything else is called.
    settings: ClassVar[tuple[str, ...]] = ("batch_size",)
    #: What those of `settings` that are words may be.
    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def __init__(self, data: Path | None = None, device: torch.device | None = None) -> None:
        """Read the data, from the folder ``data`` where the recipe needs one, else raise MissingData.

        Batches are made on ``device`` (the CPU unless told), where the model will be, too.
        """
        self.device = device or torch.device("cpu")

    def lr_factor(self, method: Method) -> float:
        """The factor on this recipe's learning rate for this method."""
        return 1.0 if method.estimates_mean else self.sign_lr_factor

    def set(self, name: str, text: str) -> None:
        """Change one of `settings` for this run: recipe.set("batch_size", "256"); see `read_setting`."""
        setattr(self, name, self.read_setting(name, text))

    @classmethod
    def read_setting(cls, name: str, text: str) -> Any:
        """The value of one of `settings`, read as its default's own type; a ValueError where it is not possible."""
        if name not in cls.settings:
            near = difflib.get_close_matches(name, cls.settings, n=1)
            meant = f" (did you mean {near[0]!r}?)" if near else ""
            known = ", ".join(cls.settings)
            raise ValueError(f"recipe {cls.name!r} has no setting {name!r}{meant}; known settings: {known}")
        kind: Any = type(getattr(cls, name))
        try:
            value = _TRUTH[text.lower()] if kind is bool else kind(text)
        except (KeyError, ValueError):
            value = math.nan  # which is in none of the ranges
        if kind is bool:
            wanted, fits = "true or false", value in (True, False)
        elif kind is str:
            wanted, fits = f"one of {', '.join(cls.choices[name])}", value in cls.choices[name]
        elif kind is int:
            wanted, fits = "a whole number of at least 1", value >= 1
        elif name == "lr_warmup":
            wanted, fits = "a share of the run, from 0 to 1", 0 <= value <= 1
        elif name == "clip_norm":
            wanted, fits = "a number above 0", value > 0  # inf: no clipping
        else:
            wanted, fits = "a number of at least 0", 0 <= value < math.inf
        if not fits:
            raise ValueError(f"recipe {cls.name!r}: {name} must be {wanted}, not {text!r}")
        return value

    def adapted(self, method: Method) -> Method:
        """The method as this recipe runs it; what differs from what was asked for shows in its string.

        Where the recipe clips gradients and the method accumulates them, every worker clips its own before it does
        (DGC, section 2.2; see LocalClipping), unless the method was given a threshold of its own.
        """
        changed: Any = {"clip_norm": self.clip_norm}
        if isinstance(method, PerLayer):
            changed = {"methods": [(pattern, self.adapted(one)) for pattern, one in method.methods]}
        elif self.clip_norm is None or getattr(method, "clip_norm", self.clip_norm) is not None:
            return method
        return replace(method, **changed)

    def clip(self, parameters: Iterable[nn.Parameter], method: Method) -> None:
        """Clip the mean gradient: called after `backward`, before `optimizer.step`, with the adapted method.

        Does nothing where the recipe does not clip, and where what was exchanged is not this step's gradient.
        """
        # What other methods return is a sum over many steps, holds momentum, or is a sign.
        if self.clip_norm is not None and method.gives_step_gradient:
            nn.utils.clip_grad_norm_(list(parameters), self.clip_norm)

    def state_dict(self) -> dict[str, Any]:
        """What this rank carries from batch to batch (the state of a recurrent model); empty for most recipes.

        To go on in the middle of an epoch: start `train_batches`, pass over the batches that are done, then
        `load_state_dict`. At the beginning of an epoch nothing is carried.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave on the same rank."""
        assert not state, "this recipe carries nothing"

    @abstractmethod
    def model(self) -> nn.Module:
        """A fresh model on the CPU, initialised from torch's global generator; see `placed`."""

    def placed(self, module: nn.Module) -> nn.Module:
        """The model where and how this recipe trains it."""
        return module.to(self.device)

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
    def score(self, model: nn.Module, batch: Batch) -> tuple[float, ...]:
        """`num_scores` numbers for one test batch, most often (sum, count).

        They are added up over batches and ranks and then given to `judge`. The model is not wrapped in DDP, is in
        evaluation mode and no gradients are recorded.
        """

    @abstractmethod
    def judge(self, *totals: float) -> float:
        """The metric's value from the added-up scores."""


_TRUTH = {"true": True, "false": False}


def samples_in(batch: Batch) -> int:
    """How many samples a batch holds: the length of its first tensor."""
    return len(batch[0])
