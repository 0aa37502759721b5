"""Local gradients beside the global sparse ones (Aji and Heafield, Algorithm 2), and parameter averaging.

The paper adds gradients up where DDP averages them; everything here is its update divided by N. G is the group's
mean, L this rank's own gradient, S what it sent, E what it kept.

PARTIAL needs no vector beside the gradient: L / N is made of it where it lies, and the group's entries are added to
that (``ExchangeContext.own``), this rank's taken off again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from thinwire.engine.context import ExchangeContext
from thinwire.engine.payloads import Accepted, Result, Sparse, SparseResult, WrittenResult, add_entries
from thinwire.transport import Net
from thinwire.transport.failures import ENTERED

LOCAL_MODES = ("sum", "partial", "error")
DRIFTED = (
    "thinwire: the model is evaluated while the ranks' parameters differ, as local gradients let them; evaluate and "
    "export inside `with wire.averaged():`, on all ranks"
)


def take_own_off(context: ExchangeContext, result: Result, accepted: Accepted, ranks: int) -> Result:
    """PARTIAL, line 13: C = G - S + L. The result, written onto L / N, is G + L; S is what was accepted."""
    sent = accepted.coded
    assert isinstance(sent, Sparse), "what travels otherwise is used as a whole"
    if isinstance(result, SparseResult):
        off = Sparse(sent.indices, -sent.values, sent.numel, sent.capacity)
        return replace(result, contributions=[*result.contributions, off])
    assert isinstance(result, WrittenResult)
    add_entries(context.layout, result.parts, [sent], -ranks)  # divided by -N
    return result


def combine(mode: str, mean: Tensor, grad: Tensor, residual: Tensor, accepted: Accepted, ranks: int) -> Tensor:
    """SUM and ERROR: return this rank's own update direction; all vectors are (n,) float32. ERROR clears the
    residual."""
    if mode == "sum":  # line 11: C = (G + L) / 2; G holds all of L where that travels dense
        coded = slice(0, mean.numel() - accepted.tail.numel())
        mean[coded].add_(grad[coded], alpha=1.0 / ranks).mul_(0.5)
        return mean
    assert mode == "error"
    mean.add_(residual, alpha=1.0 / ranks)  # lines 15 and 16: C = G + E, E = 0
    residual.zero_()
    return mean


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
