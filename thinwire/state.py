"""What a saved state must look like before anything of it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

STATE_FORMAT = 1


def check_form(state: object) -> None:
    if not isinstance(state, dict) or state.get("format") != STATE_FORMAT:
        raise ValueError("this is not a wire's state_dict, or one of another format version")


def check_fits(state: Mapping[str, Any], own: Mapping[str, Any], numels: Mapping[str, int]) -> None:
    """Raise when a state is not of the method, model and group whose current state is ``own``."""
    _check_keys(own, state)
    if state["method"] != own["method"]:
        raise ValueError(f"the state belongs to method {state['method']}, the wire uses {own['method']}")
    for key in ("world_size", "rank", "hierarchy"):
        if state[key] != own[key]:
            raise ValueError(
                f"the state was saved with {key} {state[key]}, this process has {key} {own[key]}; give load_state_dict "
                "the list of all ranks' states to resume with another group"
            )
    _check_keys(own["aggregator"], state["aggregator"])
    served = state["aggregator"].get("collective", {}).get("starts", {})
    for room, kinds in {"": {"pending": state["pending"]}, **state["aggregator"]}.items():
        for vectors in kinds.values():
            for name, tensor in vectors.items():
                if isinstance(tensor, Tensor):
                    _check_vector(name, tensor, numels, served.get(name, 0) if room == "collective" else None)


def _check_vector(name: str, tensor: Tensor, numels: Mapping[str, int], start: int | None) -> None:
    """Raise when a saved vector is not of the model; a server's begins at ``start`` and may be a part."""
    if name not in numels:
        raise ValueError(f"the state has a parameter {name!r} that the model does not have")
    numel = numels[name]
    if tensor.numel() != numel if start is None else start + tensor.numel() > numel:
        raise ValueError(f"the state has {tensor.numel()} elements for {name!r}, the model has {numel}")


def _check_keys(own: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    for key in own:
        if key not in other:
            raise ValueError(f"the state has no {key!r}: it is not a whole wire's state_dict")
