"""The form of a saved state, and what it must look like before anything of it is loaded.

    {"format", "method", "parameters", "world_size", "hierarchy", "step", ...: the same on every rank,
     "rank 3": {"pending": ..., "aggregator": ...}: what this rank alone has}

The rank is part of a key because torch.distributed.checkpoint takes equal keys of several ranks for one replicated
tensor and keeps one of them. It also fills the state_dict() of the moment in place, so the keys and shapes of a wire's
state never change: a vector that nothing was put into yet is there as zeros, and whatever is no vector of a declared
kind (numbers by parameter, gradients that wait for the first step after a switch) lies in tuples, which it stores as
they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.checkpoint.reshard import check_complete, reshard, without_servers
from thinwire.engine.named_state import KeptVector, StateKind
from thinwire.methods.running import RunningMethod

STATE_FORMAT = 3
COMMON = (
    "format", "method", "parameters", "world_size", "hierarchy", "step", "optimizer_steps", "density_factor",
)  # fmt: skip


@dataclass(frozen=True)
class StateShape:
    """What a rank's state has at any moment: kinds by room, and of which parameters there are vectors. A rank that
    ``follows`` its machine's leader has none."""

    numels: Mapping[str, int]  # of the model's parameters, in order
    kinds: Mapping[str, Mapping[str, StateKind]]
    vectors: Mapping[tuple[str, str], Mapping[str, KeptVector]]  # by room and kind, and by parameter
    device: torch.device
    follows: bool
    compresses: bool

    @classmethod
    def of(cls, running: RunningMethod, shapes: Mapping[str, torch.Size], device: torch.device) -> StateShape:
        numels = {name: shape.numel() for name, shape in shapes.items()}
        coded = {name for name, shape in shapes.items() if running.method.is_coded(name, shape)}
        vectors: dict[tuple[str, str], dict[str, KeptVector]] = {}
        for vector in running.aggregator.vectors(numels, coded):
            vectors.setdefault((vector.room, vector.kind), {})[vector.name] = vector
        return cls(numels, running.aggregator.kinds(), vectors, device, running.follows, running.compresses)

    def filled(self, room: str, kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
        missing = {
            name: torch.zeros(vector.numel, dtype=vector.dtype, device=self.device)
            for name, vector in self.vectors.get((room, kind), {}).items()
        }
        return {**missing, **values}

    def needs(self, room: str, kind: str) -> bool:
        """Whether there are vectors of this kind; what is in other rooms has no vectors of parameters."""
        return (room, kind) in self.vectors or room not in ("memory", "collective")

    @property
    def served(self) -> dict[str, tuple[int, int]]:
        """The elements of which this rank keeps vectors as a server."""
        kept = [vectors for (room, _), vectors in self.vectors.items() if room == "collective"]
        return {name: (vector.start, vector.stop) for vectors in kept for name, vector in vectors.items()}


def part_key(rank: int) -> str:
    return f"rank {rank}"


def pack(flat: Mapping[str, Any], shape: StateShape) -> dict[str, Any]:
    """Give one rank's plain state (every key of it at one level) the form in which it is saved."""
    rooms = {
        room: {
            kind: shape.filled(room, kind, values) if kind in shape.kinds.get(room, {}) else tuple(values.items())
            for kind, values in kinds.items()
        }
        for room, kinds in flat["aggregator"].items()
    }
    pending = tuple((name, tensor.cpu()) for name, tensor in flat["pending"].items())
    part = {"pending": pending, "aggregator": rooms}
    return {**{key: flat[key] for key in COMMON}, part_key(flat["rank"]): part}


def unpack(state: object) -> list[dict[str, Any]]:
    """Return the plain states of all ranks that a saved state, or a list of them, holds."""
    if isinstance(state, (list, tuple)):
        return [one for each in state for one in unpack(each)]
    if not isinstance(state, dict) or state.get("format") != STATE_FORMAT:
        raise ValueError("this is not a wire's state_dict, or one of another format version")
    for key in COMMON:
        if key not in state:
            raise ValueError(f"the state has no {key!r}: it is not a whole wire's state_dict")
    return [
        {**{k: state[k] for k in COMMON}, "rank": int(key.removeprefix("rank ")), **_plain_part(key, part)}
        for key, part in state.items()
        if key not in COMMON
    ]


def _plain_part(key: str, part: Any) -> dict[str, Any]:
    if not key.removeprefix("rank ").isdecimal() or not isinstance(part, dict):
        raise ValueError(f"the state has an unknown part {key!r}: it is not a wire's state_dict")
    if "pending" not in part:
        raise ValueError("the state has no 'pending': it is not a whole wire's state_dict")
    # A room that holds nothing has no trace in a distributed checkpoint.
    rooms: dict[str, Any] = {"memory": {}, "collective": {}}
    for room, kinds in part.get("aggregator", {}).items():
        rooms[room] = {kind: dict(values) for kind, values in kinds.items()}
    return {"pending": dict(part["pending"]), "aggregator": rooms}


def without_zeros(aggregator: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the vectors into which nothing was ever put: they need no memory."""
    return {
        room: {
            kind: {n: v for n, v in values.items() if not isinstance(v, Tensor) or bool(v.any())}
            for kind, values in kinds.items()
        }
        for room, kinds in aggregator.items()
    }


def check_run(state: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise when a plain state is not of the method and model whose current state is ``own``; the sentence names the
    first parameters that differ."""
    if state["method"] != own["method"]:
        raise ValueError(
            f"the state belongs to method {state['method']}, the wire uses {own['method']}; "
            f"to go on from it attach the state's method{_apart(state['method'], own['method'])}"
        )
    saved, numels = dict(state["parameters"]), dict(own["parameters"])
    missing = {"the model does not have": saved.keys() - numels, "the state does not have": numels.keys() - saved}
    for whose, names in missing.items():
        if names:
            some, more = ", ".join(map(repr, sorted(names)[:5])), ", ..." if len(names) > 5 else ""
            raise ValueError(f"the state belongs to another model: {whose} {some}{more}")
    for name, numel in numels.items():
        if saved[name] != numel:
            raise ValueError(f"the state has {saved[name]} elements for {name!r}, the model has {numel}")


def _apart(saved: str, own: str) -> str:
    """The options in which a saved method differs from one of the same name, as they were saved."""
    (name, _, options), (other, _, others) = saved.partition(":"), own.partition(":")
    apart = re.compile(r",(?=\w+=)")  # a schedule may have commas of its own, followed by a space
    differ = [option for option in apart.split(options) if option and option not in apart.split(others)]
    return f" ({', '.join(differ)})" if name == other and differ else ""


def check_fits(state: Mapping[str, Any], terms: Mapping[str, Any], shape: StateShape) -> None:
    """Raise when a plain state has not the group of ``terms`` and the form of ``shape``."""
    for key in ("world_size", "rank", "hierarchy"):
        if state[key] != terms[key]:
            raise ValueError(
                f"the state was saved with {key} {state[key]}, this process has {key} {terms[key]}; give "
                "load_state_dict the list of all ranks' states to resume with another group, or use "
                "wire.load_checkpoint(folder)"
            )
    for room, kinds in shape.kinds.items():
        for kind in kinds:
            if shape.needs(room, kind) and kind not in state["aggregator"].get(room, {}):
                raise ValueError(
                    f"the state's aggregator has no {kind} in its {room}: it is not whole, or was saved with an "
                    "optimizer that kept its own momentum"
                )
    for kind, values in state["aggregator"].get("memory", {}).items():
        if kind not in shape.kinds.get("memory", {}) and any(isinstance(value, Tensor) for value in values.values()):
            raise ValueError(
                f"the state has a {kind}, which this method does not keep with this optimizer; load it with the "
                "optimizer that it was saved with"
            )
    served = state["aggregator"].get("collective", {}).get("starts", {})
    for room, kinds in {"": {"pending": state["pending"]}, **state["aggregator"]}.items():
        for vectors in kinds.values():
            for name, tensor in vectors.items():
                if isinstance(tensor, Tensor):
                    start = served.get(name, 0) if room == "collective" else None
                    _check_vector(name, tensor, shape.numels, start)


def _check_vector(name: str, tensor: Tensor, numels: Mapping[str, int], start: int | None) -> None:
    """Raise when a saved vector is not of the model; a server's begins at ``start`` and may be a part."""
    if name not in numels:
        raise ValueError(f"the state has a parameter {name!r} that the model does not have")
    numel = numels[name]
    if tensor.numel() != numel if start is None else start + tensor.numel() > numel:
        raise ValueError(f"the state has {tensor.numel()} elements for {name!r}, the model has {numel}")


def state_for(state: object, terms: Mapping[str, Any], shape: StateShape) -> dict[str, Any]:
    """The plain state that this rank loads from its own saved one, or from the list of all ranks'.

    ``terms`` are the state's common keys as this rank has them. A ValueError where the state does not fit.
    """
    given = unpack(state)
    for one in given:
        check_run(one, terms)
    if isinstance(state, (list, tuple)) or len(given) != 1:
        check_complete(given)
        if all(given[0][key] == terms[key] for key in ("world_size", "hierarchy")):
            given = [one for one in given if one["rank"] == terms["rank"]]
        else:
            place = {key: terms[key] for key in ("world_size", "rank", "hierarchy")}
            given = [{**reshard(given, shape.numels, shape.kinds, shape.served), **place}]
    (one,) = given
    check_fits(one, terms, shape)
    kept = without_zeros(one["aggregator"])
    if shape.follows:  # a checkpoint of another group has a share for every rank; here the leader has it
        for room in kept.keys() & {"memory", "collective"}:
            kept[room] = {kind: {} for kind in kept[room]}
    elif not shape.compresses:
        kept = without_servers(kept)
    return {**one, "aggregator": kept}
