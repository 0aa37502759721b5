"""A group's mean: what it is added to, and how it reaches the gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.engine.context import ExchangeContext
from thinwire.engine.layout import Layout
from thinwire.engine.payloads import Sparse
from thinwire.kernels import scatter_add


@dataclass(frozen=True)
class Base:
    """What the mean of coded segments is added to: zeros, the direct-decay term, or a share of the local gradient.

    ``direct_decay``, one number per segment or empty, is how many times its weights are added to a coded segment's
    mean on every rank alike, without being sent. ``local_share`` is the share of this rank's own gradient.
    """

    direct_decay: tuple[float, ...] = ()
    local_share: float = 0.0

    def write(self, context: ExchangeContext, parts: Sequence[Tensor]) -> None:
        """Initialise the coded ones of the vectors, one per segment; the local gradient lies there until now."""
        coded = list(parts[: len(context.layout.coded)])
        if self.local_share:
            assert not self.direct_decay, "weights or the gradient"
            if coded:
                torch._foreach_mul_(coded, self.local_share)
            return
        shares = self.direct_decay or (0.0,) * len(parts)
        zeros = [part for part, share in zip(coded, shares, strict=False) if not share]
        decayed = [
            (part, context.flat_weight(place), shares[place]) for place, part in enumerate(coded) if shares[place]
        ]
        if zeros:
            torch._foreach_zero_(zeros)
        if decayed and decayed[0][0].is_cuda:  # few launches
            torch._foreach_copy_([part for part, _, _ in decayed], [weight for _, weight, _ in decayed])
            torch._foreach_mul_([part for part, _, _ in decayed], [share for _, _, share in decayed])
            return
        for part, weight, share in decayed:
            if weight.dtype == part.dtype:  # memory is passed over once
                torch.mul(weight, share, out=part)
            else:
                part.copy_(weight).mul_(share)


ZEROS = Base()


def add_entries(layout: Layout, parts: Sequence[Tensor], contributions: Sequence[Sparse], size: int) -> None:
    """Add contributions, divided by ``size``, to the coded ones of the vectors, in their order."""
    coded = len(layout.coded)
    if coded:
        starts = [segment.start for segment in layout.coded]
        lists = [(sparse.indices, sparse.values) for sparse in contributions]
        scatter_add(parts[:coded], starts, lists, 1.0 / size)


def write_tail(layout: Layout, parts: Sequence[Tensor], tail: Tensor, size: int) -> None:  # (t,) float32
    """Put a dense tail, divided by ``size``, into the vectors behind the coded ones."""
    dense = list(parts[len(layout.coded) :])
    if tail.numel():
        torch._foreach_copy_(dense, list(tail.split([part.numel() for part in dense])))
        torch._foreach_div_(dense, float(size))


@dataclass(frozen=True)
class DenseResult:
    """A group's mean as one vector."""

    mean: Tensor  # (n,) float32

    def flat(self, context: ExchangeContext) -> Tensor:
        return self.mean

    def write(self, context: ExchangeContext, parts: Sequence[Tensor]) -> None:
        """Put the mean where the gradients lie, one vector per segment."""
        torch._foreach_copy_(list(parts), list(context.layout.split(self.mean)))


@dataclass(frozen=True)
class SparseResult:
    """A group's mean as the contributions whose sum, divided by ``size``, it is; the tail is summed already.

    ``base`` is None where it was written already to the place where the mean will be.
    """

    contributions: list[Sparse]
    tail: Tensor  # (t,) float32
    size: int
    base: Base | None = ZEROS

    def flat(self, context: ExchangeContext) -> Tensor:  # -> (n,) float32
        out = torch.empty(context.layout.numel, dtype=torch.float32, device=self.tail.device)
        self.write(context, context.layout.split(out))
        return out

    def write(self, context: ExchangeContext, parts: Sequence[Tensor]) -> None:
        """The base, then the entries in rank order: no dense vector in between."""
        if self.base is not None:
            self.base.write(context, parts)
        add_entries(context.layout, parts, self.contributions, self.size)
        write_tail(context.layout, parts, self.tail, self.size)


@dataclass(frozen=True)
class WrittenResult:
    """A group's mean that lies already where it was to go: one vector per segment."""

    parts: Sequence[Tensor]

    def flat(self, context: ExchangeContext) -> Tensor:
        return torch.cat(list(self.parts))

    def write(self, context: ExchangeContext, parts: Sequence[Tensor]) -> None:
        for part, mean in zip(parts, self.parts, strict=True):
            if part.data_ptr() != mean.data_ptr():
                part.copy_(mean)


Result = DenseResult | SparseResult | WrittenResult
