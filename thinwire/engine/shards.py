"""Tensors that are one rank's rows of larger ones, as torch's ``fully_shard`` cuts parameters over ranks.

Only tensors are asked here, by what they can do: nothing is imported for trainings that shard nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from thinwire.errors import ExchangeError, NonFiniteError, ReplicaError
from thinwire.transport import Net
from thinwire.transport.groups import check_agreement, gather_texts

Result = TypeVar("Result")
KNOWN = {kind.__name__: kind for kind in (ExchangeError, NonFiniteError, ReplicaError, ValueError)}
ELSEWHERE = "on a rank with another shard: {}"


def local_of(tensor: Tensor) -> Tensor:
    """What this rank holds of a DTensor, in its memory; a plain tensor as it is."""
    if not hasattr(tensor, "to_local"):
        return tensor
    with torch.no_grad():
        return cast(Tensor, tensor.to_local())


def sharded_like(local: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part as one of a tensor that is cut as the parameter is; a plain parameter's is whole already."""
    if not hasattr(parameter, "to_local"):
        return local
    from torch.distributed.tensor import DTensor  # here: imported already where there are DTensors

    owner = cast(DTensor, parameter)
    return DTensor.from_local(
        local, owner.device_mesh, owner.placements, run_check=False, shape=owner.shape, stride=owner.stride()
    )


def span_of(shape: Sequence[int], place: int, of: int) -> tuple[int, int]:
    """The elements of a whole parameter that shard ``place`` of ``of`` has: torch.chunk of its rows."""
    if of == 1:
        return 0, torch.Size(shape).numel()
    rows, width = shape[0], torch.Size(shape[1:]).numel()
    chunk = -(-rows // of)
    return min(place * chunk, rows) * width, min((place + 1) * chunk, rows) * width


@dataclass(frozen=True)
class Shards:
    """Which shard of the model a reducer's tensors are, and how the ranks that hold the others are reached.

    ``owners`` are the whole parameters, which the optimizer has, by name; none where the reducer's tensors are these.
    ``net`` has the ranks that hold the shards of one replica, in order; None where there is one shard.
    """

    place: int = 0
    of: int = 1
    owners: Mapping[str, Tensor] = field(default_factory=dict)
    net: Net | None = None

    def wholes(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The parameters as the user knows them."""
        return self.owners or parameters

    def nets(self, own: Net) -> list[Net]:
        """With the net of this shard: what brings a word from any rank of the training to all, one after the other."""
        return [own] if self.net is None else [own, self.net]

    def spread(self, mine: dict[str, object], error: str | None) -> str | None:
        """This rank's error, or that of a rank with another shard, or how what they describe differs from it."""
        if self.net is None:
            return error
        try:
            check_agreement(self.net, mine, error)
        except ValueError as problem:
            return str(problem)
        return None

    def together(self, work: Callable[[], Result]) -> Result:
        """Do it; raise as well where it fails on a rank with another shard, which this one would wait for."""
        if self.net is None:
            return work()
        error, result = None, None
        try:
            result = work()
        except Exception as problem:
            error = problem
        try:
            self._raise_others(error)
        except ExchangeError:
            if error is None:  # else the ranks of the other shards are gone, too, and this rank knows why
                raise
        if error is not None:
            raise error
        return cast(Result, result)

    def _raise_others(self, error: Exception | None) -> None:
        net: Any = self.net
        net.stage = "agree that all shards were exchanged"
        flag = torch.tensor([error is not None], dtype=torch.uint8, device=net.device)
        net.all_reduce(flag, largest=True)
        if not bool(flag):
            return
        texts = gather_texts(net, json.dumps([type(error).__name__, str(error)] if error is not None else []))
        if error is None:
            kind, sentence = next(json.loads(text) for text in texts if text != "[]")
            raise KNOWN.get(kind, RuntimeError)(ELSEWHERE.format(sentence))


WHOLE = Shards()
