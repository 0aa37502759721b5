"""A checkpoint of N ranks for a group of M: residuals are redistributed, none of their mass is lost.

What the group has not applied yet is the mean of the ranks' residuals plus the servers' errors. Every new rank
therefore gets the mean of the old ranks' vectors, and the servers' errors are put together and cut anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.collectives.shards import bounds
from thinwire.engine.layout import Segment

Vectors = dict[str, Tensor]


def check_complete(states: Sequence[Mapping[str, Any]]) -> None:
    """Raise unless these are the states of all ranks of one run, at one step."""
    if not states:
        raise ValueError("there is no state to load: give one rank's state_dict or a list of all ranks'")
    size = states[0].get("world_size")
    ranks = sorted(state.get("rank", -1) for state in states)
    if ranks != list(range(size or 0)):
        raise ValueError(f"states of ranks {ranks} were given, the run had the ranks 0 to {(size or 0) - 1}")
    for key in ("method", "step", "optimizer_steps", "density_factor", "world_size"):
        values = {state[key] for state in states}
        if len(values) > 1:
            raise ValueError(f"the states differ in {key} ({', '.join(map(str, sorted(values)))}): not of one moment")


def reshard(
    states: Sequence[Mapping[str, Any]], numels: Mapping[str, int], topology: str | None, rank: int, size: int
) -> dict[str, Any]:
    """Return the state of one of ``size`` ranks; ``numels`` are the model's parameters in order."""
    first = min(states, key=lambda state: state["rank"])
    # With a hierarchy the machines' first ranks alone hold what counts.
    groups = first["hierarchy"]
    leaders = {min(group) for group in groups} if groups else {state["rank"] for state in states}
    holders = [state["aggregator"] for state in states if state["rank"] in leaders]
    aggregator = dict(first["aggregator"])
    if "memory" in aggregator:
        aggregator["memory"] = {
            kind: _mean_or_first([h["memory"][kind] for h in holders]) for kind in holders[0]["memory"]
        }
    if aggregator.get("collective"):
        aggregator["collective"] = _cut_servers(states, numels, topology or "sharded", rank, size)
    pending = _mean_or_first([state["pending"] for state in states])
    return {**first, "rank": rank, "world_size": size, "pending": pending, "aggregator": aggregator}


def _mean_or_first(rooms: list[dict[str, Any]]) -> dict[str, Any]:
    """The mean of vectors by name, where a rank without one counts as zero; of plain numbers, the first."""
    result: dict[str, Any] = {}
    for name in {name: None for room in rooms for name in room}:
        values = [room[name] for room in rooms if name in room]
        if isinstance(values[0], Tensor):
            total = torch.stack([value.double() for value in values]).sum(dim=0)
            result[name] = (total / len(rooms)).to(torch.float32)
        else:
            result[name] = values[0]
    return result


def _cut_servers(
    states: Sequence[Mapping[str, Any]], numels: Mapping[str, int], topology: str, rank: int, size: int
) -> dict[str, Any]:
    """Put the servers' errors together, parameter by parameter, and cut out what the new rank serves."""
    whole = {name: torch.zeros(numel, dtype=torch.float32) for name, numel in numels.items()}
    rates: dict[str, float] = {}
    was_served: set[str] = set()
    for state in states:
        served = state["aggregator"].get("collective") or {}
        rates.update(served.get("rates", {}))
        starts = served.get("starts", {})
        for name, error in served.get("residual", {}).items():
            if name in starts:  # else nothing was served yet
                whole[name][starts[name] : starts[name] + error.numel()] = error.cpu()
                was_served.add(name)
    residual, first = {}, {}
    for name, (start, stop) in served_by(numels, rank, size, topology).items():
        if name in was_served:
            residual[name], first[name] = whole[name][start:stop].clone(), start
    return {"residual": residual, "rates": {n: r for n, r in rates.items() if n in residual}, "starts": first}


def served_by(numels: Mapping[str, int], rank: int, size: int, topology: str) -> dict[str, tuple[int, int]]:
    """Return what a rank serves: first element and end of its part of each parameter of which it serves any."""
    if rank < 0:  # a rank that stands behind its machine's first serves nothing
        return {}
    parts = {
        name: bounds(Segment(name, ordinal, numel, 0, True), rank, size, topology)
        for ordinal, (name, numel) in enumerate(numels.items())
    }
    return {name: (start, stop) for name, (start, stop) in parts.items() if stop > start}


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
