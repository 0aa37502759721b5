"""Plain states of a model in shards: put together to those of whole parameters, and cut into other shards.

Every rank of a replica keeps vectors of its own rows. Row after row they are the replica's, so none is lost and no
number changes. What servers keep is put on a group's first rank, from where ``reshard`` cuts it for the new one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.engine.shards import span_of

Spans = Mapping[str, tuple[int, int]]  # the elements of every parameter that a shard has


def spans_of(parameters: Sequence[tuple[str, Any, Any]], place: int, of: int) -> dict[str, tuple[int, int]]:
    return {name: span_of(shape, place, of) for name, shape, _ in parameters}


def joined(states: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The states of all ranks, put together to one per replica, whose vectors are of whole parameters."""
    of, forms = states[0]["shards"], states[0]["parameters"]
    columns = []
    for place in range(of):
        column = sorted((state for state in states if state["shard"] == place), key=lambda state: state["rank"])
        columns.append(_served_by_first(column, spans_of(forms, place, of)))
    spans = [spans_of(forms, place, of) for place in range(of)]
    return [_side_by_side(parts, spans) for parts in zip(*columns, strict=True)]


def cut(states: Sequence[dict[str, Any]], place: int, of: int) -> list[dict[str, Any]]:
    """What of states of whole parameters belongs to shard ``place`` of ``of``."""
    forms = states[0]["parameters"]
    spans = spans_of(forms, place, of)
    whole = _served_by_first(sorted(states, key=lambda state: state["rank"]), spans_of(forms, 0, 1))
    return [_mapped(state, lambda name, vector: vector[slice(*spans[name])].clone()) for state in whole]


def _mapped(state: dict[str, Any], change: Any) -> dict[str, Any]:
    """A state with all vectors changed; numbers stay."""

    def changed(vectors: Mapping[str, Any]) -> dict[str, Any]:
        return {name: change(name, v) if isinstance(v, Tensor) else v for name, v in vectors.items()}

    rooms = {room: {kind: changed(v) for kind, v in kinds.items()} for room, kinds in state["aggregator"].items()}
    return {**state, "pending": changed(state["pending"]), "aggregator": rooms}


def _side_by_side(parts: Sequence[dict[str, Any]], spans: Sequence[Spans]) -> dict[str, Any]:
    """One replica's state from those of its shards, in order."""

    def together(rooms: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        names = {name: None for room in rooms for name in room}
        return {name: _row_of(name, [room.get(name) for room in rooms], spans) for name in names}

    aggregators = [part["aggregator"] for part in parts]
    rooms = {
        room: {
            kind: together([one.get(room, {}).get(kind, {}) for one in aggregators])
            for kind in {kind: None for one in aggregators for kind in one.get(room, {})}
        }
        for room in {room: None for one in aggregators for room in one}
    }
    return {**parts[0], "shard": 0, "pending": together([part["pending"] for part in parts]), "aggregator": rooms}


def _row_of(name: str, values: Sequence[Any], spans: Sequence[Spans]) -> Any:
    """The shards' vectors of a parameter behind each other, zeros where a shard has none; of numbers the first."""
    known = [value for value in values if value is not None]
    if not isinstance(known[0], Tensor):
        return known[0]
    pieces = [
        value.cpu() if value is not None else torch.zeros(stop - start, dtype=known[0].dtype)
        for value, (start, stop) in zip(values, (own[name] for own in spans), strict=True)
    ]
    return torch.cat(pieces)


def _served_by_first(column: Sequence[dict[str, Any]], spans: Spans) -> list[dict[str, Any]]:
    """The states of one group with all that its servers keep on its first rank."""
    rooms = [state["aggregator"].get("collective") or {} for state in column]
    if not any(room.get("starts") for room in rooms):
        return list(column)
    first: dict[str, Any] = {kind: {} for room in rooms for kind in room}
    for room in rooms:
        for kind, values in room.items():
            for name, value in values.items():
                if not isinstance(value, Tensor):
                    first[kind][name] = 0 if kind == "starts" else value
                elif name in room.get("starts", {}):
                    start, stop = spans[name]
                    whole = first[kind].setdefault(name, torch.zeros(stop - start, dtype=value.dtype))
                    whole[room["starts"][name] :][: value.numel()] = value.cpu()
    nothing: dict[str, Any] = {kind: {} for kind in first}
    return [
        {**state, "aggregator": {**state["aggregator"], "collective": nothing if place else first}}
        for place, state in enumerate(column)
    ]
