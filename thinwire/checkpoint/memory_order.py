"""States whose parameters lay in another memory order: their vectors are permuted to the model's own.

A vector has its parameter's elements as they lie in memory, which is not the same in a contiguous and in a
channels_last weight. A server's vector is a stretch of that order, so all ranks' are put together first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Form = tuple[tuple[int, ...], tuple[int, ...]]  # a parameter's shape, and its dimensions from the slowest on


def in_order_of(states: Sequence[dict[str, Any]], parameters: Sequence[tuple[str, Any, Any]]) -> list[dict[str, Any]]:
    """Return plain states, which have passed all checks, with the memory order of ``parameters``."""
    saved = {name: (shape, order) for name, shape, order in states[0]["parameters"]}
    moved = {name: (saved[name], own) for name, shape, own in parameters if _differ(shape, saved[name][1], own)}
    if not moved:
        return list(states)
    return [_with_servers(_with_memory(state, moved), states, moved) for state in states]


def _differ(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether the orders of the elements differ; dimensions of one element have no place."""
    return [d for d in one if shape[d] != 1] != [d for d in other if shape[d] != 1]


def reordered(flat: Tensor, form: Form, order: Sequence[int]) -> Tensor:  # (n,) -> (n,)
    """The elements of a parameter of this form, in another memory order."""
    shape, saved = form
    inner = flat.view([shape[d] for d in saved])
    return inner.permute([saved.index(d) for d in order]).reshape(-1)


def _moved(vectors: Mapping[str, Any], moved: Mapping[str, tuple[Form, tuple[int, ...]]]) -> dict[str, Any]:
    return {
        name: reordered(value, *moved[name]) if name in moved and isinstance(value, Tensor) else value
        for name, value in vectors.items()
    }


def _with_memory(state: dict[str, Any], moved: Mapping[str, Any]) -> dict[str, Any]:
    own = {room: kinds for room, kinds in state["aggregator"].items() if room != "collective"}
    rooms = {room: {kind: _moved(vectors, moved) for kind, vectors in kinds.items()} for room, kinds in own.items()}
    aggregator = {**state["aggregator"], "memory": {}, **rooms}
    return {**state, "pending": _moved(state["pending"], moved), "aggregator": aggregator}


def _with_servers(
    state: dict[str, Any], states: Sequence[Mapping[str, Any]], moved: Mapping[str, Any]
) -> dict[str, Any]:
    """Put the servers' stretches of every moved parameter together, reorder the whole, and cut out this rank's."""
    served = state["aggregator"].get("collective", {})
    starts = served.get("starts", {})
    found = dict(served)
    for kind, vectors in served.items():
        found[kind] = dict(vectors)
        for name, vector in vectors.items():
            if name in moved and name in starts and isinstance(vector, Tensor):
                whole = reordered(_whole(states, kind, name), *moved[name])
                found[kind][name] = whole[starts[name] : starts[name] + vector.numel()].to(vector.device)
    return {**state, "aggregator": {**state["aggregator"], "collective": found}}


def _whole(states: Sequence[Mapping[str, Any]], kind: str, name: str) -> Tensor:
    """A server's vector of a parameter, from all ranks that serve a stretch of it."""
    rooms = [state["aggregator"].get("collective", {}) for state in states]
    pieces = sorted(
        (room["starts"][name], place, room[kind][name].cpu())
        for place, room in enumerate(rooms)
        if name in room.get("starts", {})
    )
    shape = next(shape for own, shape, _ in states[0]["parameters"] if own == name)
    whole = torch.cat([piece for _, _, piece in pieces])
    if whole.numel() != torch.Size(shape).numel():
        raise ValueError(
            f"{name!r} lies in another memory order than when the state was saved, and this is one rank's stretch of a "
            "server's error alone; give load_state_dict the list of all ranks' states"
        )
    return whole
