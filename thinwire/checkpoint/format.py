"""The form of a saved state, and what it must look like before anything of it is loaded.

    {"format", "method", "parameters", "world_size", "shards", "step", ...: the same on every rank,
     "rank 3": {"pending": ..., "aggregator": ..., "tensors": ..., "seal": ...}: what this rank alone has}

A model in shards has a group per shard, and the part of a group's rank is "rank 3 of shard 1"; the parameters' shapes
are those of the whole ones all the same.

The rank is part of a key because torch.distributed.checkpoint takes equal keys of several ranks for one replicated
tensor and keeps one of them. It also fills the state_dict() of the moment in place, so the keys and shapes of a wire's
state never change: a vector that nothing was put into yet is there as zeros, and whatever is no vector of a declared
kind (numbers by parameter, gradients that wait for the first step after a switch) lies in tuples, which it stores as
they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.checkpoint.contents import check_contents, plain_part, rows_of, seal_of
from thinwire.checkpoint.memory_order import in_order_of
from thinwire.checkpoint.other_mesh import cut, joined
from thinwire.checkpoint.other_world_size import check_complete, reshard, without_servers
from thinwire.engine.named_state import KeptVector, StateKind
from thinwire.methods.running_method import RunningMethod
from thinwire.methods.spec import split_items

STATE_FORMAT = 5
COMMON = (
    "format", "method", "parameters", "world_size", "shards", "hierarchy", "step", "optimizer_steps",
    "density_factor",
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
    def of(
        cls, running: RunningMethod, shapes: Mapping[str, torch.Size], numels: Mapping[str, int], device: torch.device
    ) -> StateShape:
        """``shapes`` are the whole parameters', ``numels`` say how much of them is here."""
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


def part_key(rank: int, shard: int = 0, shards: int = 1) -> str:
    return f"rank {rank} of shard {shard}" if shards > 1 else f"rank {rank}"


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
    part = {"pending": pending, "aggregator": rooms, "tensors": (), "seal": ""}
    key = part_key(flat["rank"], flat["shard"], flat["shards"])
    common, plain = {key: flat[key] for key in COMMON}, plain_part(key, part)
    rows = rows_of(plain)
    return {**common, key: {**part, "tensors": rows, "seal": seal_of(common, key, plain, rows)}}


def unpack(state: object) -> list[dict[str, Any]]:
    """Return the plain states of all ranks that a saved state, or a list of them, holds."""
    if isinstance(state, (list, tuple)):
        return [one for each in state for one in unpack(each)]
    if isinstance(state, Mapping) and not state:
        raise ValueError(
            "the state is empty: state_dict(all_ranks=True) gives rank 0 the parts of all ranks and the others {}; "
            "load on every rank what rank 0 got"
        )
    if not isinstance(state, Mapping) or not _is(state.get("format"), int) or state["format"] != STATE_FORMAT:
        raise ValueError("this is not the state_dict of a wire or reducer, or one of another format version")
    if state.keys() == {"format", "method"}:
        raise ValueError(
            "the state was saved by a script without a process group, whose wire keeps nothing; go on without loading "
            "it"
        )
    common = {key: _common(state, key) for key in COMMON}
    plain = [
        {**common, **_place_of(key, common["shards"]), **plain_part(key, part)}
        for key, part in state.items()
        if key not in COMMON
    ]
    if not plain:
        raise ValueError("the state has no rank's part: it is not the whole state_dict of a wire or reducer")
    return plain


def _place_of(key: object, shards: int) -> dict[str, int]:
    """Whose part it is."""
    rank, _, shard = key.removeprefix("rank ").partition(" of shard ") if isinstance(key, str) else ("", "", "")
    shard = shard or "0"
    numbers = rank.isdecimal() and shard.isdecimal()
    if not numbers or int(shard) >= shards or key != part_key(int(rank), int(shard), shards):
        raise ValueError(f"the state has an unknown part {key!r}: it is not the state_dict of a wire or reducer")
    return {"rank": int(rank), "shard": int(shard)}


def _common(state: Mapping[str, Any], key: str) -> Any:
    """A value that all ranks have in common; a ValueError where it is not there, or is none of its kind."""
    if key not in state:
        raise ValueError(f"the state has no {key!r}: it is not the whole state_dict of a wire or reducer")
    value = state[key]
    if key == "method":
        fits = _is(value, str)
    elif key == "parameters":
        fits = _is(value, tuple) and all(_is_form(row) for row in value)
    elif key == "hierarchy":
        fits = value is None or (_is(value, tuple) and all(_are_numbers(group) for group in value))
    else:
        fits = (_is(value, int) or (_is(value, float) and key == "density_factor")) and 0 <= value < 2**63
        fits = fits and (key != "shards" or value > 0)
    if not fits:
        raise ValueError(f"the state's {key!r} is a {type(value).__name__} of another form: it was changed or damaged")
    return value


def _is(value: object, kind: type) -> bool:
    return type(value) is kind


def _are_numbers(values: object) -> bool:
    return isinstance(values, tuple) and all(_is(value, int) for value in values)


def _is_form(row: object) -> bool:
    """Whether it is a parameter's name, shape and memory order."""
    if not isinstance(row, tuple) or len(row) != 3 or not _is(row[0], str):
        return False
    return _are_numbers(row[1]) and _are_numbers(row[2]) and sorted(row[2]) == list(range(len(row[1])))


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
            f"the state belongs to method {state['method']}, this run uses {own['method']}; "
            f"to go on from it use the state's method{_apart(state['method'], own['method'])}"
        )
    saved, shapes = ({name: shape for name, shape, _ in one["parameters"]} for one in (state, own))
    missing = {"the model does not have": saved.keys() - shapes, "the state does not have": shapes.keys() - saved}
    for whose, names in missing.items():
        if names:
            some, more = ", ".join(map(repr, sorted(names)[:5])), ", ..." if len(names) > 5 else ""
            raise ValueError(f"the state belongs to another model: {whose} {some}{more}")
    for name, shape in shapes.items():
        if saved[name] != shape:
            raise ValueError(
                f"the state belongs to another model: {name!r} is {list(saved[name])} in the state and {list(shape)} "
                "in the model"
            )


def _apart(saved: str, own: str) -> str:
    """The options in which a saved method differs from one of the same name, as they were saved."""
    (name, _, options), (other, _, others) = saved.partition(":"), own.partition(":")
    differ = [option for option in split_items(options) if option not in split_items(others)]
    return f" ({', '.join(differ)})" if name == other and differ else ""


def check_place(state: Mapping[str, Any], terms: Mapping[str, Any]) -> None:
    """Raise when one rank's plain state is not this rank's of this group."""
    for key in ("world_size", "shards", "hierarchy"):
        if state[key] != terms[key]:
            raise ValueError(
                f"the state is of rank {state['rank']} alone and was saved with {key} {state[key]}, this process has "
                f"{key} {terms[key]}; to resume with another group give load_state_dict the list of all ranks' states "
                "or what state_dict(all_ranks=True) gave rank 0, or use load_checkpoint(folder)"
            )
    own, saved = (part_key(one["rank"], one["shard"], one["shards"]) for one in (terms, state))
    if saved != own:
        raise ValueError(
            f"the state is of {saved} alone, and this is {own}, whose residual is not in "
            "it; save one file per rank, or on rank 0 what state_dict(all_ranks=True) gives there when all ranks call "
            "it"
        )


def check_fits(state: Mapping[str, Any], shape: StateShape) -> None:
    """Raise when a plain state has not the form of ``shape``."""
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


def state_for(state: object, terms: Mapping[str, Any], shape: StateShape) -> dict[str, Any]:
    """The plain state that this rank loads from its own saved one, or from the list of all ranks'.

    ``terms`` are the state's common keys as this rank has them. A ValueError where the state does not fit.
    """
    given = unpack(state)
    for one in given:
        check_run(one, terms)
    together = isinstance(state, (list, tuple)) or len(given) != 1 or given[0]["world_size"] * given[0]["shards"] == 1
    if together:
        check_complete(given)
    else:
        check_place(given[0], terms)
    for one in given:
        key = part_key(one["rank"], one["shard"], one["shards"])
        check_contents({key: one[key] for key in COMMON}, key, one)
    is_cut_anew = together and given[0]["shards"] != terms["shards"]
    if is_cut_anew:
        given = joined(given)
    elif together:
        given = [one for one in given if one["shard"] == terms["shard"]]
    given = in_order_of(given, terms["parameters"])
    if is_cut_anew:
        given = [reshard(cut(given, terms["shard"], terms["shards"]), shape.numels, shape.kinds, shape.served)]
    elif together and all(given[0][key] == terms[key] for key in ("world_size", "hierarchy")):
        given = [one for one in given if one["rank"] == terms["rank"]]
    elif together:
        given = [reshard(given, shape.numels, shape.kinds, shape.served)]
    (one,) = given
    check_fits(one, shape)
    kept = without_zeros(one["aggregator"])
    if shape.follows:  # a checkpoint of another group has a share for every rank; here the leader has it
        for room in kept.keys() & {"memory", "collective"}:
            kept[room] = {kind: {} for kind in kept[room]}
    elif not shape.compresses:
        kept = without_servers(kept)
    return {**one, "aggregator": kept}
