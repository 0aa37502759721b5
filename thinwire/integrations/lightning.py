"""Lightning: a callback for lightning.pytorch.Trainer.

trainer = Trainer(strategy="ddp", devices=4, callbacks=[ThinwireCallback("dgc")])
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback

from thinwire.attach import attach
from thinwire.edges.wire import Wire
from thinwire.integrations.trainer_clipping import takes_clipping
from thinwire.methods import Method

KEY = "thinwire"  # in a checkpoint


class ThinwireCallback(Callback):
    """Compresses the gradients of a Trainer with strategy="ddp"; ``method`` and ``options`` are those of
    ``thinwire.attach``.

    ``gradient_clip_val`` becomes the method's ``clip_norm`` where it has one. A checkpoint holds the state of all
    ranks, and is resumed with any number of them. Where local gradients let ranks drift apart, what is validated and
    saved is their mean. ``wire`` is the wire of this training.
    """

    def __init__(self, method: Method | str | None = None, **options: Any) -> None:
        self.method, self.options = method, options
        self.wire: Wire | None = None
        self._loaded: dict[str, Any] | None = None
        self._clip_val: float | None = None
        self._showing_mean = ExitStack()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        batches = trainer.num_training_batches  # infinite where a loader has no length
        steps = max(1, int(batches) // trainer.accumulate_grad_batches) if math.isfinite(batches) else None
        given = {"scaler": trainer.scaler, "steps_per_epoch": steps, **self.options}
        self.wire = attach(trainer.model, trainer.optimizers, self.method, **given)
        self._clip_val = trainer.gradient_clip_val
        by_norm = trainer.gradient_clip_algorithm in (None, "norm")
        if by_norm and takes_clipping(self.wire, trainer.gradient_clip_val):
            trainer.gradient_clip_val = None
        if self._loaded is not None:
            self.wire.load_state_dict(self._loaded)
            self._loaded = None

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if self.wire is not None and self.wire.attached:
            self._showing_mean.enter_context(self.wire.averaged())

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._showing_mean.close()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if self.wire is None or not self.wire.attached:
            return
        checkpoint[KEY] = self.wire.state_dict(all_ranks=True)
        if self.wire.method.replicas_drift and not self.wire.reducer.shows_mean:
            with self.wire.averaged():
                saved = trainer.strategy.lightning_module_state_dict()
                checkpoint["state_dict"] = {name: value.clone() for name, value in saved.items()}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self._loaded = checkpoint.get(KEY)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.gradient_clip_val = self._clip_val
        if self.wire is not None:
            self.wire.detach()
