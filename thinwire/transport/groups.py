"""Process groups of our own, so that our collectives never mix with DDP's, SyncBatchNorm's or the user's."""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from thinwire.errors import FrameError
from thinwire.torch_private import num_groups, timeout_of
from thinwire.transport import BystanderNet, Net, TorchNet
from thinwire.transport.failures import RESERVE_PERIODS, period_s

# Groups that were given back, by the group that they were made from and by their ranks. Every group costs threads that
# poll, but it cannot be destroyed and made again: torch gives a group of a subgroup the name of an earlier one when the
# process knows as many groups as then, and its ranks then meet the addresses that the earlier one left in the store.
_spare: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], list[Any]]] = weakref.WeakKeyDictionary()


def acquire_group(parent: TorchNet, members: Sequence[int] | None = None) -> TorchNet:
    """Return a group of the parent's members (rising ranks inside the parent; None: all of them) for our use alone.

    All ranks of the parent must call this, and ``release_group``, in the same order.
    """
    ranks = _global_ranks(parent, members)
    spare = _spare.setdefault(parent.group, {}).get(tuple(ranks))
    group = spare.pop() if spare else _new_group(parent, ranks)
    if dist.get_rank() not in ranks:
        return BystanderNet(len(ranks), parent.compute_device)
    return TorchNet(group, parent.compute_device)


def release_group(parent: TorchNet, net: TorchNet, members: Sequence[int] | None = None) -> None:
    """Keep what ``acquire_group`` returned, with nothing under way on it, for the next call."""
    spare = _spare.setdefault(parent.group, {}).setdefault(tuple(_global_ranks(parent, members)), [])
    spare.append(None if isinstance(net, BystanderNet) else net.group)


def _global_ranks(parent: TorchNet, members: Sequence[int] | None) -> list[int]:
    world = dist.get_process_group_ranks(parent.group)
    return world if members is None else [world[member] for member in members]


def _new_group(parent: TorchNet, ranks: list[int]) -> Any:
    timeout = timeout_of(parent.group, parent.device)
    if timeout is not None:  # a failure is told, with the rank that is missing, within the time that the user set
        seconds = timeout.total_seconds()
        timeout = timedelta(seconds=seconds - RESERVE_PERIODS * period_s(seconds))
    options: dict[str, Any] = {"backend": dist.get_backend(parent.group), "timeout": timeout}
    if parent.size == dist.get_world_size():
        return dist.new_group(ranks, **options)
    # Only some ranks of the world are here. torch then names a group by its ranks and by how many groups a process
    # knows, and waits for ever when the members' counts differ: those who know fewer make groups of one first.
    counts = gather_texts(parent, str(num_groups()))
    me = [dist.get_rank()]
    for _ in range(max(map(int, counts)) - int(counts[parent.rank])):  # never destroyed: names would come back
        dist.new_group(me, use_local_synchronization=True, **options)
    return dist.new_group(ranks, use_local_synchronization=True, **options)


TEXT_LIMIT = 1 << 26  # bytes; the names and shapes of a model with a million parameters fit


def gather_texts(net: Net, text: str) -> list[str]:
    """Every rank gives one text and gets everybody's; nothing that comes over the wire is unpickled."""
    data = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
    own_size = torch.tensor([data.numel()], dtype=torch.int64).view(torch.uint8)
    sizes = [int(size.cpu().clone().view(torch.int64)) for size in net.all_gather(own_size)]
    for rank, size in enumerate(sizes):
        if not 1 <= size <= TEXT_LIMIT:
            raise FrameError(
                f"bad frame from rank {rank}: it announces a text of {size} bytes, not of 1 to {TEXT_LIMIT}"
            )
    padded = torch.nn.functional.pad(data, (0, max(sizes) - data.numel()))
    texts = [bytes(t.cpu()[:n].tolist()) for t, n in zip(net.all_gather(padded), sizes, strict=True)]
    return [_decoded(rank, raw) for rank, raw in enumerate(texts)]


def _decoded(rank: int, raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise FrameError(f"bad frame from rank {rank}: its text is not UTF-8") from None


def check_agreement(net: Net, mine: dict[str, object], error: str | None) -> None:
    """Raise a ValueError on all ranks when one has an error, its own first, or describes something else than rank 0."""
    net.stage = "agree on what to do"
    texts = gather_texts(net, json.dumps({"error": error, **mine}))
    everybody = [_description(rank, text) for rank, text in enumerate(texts)]
    if error is not None:
        raise ValueError(error)
    for rank, theirs in enumerate(everybody):
        if theirs["error"]:
            raise ValueError(f"on rank {rank}: {theirs['error']}")
    for rank, theirs in enumerate(everybody):
        for key in mine:
            # As text: dictionaries are equal whatever their order, and the order of parameters counts.
            if json.dumps(theirs.get(key)) != json.dumps(everybody[0].get(key)):
                raise ValueError(_difference(key, rank, everybody[0].get(key), theirs.get(key)))


def _description(rank: int, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict) or "error" not in found:
        raise FrameError(f"bad frame from rank {rank}: it does not describe the rank's method and parameters")
    return found


def _difference(key: str, rank: int, first: object, other: object) -> str:
    if isinstance(first, dict) and isinstance(other, dict):
        for name in [*first, *other]:
            if first.get(name) != other.get(name):
                a, b = first.get(name, "missing"), other.get(name, "missing")
                return f"ranks differ in {key}: {name} is {a} on rank 0 and {b} on rank {rank}; all ranks must agree"
        return f"ranks differ in {key}: their order on rank {rank} is not that of rank 0; all ranks must agree"
    return f"ranks differ in {key}: {first} on rank 0, {other} on rank {rank}; all ranks must agree"
