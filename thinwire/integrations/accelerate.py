"""Accelerate: one call behind accelerator.prepare.

model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
wire = attach(accelerator, model, optimizer, "dgc")
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

from accelerate import Accelerator
from torch import nn

from thinwire.attach import attach as attach_model
from thinwire.edges.wire import Wire
from thinwire.integrations.saving import NOTHING_SAVED, mean_state
from thinwire.methods import Method

log = logging.getLogger("thinwire")


def attach(
    accelerator: Accelerator, model: nn.Module, optimizer: Any, method: Method | str | None = None, **options: Any
) -> Wire:
    """``thinwire.attach`` for what ``accelerator.prepare`` gave back; the other arguments are its own.

    The accelerator's GradScaler is used, and ``save_state`` and ``load_state`` keep all ranks' state in their folder,
    for any number of ranks. Where local gradients let ranks drift apart, the model that ``save_state`` writes is their
    mean. Threshold of ``accelerator.clip_grad_norm_``: give it to the method, as ``clip_norm``.
    """
    wire = attach_model(model, optimizer, method, **{"scaler": accelerator.scaler, **options})
    bare = accelerator.unwrap_model(model)
    registered = _registered.setdefault(accelerator, [])
    for earlier in registered:
        if earlier.model is bare:  # attached again; an accelerator lets go of nothing
            earlier.wire = wire
            return wire
    saved = _StateOfAllRanks(bare, wire)
    registered.append(saved)
    accelerator.register_for_checkpointing(saved)

    def save_mean(models: list[nn.Module], weights: list[Any], folder: str) -> None:
        place = next(place for place, one in enumerate(models) if accelerator.unwrap_model(one) is bare)
        if saved.wire.attached and saved.wire.method.replicas_drift:
            weights[place] = mean_state(saved.wire, lambda: accelerator.get_state_dict(models[place]))

    accelerator.register_save_state_pre_hook(save_mean)
    return wire


class _StateOfAllRanks:
    """What the accelerator saves on its first process: the state of all ranks; nothing where none is attached."""

    def __init__(self, model: nn.Module, wire: Wire) -> None:
        self.model, self.wire = model, wire

    def state_dict(self) -> dict[str, Any]:
        return self.wire.state_dict(all_ranks=True) if self.wire.attached else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not self.wire.attached:
            return  # a model that is evaluated
        if state:
            self.wire.load_state_dict(state)
        else:  # the model was detached when it was saved
            log.warning(NOTHING_SAVED)


_registered: weakref.WeakKeyDictionary[Accelerator, list[_StateOfAllRanks]] = weakref.WeakKeyDictionary()
