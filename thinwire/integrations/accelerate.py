"""Accelerate: one call behind accelerator.prepare.

model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
wire = attach(accelerator, model, optimizer, "dgc")
"""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from torch import nn

from thinwire.attach import attach as attach_model
from thinwire.edges.wire import Wire
from thinwire.methods import Method


def attach(
    accelerator: Accelerator, model: nn.Module, optimizer: Any, method: Method | str | None = None, **options: Any
) -> Wire:
    """``thinwire.attach`` for what ``accelerator.prepare`` gave back; the other arguments are its own.

    The accelerator's GradScaler is used, and ``save_state`` and ``load_state`` keep all ranks' state in their folder,
    for any number of ranks. Where local gradients let ranks drift apart, the model that ``save_state`` writes is their
    mean. Threshold of ``accelerator.clip_grad_norm_``: give it to the method, as ``clip_norm``.
    """
    wire = attach_model(model, optimizer, method, **{"scaler": accelerator.scaler, **options})
    accelerator.register_for_checkpointing(_StateOfAllRanks(wire))

    def save_mean(models: list[nn.Module], weights: list[dict[str, Any]], folder: str) -> None:
        if wire.attached and wire.method.replicas_drift:
            bare = accelerator.unwrap_model(model)
            place = next(place for place, one in enumerate(models) if accelerator.unwrap_model(one) is bare)
            with wire.averaged():
                saved = accelerator.get_state_dict(models[place])
                weights[place] = {name: value.clone() for name, value in saved.items()}

    accelerator.register_save_state_pre_hook(save_mean)
    return wire


class _StateOfAllRanks:
    """What the accelerator saves on its first process: the state of all ranks."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def state_dict(self) -> dict[str, Any]:
        return self._wire.state_dict(all_ranks=True)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._wire.load_state_dict(state)
