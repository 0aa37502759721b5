"""Local gradients beside the global sparse ones (Aji and Heafield, Algorithm 2), and parameter averaging.

The paper adds gradients up where DDP averages them; everything here is its update divided by N. G is the group's
mean, L this rank's own gradient, S what it sent, E what it kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from thinwire.engine.context import ExchangeContext
from thinwire.engine.flat_gradient import Gradient, as_flat
from thinwire.engine.group_mean import DenseResult, Result, SparseResult, WrittenResult, add_entries
from thinwire.engine.payloads import Accepted, Sparse
from thinwire.transport import Net
from thinwire.transport.failures import ENTERED


class LocalGradients(Protocol):
    """How a rank's own gradient is combined with the group's mean. ``keeps_gradient`` says that it is still needed
    after the exchange, so that the mean cannot be written where it lies."""

    keeps_gradient: ClassVar[bool]

    def share(self, ranks: int) -> float:
        """The share of the local gradient that the mean is added to."""
        ...

    def combine(
        self,
        context: ExchangeContext,
        mean: Result,
        gradients: Sequence[Tensor],
        residual: Gradient,
        accepted: Accepted,
        ranks: int,
    ) -> Result:
        """Return this rank's own update direction."""
        ...


class NoLocalGradients:
    """The group's mean as it is."""

    keeps_gradient: ClassVar[bool] = False

    def share(self, ranks: int) -> float:
        return 0.0

    def combine(
        self,
        context: ExchangeContext,
        mean: Result,
        gradients: Sequence[Tensor],
        residual: Gradient,
        accepted: Accepted,
        ranks: int,
    ) -> Result:
        return mean


class PartialLocalGradients(NoLocalGradients):
    """PARTIAL, line 13: C = G - S + L. Needs no vector beside the gradient: L / N is made of it where it lies, the
    group's entries are added to that, and this rank's taken off again."""

    def share(self, ranks: int) -> float:
        return 1.0 / ranks

    def combine(
        self,
        context: ExchangeContext,
        mean: Result,
        gradients: Sequence[Tensor],
        residual: Gradient,
        accepted: Accepted,
        ranks: int,
    ) -> Result:
        sent = accepted.coded
        assert isinstance(sent, Sparse), "what travels otherwise is used as a whole"
        if isinstance(mean, SparseResult):
            off = Sparse(sent.indices, -sent.values, sent.numel, sent.capacity)
            return replace(mean, contributions=[*mean.contributions, off])
        assert isinstance(mean, WrittenResult)
        add_entries(context.layout, mean.parts, [sent], -ranks)  # divided by -N
        return mean


class SumOfLocalGradients(NoLocalGradients):
    """SUM, line 11: C = (G + L) / 2; G holds all of L where that travels dense."""

    keeps_gradient: ClassVar[bool] = True

    def combine(
        self,
        context: ExchangeContext,
        mean: Result,
        gradients: Sequence[Tensor],
        residual: Gradient,
        accepted: Accepted,
        ranks: int,
    ) -> Result:
        flat, grad = mean.flat(context), torch.cat(list(gradients))
        coded = slice(0, flat.numel() - accepted.tail.numel())
        flat[coded].add_(grad[coded], alpha=1.0 / ranks).mul_(0.5)
        return DenseResult(flat)


class LocalError(NoLocalGradients):
    """ERROR, lines 15 and 16: C = G + E, E = 0."""

    keeps_gradient: ClassVar[bool] = True

    def combine(
        self,
        context: ExchangeContext,
        mean: Result,
        gradients: Sequence[Tensor],
        residual: Gradient,
        accepted: Accepted,
        ranks: int,
    ) -> Result:
        flat, kept = mean.flat(context), as_flat(residual)
        flat.add_(kept, alpha=1.0 / ranks)
        kept.zero_()
        return DenseResult(flat)


LOCAL_MODES: dict[str, type[NoLocalGradients]] = {
    "sum": SumOfLocalGradients, "partial": PartialLocalGradients, "error": LocalError,
}  # fmt: skip


def average_parameters(parameters: Iterable[Tensor], net: Net, stage: str = "average parameters") -> None:
    """Replace every parameter by its mean over the ranks, the same bits everywhere."""
    with torch.no_grad():
        net.stage = stage
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for parameter in parameters:
            kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        for group in kinds.values():
            flat = torch.cat([parameter.detach().reshape(-1).to(torch.float32) for parameter in group])
            net.all_reduce(flat)
            flat.div_(net.size)
            start = 0
            for parameter in group:
                parameter.copy_(flat[start : start + parameter.numel()].view_as(parameter))
                start += parameter.numel()


@contextmanager
def averaged(parameters: Sequence[Tensor], net: Net) -> Iterator[None]:
    """The parameters are their mean over the ranks for the time of the block; a collective call at its beginning."""
    own, stage = [parameter.detach().clone() for parameter in parameters], net.stage
    average_parameters(parameters, net, f"averaged(), {ENTERED}")
    net.stage = stage
    try:
        yield
    finally:  # in place: others may hold these tensors
        with torch.no_grad():
            for parameter, before in zip(parameters, own, strict=True):
                parameter.copy_(before)
