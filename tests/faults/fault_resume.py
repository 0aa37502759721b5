"""Run an elastic script and print, at every resume, whether what was not sent is still all there; see faults.py scale.

fault_resume.py SCRIPT ...: a line "CONSERVED {...}" a resume, with the old and new number of workers and the largest
difference between the group's mean of all residuals before and after, relative to the largest residual.
"""

from __future__ import annotations

import json
import runpy
import sys
from typing import Any

import torch
import torch.distributed as dist

import thinwire


def kept(states: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """What a group has not applied yet, by parameter: the mean of the ranks' residuals plus the servers' errors."""
    total: dict[str, torch.Tensor] = {}
    rooms = [part["aggregator"] for state in states for key, part in state.items() if key.startswith("rank ")]
    for room in rooms:
        for name, residual in room.get("memory", {}).get("residual", {}).items():
            total[name] = total.get(name, torch.zeros(residual.numel(), dtype=torch.float64)) + residual / len(states)
    for room in rooms:
        served = room.get("collective") or {}
        starts = dict(served.get("starts", ()))
        for name, error in served.get("residual", {}).items():
            start = starts.get(name, 0)  # of zeros where nothing was served yet
            total[name][start : start + error.numel()] += error
    return total


def watch() -> None:
    """Let every load of all ranks' states compare before with after."""
    load = thinwire.Wire.load_state_dict

    def load_and_compare(wire: thinwire.Wire, states: Any) -> None:
        load(wire, states)
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, wire.state_dict())
        before, after = kept(states), kept(everybody)
        assert before.keys() == after.keys()
        largest = max((float(tensor.abs().max()) for tensor in before.values()), default=0.0)
        off = max((float((after[name] - before[name]).abs().max()) for name in before), default=0.0)
        if dist.get_rank() == 0:
            told = {"before": len(states), "after": len(everybody), "step": states[0]["step"], "largest": largest}
            print(
                "CONSERVED " + json.dumps({**told, "relative_difference": off / largest if largest else 0.0}),
                flush=True,
            )

    thinwire.Wire.load_state_dict = load_and_compare  # type: ignore[method-assign]


if __name__ == "__main__":
    watch()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
