"""Hugging Face: a callback for transformers.Trainer.

trainer = Trainer(model, args, train_dataset=data, callbacks=[ThinwireCallback("dgc")])
"""

from __future__ import annotations

import gc
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback

from thinwire.attach import attach
from thinwire.edges.wire import Wire
from thinwire.integrations.trainer_clipping import takes_clipping
from thinwire.methods import Method
from thinwire.torch_private import uncompiled

FOLDER = "thinwire"  # inside a checkpoint's


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
        self._max_grad_norm = 0.0
        self._showing_mean = ExitStack()

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: nn.Module, optimizer: Any, **_: Any
    ) -> None:
        steps = max(1, round(state.max_steps / max(1, state.num_train_epochs)))
        given = {"scaler": getattr(optimizer, "scaler", None), "steps_per_epoch": steps, **self.options}
        self.wire = attach(ddp_around(model), optimizer, self.method, **given)
        self._max_grad_norm = args.max_grad_norm
        if takes_clipping(self.wire, args.max_grad_norm):
            args.max_grad_norm = 0.0  # the Trainer reads it at every step
        if state.global_step and self.resume is not False:
            self._load(args, state)

    def _load(self, args: Any, state: Any) -> None:
        assert self.wire is not None
        own = Path(args.output_dir, f"checkpoint-{state.global_step}")
        folder = own if self.resume is True else Path(str(self.resume))
        try:
            self.wire.load_checkpoint(folder / FOLDER)
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
        if self.wire is not None and self.wire.stats.world_size > 1:
            folder = Path(args.output_dir, f"checkpoint-{state.global_step}", FOLDER)
            dcp.save({"wire": self.wire}, checkpoint_id=folder)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._showing_mean.close()
        args.max_grad_norm = self._max_grad_norm
        if self.wire is not None:
            self.wire.detach()


def ddp_around(model: nn.Module) -> nn.Module:
    """The DistributedDataParallel that wraps a model, or the model: a Trainer hands its callbacks the bare one."""
    model = uncompiled(model)
    around = [one for one in gc.get_objects() if type(one) is DistributedDataParallel and one.module is model]
    return around[-1] if around else model
