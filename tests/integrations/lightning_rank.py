"""One rank of test_lightning.py: trainings with lightning.pytorch.Trainer, with and without the callback."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from digits_net import DRIFTING, METHOD, Net, digest, digits, everybody, finish, mean_of_ranks, sgd, values_of
from torch.utils.data import DataLoader

from thinwire.integrations.lightning import ThinwireCallback

warnings.filterwarnings("ignore", module="lightning")
FOLDER, STEPS, SAVED = Path(os.environ["FOLDER"]), 12, 6


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        return self.net(**batch)["loss"]

    def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> None:
        self.log("loss", self.net(**batch)["loss"], sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self)


class Spy(pl.Callback):
    """Before the callback in turn: what the ranks have after a training batch, and what is validated then."""

    def __init__(self) -> None:
        self.mean, self.validated = torch.zeros(()), list[bool]()

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.mean = mean_of_ranks(values_of(module))

    def on_validation_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step:
            self.validated.append(bool((values_of(module) - self.mean).abs().max() < 1e-6))


def trained(
    name: str,
    *callbacks: pl.Callback,
    resume: Path | None = None,
    validated: Path | None = None,
    weights_only: bool = False,
    **more: Any,
) -> dict[str, Any]:
    # Lightning begins an interrupted epoch anew, so a checkpoint is to be at the end of one.
    module, data = Module(), digits(SAVED * 2 * 8 * int(os.environ.get("WORLD_SIZE", "1")))
    saving = pl.callbacks.ModelCheckpoint(
        FOLDER / name, "{step}", every_n_train_steps=SAVED, save_top_k=-1, save_weights_only=weights_only
    )
    trainer = pl.Trainer(
        accelerator="cpu", devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        accumulate_grad_batches=2, val_check_interval=4, check_val_every_n_epoch=None, limit_val_batches=1,
        callbacks=[*callbacks, saving], logger=False, enable_progress_bar=False, enable_model_summary=False,
        **{"max_steps": STEPS, "strategy": "ddp", **more},
    )  # fmt: skip
    loader = DataLoader(data, batch_size=8, shuffle=False)
    if validated:
        trainer.validate(module, DataLoader(data[:64], batch_size=64), ckpt_path=validated, verbose=False)
    trainer.fit(module, loader, DataLoader(data[:64], batch_size=64), ckpt_path=resume)
    return {
        "loss": float(trainer.callback_metrics["loss"]),
        "digest": digest(module),
        "clips": trainer.gradient_clip_val,
    }


def main() -> None:
    found: dict[str, Any] = {"plain": trained("plain")}
    whole = ThinwireCallback(METHOD)
    found["whole"] = trained("whole", whole)
    assert whole.wire is not None
    found["stats"] = whole.wire.stats.to_dict()
    found["resumed"] = trained("whole", ThinwireCallback(METHOD), resume=FOLDER / "whole" / f"step={SAVED}.ckpt")
    if int(os.environ["WORLD_SIZE"]) > 2:
        return finish(found)
    clipped = ThinwireCallback(METHOD)
    found["clipped"] = trained("clipped", clipped, gradient_clip_val=0.5)
    assert clipped.wire is not None
    found["clip_norm"] = clipped.wire.method.clip_norm
    begun = ThinwireCallback(METHOD)
    trained("plain", begun, resume=FOLDER / "plain" / f"step={SAVED}.ckpt")
    assert begun.wire is not None
    found["begun at"] = begun.wire.stats.steps

    spy = Spy()
    found["drifting"] = trained("drifting", spy, ThinwireCallback(DRIFTING))
    found["validated is mean"] = spy.validated
    saved = torch.load(FOLDER / "drifting" / f"step={STEPS}.ckpt", weights_only=False)["state_dict"]
    module = Module()
    module.load_state_dict(saved)
    found["saved is mean"] = bool((values_of(module) - spy.mean).abs().max() < 1e-6)
    found["saved alike"] = len(set(everybody(digest(module)))) == 1
    found |= unlucky()
    finish(found)


def unlucky() -> dict[str, Any]:
    """Weights alone that are saved while ranks drift, and a checkpoint that was validated before another training."""
    found: dict[str, Any] = {}
    spy = Spy()
    trained("weights", spy, ThinwireCallback(DRIFTING), weights_only=True, max_steps=SAVED)
    module = Module()
    module.load_state_dict(torch.load(FOLDER / "weights" / f"step={SAVED}.ckpt", weights_only=False)["state_dict"])
    found["weights are mean"] = bool((values_of(module) - spy.mean).abs().max() < 1e-6)

    callback = ThinwireCallback("dgc:density=0.2,dense_below=64")  # another method than the checkpoint's
    trained("validated", callback, validated=FOLDER / "whole" / f"step={SAVED}.ckpt")
    assert callback.wire is not None
    found["begins anew"] = callback.wire.stats.steps_before == 0 and callback.wire.stats.steps == STEPS
    try:
        trained("other", ThinwireCallback("gtopk"), resume=FOLDER / "whole" / f"step={SAVED}.ckpt")
    except ValueError as error:
        found["told"] = str(error)
    left_out = ThinwireCallback("gtopk", resume=False)
    trained("other", left_out, resume=FOLDER / "whole" / f"step={SAVED}.ckpt")
    assert left_out.wire is not None
    found["left out"] = left_out.wire.stats.steps == STEPS - SAVED
    return found


if __name__ == "__main__":
    main()
