"""What language-model recipes have in common: long streams, read in pieces (truncated BPTT), and perplexity."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.lab.recipes.base import Batch, Metric, Recipe
from thinwire.lab.recipes.sharing import epoch_generator, part_of_batch, seed_dropout

IGNORED = -100  # a target that does not count
MAX_TEST_STREAMS = 16


class LanguageRecipe(Recipe):
    """A model of the next token. A subclass reads the data with `keep`, and gives the model and the optimizer.

    The training text is cut into `batch_size` streams of equal length, and a batch is the next `window` tokens of each
    of them; a worker has some of the streams. The model is called with tokens and state, and returns logits and state:
    a recurrent model goes on where it was. The cut moves by a random number of tokens in every epoch.
    """

    metric = Metric(name="perplexity", unit="", difference_unit="", higher_is_better=False)
    window: ClassVar[int]
    precision: str = "fp32"  # "bf16": activations in bfloat16 (torch.autocast)
    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {"precision": ("fp32", "bf16")}

    def keep(self, train: Tensor, test: Tensor) -> None:
        """Put the streams (N,) int64 on the device."""
        self.train_stream, self.test_stream = train.to(self.device), test.to(self.device)
        self.state: Any = None  # of the streams in training
        self.test_state: Any = None

    def num_batches(self, world: int) -> int:
        # One window is left for the random beginning, and one token to be the last target.
        return ((len(self.train_stream) - self.window) // self.batch_size - 1) // self.window

    def train_batches(self, epoch: int, *, seed: int, rank: int, world: int) -> Iterator[Batch]:
        seed_dropout(seed, epoch, rank)
        self.state = None
        part = part_of_batch(self, rank, world)
        first = int(torch.randint(0, self.window, (), generator=epoch_generator(seed, epoch)))
        length = (len(self.train_stream) - self.window) // self.batch_size
        streams = self.train_stream[first : first + length * self.batch_size].view(self.batch_size, length)[part]
        for at in range(0, self.num_batches(world) * self.window, self.window):
            yield streams[:, at : at + self.window], streams[:, at + 1 : at + self.window + 1]

    def test_batches(self, *, rank: int, world: int) -> Iterator[Batch]:
        # The streams are the same for any number of workers; what is missing to equal length does not count.
        self.test_state = None
        num_targets = len(self.test_stream) - 1
        num_streams = min(MAX_TEST_STREAMS, num_targets)
        length = -(-num_targets // num_streams)
        more = num_streams * length - num_targets
        inputs = F.pad(self.test_stream[:-1], (0, more)).view(num_streams, length)[rank::world]
        targets = F.pad(self.test_stream[1:], (0, more), value=IGNORED).view(num_streams, length)[rank::world]
        if len(inputs):
            for at in range(0, length, self.window):
                yield inputs[:, at : at + self.window], targets[:, at : at + self.window]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        tokens, targets = batch
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            logits, state = model(tokens, self.state)
        self.state = detached(state)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def score(self, model: nn.Module, batch: Batch) -> tuple[float, ...]:
        tokens, targets = batch
        logits, self.test_state = model(tokens, self.test_state)
        nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
        return float(nats), float((targets != IGNORED).sum())

    def judge(self, *totals: float) -> float:
        nats, count = totals
        return math.exp(min(50.0, nats / count))  # a model that diverged has a large number, not an error

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.state = to_device(state["state"], self.device)


def detached(state: Any) -> Any:
    """The state without its history: gradients stop at the beginning of a window."""
    if isinstance(state, tuple):
        return tuple(part.detach() for part in state)
    return None if state is None else state.detach()


def to_device(state: Any, device: torch.device) -> Any:
    """The state's tensors on a device."""
    if isinstance(state, tuple):
        return tuple(part.to(device) for part in state)
    return None if state is None else state.to(device)
