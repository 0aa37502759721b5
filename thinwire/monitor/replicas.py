"""Are the replicas still the same? A hash of every rank's parameters, 8 bytes per rank.

Data-parallel training silently assumes it: a flipped bit, a parameter changed on one rank only or a collective that
answered differently somewhere makes ranks train different models from then on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from thinwire.engine.layout import memory_flat
from thinwire.errors import ReplicaError
from thinwire.kernels import checksum
from thinwire.transport import Net

NAMED_AT_MOST = 5
GO_BACK = (
    "go back to a checkpoint, and look for a parameter that is changed on some ranks only, or for broken memory on the "
    "rank that is alone"
)


def hashes(parameters: Sequence[Tensor]) -> Tensor:  # -> (P,) int64 in [0, 2**32), on the host
    """Return one number per parameter that any changed bit changes; one transfer from a GPU for all of them."""
    return torch.stack([checksum(words_of(parameter.detach())) for parameter in parameters]).cpu()


def words_of(tensor: Tensor) -> Tensor:  # any shape and dtype -> (n,) int32
    """The tensor's bits as they lie in memory, filled up with zeros to whole words."""
    as_bytes = memory_flat(tensor).contiguous().view(torch.uint8)
    filling = -as_bytes.numel() % 4
    return (torch.nn.functional.pad(as_bytes, (0, filling)) if filling else as_bytes).view(torch.int32)


def check_replicas(parameters: Mapping[str, Tensor], net: Net, when: str, way_out: str) -> None:
    """Raise the same ReplicaError on all ranks when their parameters differ in any bit; a collective call.

    8 bytes per rank travel; only when they differ does a second round, of 4 bytes per parameter, say where.
    """
    if not parameters:
        return
    own = hashes(list(parameters.values()))
    words = own.view(torch.int32)[::2].contiguous()  # the lower halves; the upper ones are zero
    low, high = checksum(words), checksum(words, 1 << 20)  # 64 bits of all parameters together
    answers = net.all_gather((low | high << 32).reshape(1).view(torch.uint8))
    if len({bytes(answer.cpu().tolist()) for answer in answers}) == 1:
        return
    rows = [row.cpu().clone().view(torch.int32).tolist() for row in net.all_gather(words.view(torch.uint8))]
    found = [
        f"{name!r} ({_parties([row[place] for row in rows])})"
        for place, name in enumerate(parameters)
        if len({row[place] for row in rows}) > 1
    ]
    more = f" and {len(found) - NAMED_AT_MOST} more" if len(found) > NAMED_AT_MOST else ""
    raise ReplicaError(
        f"the replicas differ {when} in {len(found)} of {len(parameters)} parameters: "
        f"{', '.join(found[:NAMED_AT_MOST])}{more}; {way_out}"
    )


def _parties(values: Sequence[int]) -> str:
    """[7, 7, 9, 7] -> 'rank 2 against ranks 0, 1, 3': the smaller party first."""
    ranks: dict[int, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    ordered = sorted(ranks.values(), key=lambda party: (len(party), party))
    return " against ".join(f"rank{'s' if len(party) > 1 else ''} {', '.join(map(str, party))}" for party in ordered)
