"""A checkpoint of N ranks for a group of M: residuals are redistributed, none of their mass is lost.

What the group has not applied yet is the mean of the ranks' residuals plus the servers' errors. Every new rank
therefore gets the mean of the old ranks' vectors, where their kind says nothing else (``StateKind.reshard``), and the
servers' errors are put together and cut anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.engine.named_state import RESIDUAL, StateKind

Vectors = dict[str, Tensor]


def check_complete(states: Sequence[Mapping[str, Any]]) -> None:
    """Raise unless these are the states of all ranks of one run, at one step."""
    if not states:
        raise ValueError("there is no state to load: give one rank's state_dict or a list of all ranks'")
    size, shards = states[0]["world_size"], states[0]["shards"]
    for shard in range(shards):
        ranks = sorted(state["rank"] for state in states if state["shard"] == shard)
        if ranks != list(range(size)):
            of = f" of shard {shard}" if shards > 1 else ""
            raise ValueError(f"states of ranks {ranks}{of} were given, the run had the ranks 0 to {size - 1}")
    for key in (
        "method", "step", "optimizer_steps", "density_factor", "world_size", "shards", "hierarchy", "parameters"
    ):  # fmt: skip
        values = {state[key] for state in states}
        if len(values) > 1:
            differ = f" ({', '.join(sorted(map(str, values)))})" if key != "parameters" else ""
            raise ValueError(f"the states differ in {key}{differ}: not of one moment")


def reshard(
    states: Sequence[Mapping[str, Any]],
    numels: Mapping[str, int],
    kinds: Mapping[str, Mapping[str, StateKind]],
    served: Mapping[str, tuple[int, int]],
) -> dict[str, Any]:
    """Return the state of one rank of a new group.

    ``numels`` are the model's parameters in order, ``kinds`` those of the method's vectors, by room; ``served`` are the
    elements that the new rank serves, by parameter.
    """
    ordered = sorted(states, key=lambda state: state["rank"])
    first = ordered[0]
    # With a hierarchy the machines' first ranks alone hold what counts.
    groups = first["hierarchy"]
    leaders = {min(group) for group in groups} if groups else {state["rank"] for state in states}
    holders = [state["aggregator"] for state in ordered if state["rank"] in leaders]
    aggregator = dict(first["aggregator"])
    if "memory" in aggregator:
        declared = kinds.get("memory", {})
        aggregator["memory"] = {
            kind: _redistributed([holder["memory"][kind] for holder in holders], declared.get(kind, RESIDUAL))
            for kind in holders[0]["memory"]
        }
    if aggregator.get("collective"):
        aggregator["collective"] = _cut_servers(ordered, numels, kinds.get("collective", {}), served)
    pending = _redistributed([state["pending"] for state in ordered], RESIDUAL)
    return {**first, "pending": pending, "aggregator": aggregator}


def _redistributed(rooms: list[dict[str, Any]], kind: StateKind) -> dict[str, Any]:
    """Vectors by name: the first ones, or their mean, where a rank without one counts as zero; of numbers the first."""
    result: dict[str, Any] = {}
    for name in {name: None for room in rooms for name in room}:
        values = [room[name] for room in rooms if name in room]
        if kind.reshard == "mean" and isinstance(values[0], Tensor):
            total = torch.stack([value.double() for value in values]).sum(dim=0)
            result[name] = (total / len(rooms)).to(torch.float32)
        else:
            result[name] = values[0]
    return result


def _cut_servers(
    states: Sequence[Mapping[str, Any]],
    numels: Mapping[str, int],
    kinds: Mapping[str, StateKind],
    served: Mapping[str, tuple[int, int]],
) -> dict[str, Any]:
    """Put the servers' vectors together, parameter by parameter, and cut out what the new rank serves."""
    rooms = [state["aggregator"].get("collective") or {} for state in states]
    rates: dict[str, float] = {}
    for room in rooms:
        rates.update(room.get("rates", {}))
    cut: dict[str, Any] = {}
    for kind in kinds:
        whole: Vectors = {}
        for room in rooms:
            starts = room.get("starts", {})
            for name, part in room.get(kind, {}).items():
                if name in starts:  # else nothing was served yet
                    vector = whole.setdefault(name, torch.zeros(numels[name], dtype=torch.float32))
                    vector[starts[name] : starts[name] + part.numel()] = part.cpu()
        cut[kind] = {name: whole[name][start:stop].clone() for name, (start, stop) in served.items() if name in whole}
    names = {name for vectors in cut.values() for name in vectors}
    return {
        **cut,
        "rates": {name: rate for name, rate in rates.items() if name in names},
        "starts": {name: start for name, (start, _) in served.items() if name in names},
    }


def without_servers(aggregator: Mapping[str, Any]) -> dict[str, Any]:
    """One rank's kept state for a net of that rank alone: nobody is served there, so what a server kept of its own
    compression becomes a part of the worker's residual, and is applied with the next step."""
    served = aggregator.get("collective") or {}
    errors: Vectors = served.get("residual", {})
    if not errors:
        return dict(aggregator)
    memory = aggregator["memory"]
    residual, rates = dict(memory["residual"]), dict(memory["rates"])
    for name, error in errors.items():
        there, here = served["rates"].get(name, 0.0), rates.get(name, 0.0)
        scaled = error * (there / here) if there and here else error  # both are in units of the rate they missed
        rates.setdefault(name, there)
        residual[name] = residual[name] + scaled.to(residual[name].device) if name in residual else scaled
    nobody = {**served, "residual": {}, "rates": {}, "starts": {}}
    return {**aggregator, "memory": {**memory, "residual": residual, "rates": rates}, "collective": nobody}
