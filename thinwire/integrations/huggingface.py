"""Hugging Face: a callback for transformers.Trainer.

trainer = Trainer(model, args, train_dataset=data, callbacks=[ThinwireCallback("dgc")])
"""

from __future__ import annotations

import gc
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from transformers import Trainer, TrainerCallback

from thinwire.attach import attach
from thinwire.edges.no_process_group import WireAlone
from thinwire.edges.wire import Wire
from thinwire.integrations.trainer_clipping import takes_clipping
from thinwire.methods import Method

FOLDER = "thinwire"  # inside a checkpoint's
MOVED = "max_grad_norm_of_thinwire"  # what a Trainer's arguments remember while the method clips


class ThinwireCallback(TrainerCallback):
    """Compresses the gradients of a Trainer; ``method`` and ``options`` are those of ``thinwire.attach``.

    ``max_grad_norm`` becomes the method's ``clip_norm`` where it has one. Every rank's state is saved in the folder
    ``thinwire`` of each checkpoint, and resumed with any number of ranks. ``resume`` names the checkpoint to resume
    from where it is not in the Trainer's own output_dir; False resumes a run that began without thinwire. Where local
    gradients let ranks drift apart, what is evaluated and saved is their mean. ``wire`` is the wire of this training.
    """

    def __init__(self, method: Method | str | None = None, *, resume: str | bool = True, **options: Any) -> None:
        self.method, self.resume, self.options = method, resume, options
        self.wire: Wire | None = None
        self._showing_mean = ExitStack()

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: nn.Module, optimizer: Any, **_: Any
    ) -> None:
        self._showing_mean.close()
        if self.wire is not None:
            self.wire.abandon()  # of a training that was broken off
        _give_clipping_back(args)
        steps = max(1, round(state.max_steps / max(1, state.num_train_epochs)))
        given = {"scaler": getattr(optimizer, "scaler", None), "steps_per_epoch": steps, **self.options}
        self.wire = attach(trainer_of(state).model_wrapped, optimizer, self.method, **given)
        if takes_clipping(self.wire, args.max_grad_norm):
            setattr(args, MOVED, args.max_grad_norm)
            args.max_grad_norm = 0.0  # the Trainer reads it at every step
        if state.global_step and self.resume is not False:
            self._load(self.wire, args, state)

    def _load(self, wire: Wire, args: Any, state: Any) -> None:
        own = Path(args.output_dir, f"checkpoint-{state.global_step}")
        folder = (own if self.resume is True else Path(str(self.resume))) / FOLDER
        if isinstance(wire, WireAlone) and not folder.exists():
            return  # nothing was kept
        try:
            wire.load_checkpoint(folder)
        except ValueError as error:
            raise ValueError(
                f"{error}; ThinwireCallback(resume='CHECKPOINT') names another checkpoint, resume=False goes on from "
                "one that was saved without thinwire"
            ) from error

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.wire is not None and (control.should_evaluate or control.should_save):
            self._showing_mean.close()
            self._showing_mean.enter_context(self.wire.averaged())

    on_epoch_end = on_step_end

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._showing_mean.close()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.wire is not None and not isinstance(self.wire, WireAlone):
            folder = Path(args.output_dir, f"checkpoint-{state.global_step}", FOLDER)
            dcp.save({"wire": self.wire}, checkpoint_id=folder)

    def on_train_end(self, args: Any, state: Any, control: Any, *, model: nn.Module, **_: Any) -> None:
        # load_best_model_at_end has loaded it by now, which neither the ranks' own parameters nor their mean replace.
        is_best = args.load_best_model_at_end and state.best_model_checkpoint is not None
        best = [parameter.detach().clone() for parameter in model.parameters()] if is_best else []
        self._showing_mean.close()
        _give_clipping_back(args)
        if self.wire is not None:
            self.wire.detach()
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), best, strict=False):
                parameter.copy_(value)


def _give_clipping_back(args: Any) -> None:
    if hasattr(args, MOVED):
        args.max_grad_norm = getattr(args, MOVED)
        delattr(args, MOVED)


def trainer_of(state: Any) -> Trainer:
    """The Trainer of this state: callbacks are given the bare model, and the Trainer alone has the wrapped one."""
    for one in gc.get_objects():
        if issubclass(type(one), Trainer) and vars(one).get("state") is state:
            return one
    raise ValueError("ThinwireCallback finds no transformers.Trainer with this state; give it to one, as a callback")
