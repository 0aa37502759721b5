"""Local gradients beside the global sparse ones (Aji and Heafield, Algorithm 2), and parameter averaging.

The paper adds gradients up where DDP averages them; everything here is its update divided by N. G is the group's
mean, L this rank's own gradient, S what it sent, E what it kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from thinwire.payloads import Accepted
from thinwire.transport import Net

LOCAL_MODES = ("sum", "partial", "error")


def combine(mode: str, mean: Tensor, grad: Tensor, residual: Tensor, accepted: Accepted, ranks: int) -> Tensor:
    """Return this rank's own update direction; all vectors are (n,) float32. Mode "error" clears the residual."""
    if mode == "sum":  # line 11: C = (G + L) / 2; G holds all of L where that travels dense
        coded = slice(0, mean.numel() - accepted.tail.numel())
        mean[coded].add_(grad[coded], alpha=1.0 / ranks).mul_(0.5)
        return mean
    if mode == "partial":  # line 13: C = G - S + L
        return mean.add_(grad.sub_(accepted.dense(grad.numel())), alpha=1.0 / ranks)
    mean.add_(residual, alpha=1.0 / ranks)  # lines 15 and 16: C = G + E, E = 0
    residual.zero_()
    return mean


def average_parameters(parameters: Iterable[Tensor], net: Net) -> None:
    """Replace every parameter by its mean over the ranks, the same bits everywhere."""
    with torch.no_grad():
        net.stage = "average parameters"
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
    own = [parameter.detach().clone() for parameter in parameters]
    average_parameters(parameters, net)
    try:
        yield
    finally:  # in place: others may hold these tensors
        with torch.no_grad():
            for parameter, before in zip(parameters, own, strict=True):
                parameter.copy_(before)
