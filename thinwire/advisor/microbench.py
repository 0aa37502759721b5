"""A method's exchanges without a training step: over a real net, or in a group that is only pretended."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.collectives.serving_shards import WHOLE_BELOW
from thinwire.engine.layout import Layout
from thinwire.methods import Method
from thinwire.methods.base import Rows
from thinwire.reducer import EdgeTerms, Reducer
from thinwire.transport import Net, OverlapWith, Traffic

CPU = torch.device("cpu")
NOISE = 2**18  # random numbers that are enough to repeat: drawing a whole model's takes longer than exchanging it
STRIDE = 7919  # how far along in them the next step begins
SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4}


class DryNet:
    """Rank 0 of a group of any size in which everybody else does exactly what this rank does, and no byte moves."""

    def __init__(self, size: int, device: torch.device = CPU) -> None:
        self.rank, self.size, self.device, self.traffic, self.stage = 0, size, device, Traffic(), ""

    def to_wire(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(
        self, frame: Tensor, room: Tensor | None = None, pairwise: bool = False, overlap_with: OverlapWith = None
    ) -> list[Tensor]:
        if overlap_with is not None:
            overlap_with()
        return [frame] * self.size

    def gather_each(self, frame: Tensor, room: Tensor | None = None) -> Iterator[tuple[int, Tensor]]:
        return iter([(rank, frame) for rank in range(self.size)])

    def all_to_all(self, frames: Sequence[Tensor], nbytes: Sequence[int], room: Tensor | None = None) -> list[Tensor]:
        mine = frames[self.rank]
        assert all(expected == mine.numel() for expected in nbytes), "ranks of a dry net must have equal shards"
        return [mine] * self.size

    def swap(self, peer: int, frame: Tensor, room: Tensor | None = None, overlap_with: OverlapWith = None) -> Tensor:
        if overlap_with is not None:
            overlap_with()
        return frame

    def send(self, peer: int, frame: Tensor) -> None:
        return

    def receive(self, peer: int, nbytes: int) -> Tensor:
        raise AssertionError("a dry net is a power of two: nobody receives from beyond it")

    def broadcast(self, tensor: Tensor, root: int) -> None:
        return

    def all_reduce(self, tensor: Tensor, largest: bool = False) -> None:
        return


def even_rows(method: Method, exchanges: Sequence[Rows], size: int) -> list[Rows]:
    """A step's exchanges with every tensor made a little larger, so that all ranks serve shards of equal length.

    What is compressed stays so: a vector never is where a matrix of any size may be.
    """

    def row(name: str, ordinal: int, shape: torch.Size) -> tuple[str, int, torch.Size]:
        coded = method.is_coded(name, shape)
        least = max(shape.numel(), WHOLE_BELOW) if coded else shape.numel()
        numel = -(-least // size) * size
        return name, ordinal, torch.Size([1, numel] if coded else [numel])

    return [[row(*one) for one in rows] for rows in exchanges]


class ExchangeBenchmark:
    """One method's exchanges of a step on gradients of random numbers, over any net, without a training step.

    Bucket by bucket, as in a step: how large the buffers are decides what the caches and the allocator make of them.
    Weights, momentum and residuals are as large as the model until ``close``.
    """

    def __init__(self, method: Method, exchanges: Sequence[Rows], net: Net, sgd: bool, device: torch.device) -> None:
        rows = sorted((row for rows in exchanges for row in rows), key=lambda row: row[1])
        weights = {name: torch.zeros(shape, dtype=torch.float32, device=device) for name, _, shape in rows}
        # Without SGD there is nothing to take over; a method that insists on it is timed with it.
        takes_sgd = sgd or method.takes_momentum(False)
        optimizer = torch.optim.SGD(weights.values(), **SGD) if takes_sgd else torch.optim.AdamW(weights.values())
        in_rounds = method.outer_rule is not None  # then differences are exchanged, which no optimizer sees
        terms = EdgeTerms(in_rounds=in_rounds)
        self._reducer = Reducer(weights, method, net, None if in_rounds else optimizer, terms=terms)
        places = {name: place for place, name in enumerate(weights)}
        self.layouts: list[Layout] = [
            self._reducer.running.layout(tuple(sorted(places[name] for name, _, _ in rows))) for rows in exchanges
        ]
        generator = torch.Generator().manual_seed(net.rank)
        noise = torch.randn(NOISE, generator=generator, dtype=torch.float32).to(device)
        longest = max(layout.numel for layout in self.layouts)
        self._noise = noise.repeat(1 + -(-longest // NOISE))  # (longest or more, + NOISE,)
        self._bucket = torch.empty(longest, dtype=torch.float32, device=device)
        self._device, self._step = device, 0

    def seconds(self, clock: Callable[[], float] = time.perf_counter) -> float:
        """What one step's exchanges take on this clock; over a real net a collective call."""
        # Not the same numbers at every step, but ones of the same size, as a method's carried thresholds expect.
        first, taken_s, hypers = self._step * STRIDE % NOISE, 0.0, self._reducer.view.hypers()
        for layout in self.layouts:
            # Written right before, to memory that is there: so backward leaves a bucket, too.
            parts = layout.split(self._bucket[: layout.numel].copy_(self._noise[first : first + layout.numel]))
            gradients = dict(zip((segment.ordinal for segment in layout.segments), parts, strict=True))
            self._wait()
            start = clock()
            self._reducer.exchange(gradients, hypers, self._step)
            self._wait()
            taken_s += clock() - start
        self._step += 1
        return taken_s

    def close(self) -> None:
        """Let go of all that was kept; nothing is communicated."""
        self._reducer.abandon()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class DryRun(ExchangeBenchmark):
    """What a method computes in a step of these exchanges in a pretended group of ``size``, a power of two."""

    def __init__(self, method: Method, exchanges: Sequence[Rows], size: int, sgd: bool, device: torch.device) -> None:
        if size & (size - 1):
            raise ValueError(f"a dry run needs a power of two of ranks, not {size}")
        super().__init__(method, even_rows(method, exchanges, size), DryNet(size, device), sgd, device)
