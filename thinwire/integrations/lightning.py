"""Lightning: a callback for lightning.pytorch.Trainer.

trainer = Trainer(strategy="ddp", devices=4, callbacks=[ThinwireCallback("dgc")])
"""

from __future__ import annotations

import logging
import math
from contextlib import ExitStack
from functools import partial
from typing import Any

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback

from thinwire.attach import attach
from thinwire.edges.no_process_group import WireAlone
from thinwire.edges.wire import Wire
from thinwire.integrations.saving import NOTHING_SAVED, mean_state
from thinwire.integrations.trainer_clipping import takes_clipping
from thinwire.methods import Method

log = logging.getLogger("thinwire")

KEY = "thinwire"  # in a checkpoint


class ThinwireCallback(Callback):
    """Compresses the gradients of a Trainer with strategy="ddp"; ``method`` and ``options`` are those of
    ``thinwire.attach``.

    ``gradient_clip_val`` becomes the method's ``clip_norm`` where it has one. A checkpoint holds the state of all
    ranks, and is resumed with any number of them; ``resume=False`` leaves that state out. Where local gradients let
    ranks drift apart, what is validated and saved is their mean. ``wire`` is the wire of this training.
    """

    def __init__(self, method: Method | str | None = None, *, resume: bool = True, **options: Any) -> None:
        self.method, self.resume, self.options = method, resume, options
        self.wire: Wire | None = None
        self._resumed: dict[str, Any] | None = None  # the checkpoint that a fit goes on from
        self._of_training = ExitStack()  # puts back what was changed in the trainer
        self._showing_mean = ExitStack()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._end(of_own_accord=False)  # a training that was broken off
        batches = trainer.num_training_batches  # infinite where a loader has no length
        steps = max(1, int(batches) // trainer.accumulate_grad_batches) if math.isfinite(batches) else None
        given = {"scaler": trainer.scaler, "steps_per_epoch": steps, **self.options}
        wire = self.wire = attach(trainer.model, trainer.optimizers, self.method, **given)
        strategy, clip_val = trainer.strategy, trainer.gradient_clip_val
        if trainer.gradient_clip_algorithm in (None, "norm") and takes_clipping(wire, clip_val):
            trainer.gradient_clip_val = None
            self._of_training.callback(setattr, trainer, "gradient_clip_val", clip_val)
        if wire.method.replicas_drift:  # the only place through which every checkpoint's weights come
            strategy.lightning_module_state_dict = partial(mean_state, wire, strategy.lightning_module_state_dict)
            self._of_training.callback(delattr, strategy, "lightning_module_state_dict")
        self._load(wire)

    def _load(self, wire: Wire) -> None:
        resumed, self._resumed = self._resumed, None
        if resumed is None or not self.resume:
            return
        if KEY not in resumed:
            log.warning(NOTHING_SAVED)
            return
        try:
            wire.load_state_dict(resumed[KEY])
        except ValueError as error:
            raise ValueError(f"{error}; or leave it out: ThinwireCallback(resume=False)") from error

    def _end(self, of_own_accord: bool) -> None:
        self._showing_mean.close()
        self._of_training.close()
        if self.wire is not None and self.wire.attached:
            if of_own_accord:
                self.wire.detach()
            else:  # other ranks may not come
                self.wire.abandon()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if self.wire is not None and self.wire.attached:
            self._showing_mean.enter_context(self.wire.averaged())

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._showing_mean.close()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if self.wire is not None and self.wire.attached and not isinstance(self.wire, WireAlone):
            checkpoint[KEY] = self.wire.state_dict(all_ranks=True)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        fits = trainer.state.fn is not None and trainer.state.fn.value == "fit"  # validate and test load them, too
        self._resumed = {key: checkpoint[key] for key in (KEY,) if key in checkpoint} if fits else None

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self._end(of_own_accord=True)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._end(of_own_accord=False)
