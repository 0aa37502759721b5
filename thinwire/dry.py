"""A group that is only pretended: what a method computes, without any wire."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from thinwire.collectives.shards import WHOLE_BELOW
from thinwire.layout import Hyper, Layout, Turn
from thinwire.methods import Method
from thinwire.protocols import Aggregator
from thinwire.transport import Traffic

HYPER = Hyper(lr=0.1, momentum=0.9, weight_decay=5e-4)


class DryNet:
    """Rank 0 of a group of any size in which everybody else does exactly what this rank does, and no byte moves."""

    def __init__(self, size: int) -> None:
        self.rank, self.size, self.traffic, self.stage = 0, size, Traffic(), ""

    def to_wire(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, frame: Tensor) -> list[Tensor]:
        return [frame] * self.size

    def gather_each(self, frame: Tensor, room: Tensor | None = None) -> Iterator[tuple[int, Tensor]]:
        return iter([(rank, frame) for rank in range(self.size)])

    def all_to_all(self, frames: Sequence[Tensor], nbytes: Sequence[int], room: Tensor | None = None) -> list[Tensor]:
        mine = frames[self.rank]
        assert all(expected == mine.numel() for expected in nbytes), "ranks of a dry net must have equal shards"
        return [mine] * self.size

    def swap(self, peer: int, frame: Tensor) -> Tensor:
        return frame

    def send(self, peer: int, frame: Tensor) -> None:
        return

    def receive(self, peer: int, nbytes: int) -> Tensor:
        raise AssertionError("a dry net is a power of two: nobody receives from beyond it")

    def broadcast(self, tensor: Tensor, root: int) -> None:
        return

    def all_reduce(self, tensor: Tensor, largest: bool = False) -> None:
        return


Rows = Sequence[tuple[str, int, torch.Size]]  # parameter name, ordinal, shape


def even_layout(method: Method, rows: Rows, size: int) -> Layout:
    """A bucket's layout with every tensor made a little larger, so that all ranks serve shards of equal length."""
    entries = []
    for name, ordinal, shape in rows:
        coded = method.is_coded(name, shape)
        least = max(shape.numel(), WHOLE_BELOW) if coded else shape.numel()
        entries.append((name, ordinal, -(-least // size) * size, coded))
    return Layout.of(entries)


class DryRun:
    """One method's work on a step's gradients in a pretended group of ``size``, a power of two.

    Bucket by bucket, as in a step: how large the buffers are decides what the caches and the allocator make of them.
    """

    def __init__(self, method: Method, buckets: Sequence[Rows], size: int, sgd: bool, device: torch.device) -> None:
        if size & (size - 1):
            raise ValueError(f"a dry run needs a power of two of ranks, not {size}")
        self._aggregator: Aggregator = method.aggregator(DryNet(size), sgd)
        groups = [[row for rows in buckets for row in rows]] if self._aggregator.whole_model else buckets
        self.layouts = [even_layout(method, rows, size) for rows in groups]
        generator = torch.Generator().manual_seed(0)
        self._gradients = [torch.randn(layout.numel, generator=generator).to(device) for layout in self.layouts]
        self._weights = [torch.zeros_like(gradient) for gradient in self._gradients]
        self._device, self._step = device, 0

    def seconds(self, clock: Callable[[], float] = time.perf_counter) -> float:
        """What one step's exchanges compute, on this clock."""
        factor = 1.0 + 0.1 * (self._step % 3)  # not the same numbers at every step
        work = [gradient * factor for gradient in self._gradients]
        turns = [
            Turn(layout, self._step, (HYPER,) * len(layout.segments), layout.split(weights))
            for layout, weights in zip(self.layouts, self._weights, strict=True)
        ]
        self._wait()
        start = clock()
        with torch.no_grad():
            for turn, gradient in zip(turns, work, strict=True):
                self._aggregator.reduce(turn, turn.layout.split(gradient))
        self._wait()
        self._step += 1
        return clock() - start

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
