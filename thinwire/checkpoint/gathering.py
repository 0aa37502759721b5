"""All ranks' parts of a state in one: for loops that save one file, on rank 0."""

from __future__ import annotations

import io
from typing import Any

import torch

from thinwire.checkpoint.format import COMMON
from thinwire.transport import Net
from thinwire.transport.groups import check_agreement, gather_texts

PIECE_NBYTES = 1 << 26  # what travels at once: rank 0 needs a part and a piece beside what it has


def gather_parts(state: dict[str, Any] | None, net: Net, error: str | None) -> dict[str, Any]:
    """Return on rank 0 the state with the parts of all ranks, in its memory of the host, and {} on the others.

    A collective call. ``state`` is this rank's, or None where ``error`` says why there is none: all ranks raise then.
    """
    data = io.BytesIO()
    if state is not None:
        torch.save({key: part for key, part in state.items() if key not in COMMON}, data)
    common = {} if state is None else {key: state[key] for key in ("step", "optimizer_steps", "density_factor")}
    check_agreement(net, common, error)
    sizes = [int(text) for text in gather_texts(net, str(data.tell()))]
    if net.rank != 0:
        _send(data, net)
        return {}
    assert state is not None
    data.seek(0)
    parts = torch.load(data, map_location="cpu", weights_only=True)
    for rank, nbytes in enumerate(sizes[1:], start=1):
        parts.update(torch.load(_receive(rank, nbytes, net), map_location="cpu", weights_only=True))
    return {**{key: state[key] for key in COMMON}, **parts}


def _send(data: io.BytesIO, net: Net) -> None:
    frame = torch.frombuffer(data.getbuffer(), dtype=torch.uint8)
    net.stage = "gather the state on rank 0"
    for piece in frame.split(PIECE_NBYTES):
        net.send(0, piece)


def _receive(rank: int, nbytes: int, net: Net) -> io.BytesIO:
    data = io.BytesIO()
    net.stage = "gather the state on rank 0"
    for start in range(0, nbytes, PIECE_NBYTES):
        data.write(net.receive(rank, min(PIECE_NBYTES, nbytes - start)).cpu().numpy().data)
    data.seek(0)
    return data
