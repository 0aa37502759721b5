"""Whether one rank's part of a state is what was saved: a row per tensor, and a seal over everything else."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire.kernels import checksum
from thinwire.monitor.replicas import words_of

VectorRow = tuple[str, str, str, str, int, int]  # room, kind, parameter, type, number of elements, hash of the bits
NOT_ONE = "it is not the state_dict of a wire or reducer"
LOAD_ANOTHER = "load another checkpoint"


def plain_part(key: str, part: Any) -> dict[str, Any]:
    """Return one rank's part with all values by parameter name; a ValueError where it has another form."""
    if not isinstance(part, Mapping):
        raise ValueError(f"the state has an unknown part {key!r}: {NOT_ONE}")
    for needed in ("pending", "aggregator", "tensors", "seal"):
        if needed not in part and needed != "aggregator":
            raise ValueError(f"the state has no {needed!r}: it is not the whole state_dict of a wire or reducer")
    unknown = next((name for name in part if name not in ("pending", "aggregator", "tensors", "seal")), None)
    if unknown is not None:
        raise ValueError(f"the state has an unknown {unknown!r} in its part {key!r}: {NOT_ONE}")
    # A room that holds nothing has no trace in a distributed checkpoint.
    aggregator: dict[str, Any] = {"memory": {}, "collective": {}}
    for room, kinds in _by_name(part.get("aggregator", {}), "aggregator").items():
        aggregator[room] = {kind: _by_name(values, kind) for kind, values in _by_name(kinds, room).items()}
    pending = _by_name(part["pending"], "pending")
    for name, tensor in pending.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"the state's pending gradient of {name!r} is a {type(tensor).__name__}: {NOT_ONE}")
    return {"pending": pending, "aggregator": aggregator, "tensors": part["tensors"], "seal": part["seal"]}


def _by_name(values: Any, where: str) -> dict[str, Any]:
    pairs = list(values.items()) if isinstance(values, Mapping) else values
    if not isinstance(pairs, (list, tuple)) or any(not isinstance(p, (list, tuple)) or len(p) != 2 for p in pairs):
        raise ValueError(f"the state's {where} is a {type(values).__name__}, and not values by name: {NOT_ONE}")
    if any(not isinstance(name, str) for name, _ in pairs):
        raise ValueError(f"the state's {where} has a name that is no text: {NOT_ONE}")
    return dict(pairs)


def _leaves(part: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str, str], Any]]:
    """Everything that a plain part holds, by room, kind and name."""
    for room, kinds in {"": {"pending": part["pending"]}, **part["aggregator"]}.items():
        for kind, values in kinds.items():
            for name, value in values.items():
                yield (room, kind, name), value


def _tensors(part: Mapping[str, Any]) -> dict[tuple[str, str, str], Tensor]:
    return {place: value for place, value in _leaves(part) if isinstance(value, Tensor)}


def rows_of(part: Mapping[str, Any]) -> tuple[VectorRow, ...]:
    """Describe every tensor of a plain part; one transfer from a GPU for all of them."""
    tensors = dict(sorted(_tensors(part).items()))
    if not tensors:
        return ()
    words = [words_of(tensor) for tensor in tensors.values()]
    halves = torch.stack([checksum(own, start) for own in words for start in (0, 1 << 20)]).tolist()
    hashes = [low | high << 32 for low, high in zip(halves[::2], halves[1::2], strict=True)]
    described = zip(tensors.items(), hashes, strict=True)
    return tuple((*place, _type(tensor), tensor.numel(), own) for (place, tensor), own in described)


def _type(tensor: Tensor) -> str:
    odd = "meta " if tensor.is_meta else "" if tensor.layout is torch.strided else "sparse "
    return odd + str(tensor.dtype).removeprefix("torch.")


def seal_of(common: Mapping[str, Any], key: str, part: Mapping[str, Any], rows: tuple[VectorRow, ...]) -> str:
    """Hash all that is no tensor, the tensors' rows, and whose part it is."""
    others = sorted((place, repr(value)) for place, value in _leaves(part) if not isinstance(value, Tensor))
    return hashlib.sha256(repr((sorted(common.items()), key, rows, others)).encode()).hexdigest()


def check_contents(common: Mapping[str, Any], key: str, part: Mapping[str, Any]) -> None:
    """Raise unless a plain part holds what its rows and its seal say, to the bit, and is finite."""
    rows = part["tensors"]
    if not isinstance(rows, tuple) or seal_of(common, key, part, rows) != part["seal"]:
        _check_present(rows, part)
        raise ValueError(f"the state of {key} was changed or damaged after it was saved; {LOAD_ANOTHER}")
    _check_present(rows, part)
    tensors = _tensors(part)
    for row, found in zip(rows, rows_of(part), strict=True):
        if row != found:
            raise ValueError(
                f"the state's {row[1]} of {row[2]!r} was changed or damaged after it was saved; {LOAD_ANOTHER}"
            )
        if not bool(torch.isfinite(tensors[row[:3]]).all()):
            raise ValueError(
                f"the state's {row[1]} of {row[2]!r} holds an inf or a nan: it was saved when the training had failed "
                f"already; {LOAD_ANOTHER}"
            )


def _check_present(rows: Any, part: Mapping[str, Any]) -> None:
    """Raise at the first tensor that is not there, was not saved, or has another type or size."""
    try:
        saved = {(room, kind, name): (dtype, numel) for room, kind, name, dtype, numel, _ in rows}
    except (TypeError, ValueError):
        raise ValueError(f"the state's list of tensors cannot be read: {NOT_ONE}") from None
    tensors = _tensors(part)
    for place, (dtype, numel) in saved.items():
        room, kind, name = place
        where = (
            f"the state's aggregator has no {kind} of {name!r} in its {room}" if room else f"{name!r} is not pending"
        )
        if place not in tensors:
            raise ValueError(f"{where}, which was saved: it is not whole; {LOAD_ANOTHER}")
        found = tensors[place]
        if (_type(found), tuple(found.shape)) != (dtype, (numel,)):
            form = f"{list(found.shape)} {_type(found)}"
            raise ValueError(f"the state's {kind} of {name!r} is {form}, and was saved as {[numel]} {dtype}")
    for _, kind, name in tensors.keys() - saved.keys():
        raise ValueError(f"the state has a {kind} of {name!r} that was not saved with it; {LOAD_ANOTHER}")
