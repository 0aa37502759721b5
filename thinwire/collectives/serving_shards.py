"""Who serves what: the fixed assignment of parameters to serving ranks.

The assignment depends on the parameter alone (its size and its place in the model), never on the bucket it travels
in: a server's own error stays on its rank when DDP rebuilds its buckets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from thinwire.compressors.blocksign import cut_into_blocks
from thinwire.engine.context import ExchangeContext
from thinwire.engine.layout import Layout, Segment
from thinwire.kernels import Runs
from thinwire.kernels.uploads import once_a_thread, upload

WHOLE_BELOW = 4096  # a tensor smaller than this is served by one rank


@dataclass(frozen=True)
class Piece:
    """A part of one tensor that one rank serves; ``start`` and ``stop`` count inside the tensor."""

    segment: Segment
    place: int  # of the segment in the layout
    start: int
    stop: int

    @property
    def span(self) -> slice:
        return slice(self.segment.start + self.start, self.segment.start + self.stop)


def bounds(segment: Segment, rank: int, size: int, topology: str) -> tuple[int, int]:
    """Return the part of a tensor that a rank serves: first element and end, equal when it serves none of it."""
    if topology == "server" or segment.numel < WHOLE_BELOW:
        owner = 0 if topology == "server" else segment.ordinal % size
        return (0, segment.numel) if rank == owner else (0, 0)
    return segment.numel * rank // size, segment.numel * (rank + 1) // size


def served_by(numels: Mapping[str, int], rank: int, size: int, topology: str) -> dict[str, tuple[int, int]]:
    """Return what a rank serves: first element and end of its part of each parameter of which it serves any."""
    if rank < 0:  # a rank that stands behind its machine's first serves nothing
        return {}
    parts = {
        name: bounds(Segment(name, ordinal, numel, 0, True), rank, size, topology)
        for ordinal, (name, numel) in enumerate(numels.items())
    }
    return {name: (start, stop) for name, (start, stop) in parts.items() if stop > start}


@dataclass(frozen=True)
class Shard:
    """What one rank serves of one exchange: pieces of coded tensors and a slice of the dense tail."""

    pieces: tuple[Piece, ...]
    tail_start: int
    tail_stop: int

    @property
    def tail(self) -> slice:
        return slice(self.tail_start, self.tail_stop)

    @cached_property
    def numel(self) -> int:
        return sum(piece.stop - piece.start for piece in self.pieces)

    @property
    def tail_numel(self) -> int:
        return self.tail_stop - self.tail_start

    @property
    def empty(self) -> bool:
        return self.numel == 0 and self.tail_numel == 0

    @cached_property
    def layout(self) -> Layout:
        """The served pieces as a layout of their own: the server's error is kept by parameter name too."""
        return Layout.of([(p.segment.name, p.segment.ordinal, p.stop - p.start, True) for p in self.pieces])

    def context(self, context: ExchangeContext) -> ExchangeContext:
        return ExchangeContext(self.layout, context.step, tuple(context.hypers[piece.place] for piece in self.pieces))

    def piece_runs(self) -> Runs:
        """Every piece as a block: TernGrad's scalers belong to tensors."""
        return tuple((piece.stop - piece.start, 1) for piece in self.pieces)

    def server_runs(self, block: int | None) -> Runs:
        """The server's blocks: each piece cut anew from its beginning."""
        return sum((cut_into_blocks(piece.stop - piece.start, block) for piece in self.pieces), ())

    def worker_runs(self, block: int | None) -> Runs:
        """The workers' blocks as far as they lie inside the pieces."""
        runs: list[tuple[int, int]] = []
        for piece in self.pieces:
            start, stop = piece.start, piece.stop
            size = block or piece.segment.numel
            head = min(-start % size, stop - start)
            if head:
                runs.append((head, 1))
            runs.extend(cut_into_blocks(stop - start - head, size))
        return tuple(runs)

    def worker_scales(self, block: int | None, layout: Layout) -> Tensor:  # -> (B,) int64
        """Which of a worker's scales belong to the blocks of ``worker_runs``."""
        first, offset = {}, 0
        for segment in layout.coded:
            first[segment.name] = offset
            offset += sum(count for _, count in cut_into_blocks(segment.numel, block))
        parts = []
        for piece in self.pieces:
            size = block or piece.segment.numel
            base = first[piece.segment.name]
            begin, end = base + piece.start // size, base + (piece.stop - 1) // size + 1
            parts.append(torch.arange(begin, end, dtype=torch.int64))
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)


@lru_cache(maxsize=64)
def shards(layout: Layout, size: int, topology: str) -> tuple[Shard, ...]:
    """Return every rank's shard of one exchange."""
    result = []
    for rank in range(size):
        pieces = []
        for place, segment in enumerate(layout.segments):
            start, stop = bounds(segment, rank, size, topology) if segment.coded else (0, 0)
            if stop > start:
                pieces.append(Piece(segment, place, start, stop))
        tail = layout.tail_numel
        if topology == "server":
            start, stop = 0, tail if rank == 0 else 0
        else:
            start, stop = tail * rank // size, tail * (rank + 1) // size
        result.append(Shard(tuple(pieces), start, stop))
    return tuple(result)


@lru_cache(maxsize=256)
def worker_runs(shard: Shard, block: int | None) -> Runs:
    """``Shard.worker_runs``, computed once."""
    return shard.worker_runs(block)


def block_scales(scales: Tensor, shard: Shard, block: int | None, layout: Layout) -> Tensor:  # (all,) -> (B,) float32
    """Those of a worker's scales that belong to the blocks of ``worker_runs``."""
    return _taken(scales, _scale_places(shard, block, layout, scales.device))


def piece_scales(scales: Tensor, shard: Shard) -> Tensor:  # (coded tensors,) -> (pieces,) float32
    """The scale of every piece's tensor. Coded segments come first in a layout, and so do their scales."""
    places = tuple(piece.place for piece in shard.pieces)
    return _taken(scales, _on_device(places, scales.device))


@once_a_thread(most=1024)
def _on_device(places: tuple[int, ...], device: torch.device) -> Tensor:  # -> (p,) int64
    return upload(torch.tensor(places, dtype=torch.int64), device)


@once_a_thread(most=256)
def _scale_places(shard: Shard, block: int | None, layout: Layout, device: torch.device) -> Tensor:  # -> (B,) int64
    return upload(shard.worker_scales(block, layout), device)


def _taken(scales: Tensor, places: Tensor) -> Tensor:
    # Places are different and in order, so as many as there are scales means all of them.
    return scales if places.numel() == scales.numel() else scales[places]
