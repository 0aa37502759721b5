"""One rank of test_huggingface.py: trainings with transformers.Trainer, with and without the callback."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from digits_net import DRIFTING, METHOD, Net, digest, digits, finish, mean_of_ranks, sgd, values_of
from safetensors.torch import load_file
from transformers import Trainer, TrainerCallback, TrainingArguments

from thinwire.integrations.huggingface import ThinwireCallback

FOLDER, STEPS, SAVED = Path(os.environ["FOLDER"]), 12, 6


class Spy(TrainerCallback):
    """Before the callback in turn: what the ranks have in step SAVED, and what is evaluated then."""

    def __init__(self) -> None:
        self.model, self.mean, self.evaluated = Net(), None, []

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == SAVED:
            self.mean = mean_of_ranks(values_of(more["model"]))

    def on_prediction_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == SAVED:
            self.evaluated.append(values_of(more["model"]))


class Interruption(TrainerCallback):
    """Ctrl-C in step 3, once."""

    def __init__(self) -> None:
        self.comes = True

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if self.comes and state.global_step == 3:
            self.comes = False
            raise KeyboardInterrupt


def trainer_for(name: str, *callbacks: TrainerCallback, model: Net | None = None, **more: Any) -> Trainer:
    model = model or Net()
    args = TrainingArguments(
        output_dir=str(FOLDER / name), max_steps=STEPS, save_steps=SAVED, eval_steps=SAVED, eval_strategy="steps",
        per_device_train_batch_size=8, gradient_accumulation_steps=2, use_cpu=True, report_to=[], disable_tqdm=True,
        logging_steps=STEPS, save_strategy="steps", lr_scheduler_type="constant", seed=3,
        **{"max_grad_norm": 0.0, **more},
    )  # fmt: skip
    data = digits()
    return Trainer(
        model, args, train_dataset=data, eval_dataset=data[:64], optimizers=(sgd(model), None), callbacks=[*callbacks]
    )


def trained(name: str, *callbacks: TrainerCallback, resume: str | None = None, **more: Any) -> dict[str, Any]:
    trainer = trainer_for(name, *callbacks, **more)
    trainer.train(resume_from_checkpoint=resume)
    loss, clips = trainer.evaluate()["eval_loss"], trainer.args.max_grad_norm
    return {"loss": loss, "digest": digest(trainer.model), "clips": clips}


def unlucky() -> dict[str, Any]:
    """Two Trainers of one model, a training that is broken off and begun anew, and the best model at the end."""
    found: dict[str, Any] = {}
    first = trainer_for("first", ThinwireCallback(METHOD))
    first.train()
    callback = ThinwireCallback(METHOD)
    second = trainer_for("second", callback, model=first.model)
    second.train()
    assert callback.wire is not None
    found["the second trainer's"] = callback.wire.model is second.model_wrapped and callback.wire.stats.steps == STEPS

    again = ThinwireCallback(METHOD)
    broken = trainer_for("broken", again, Interruption(), max_grad_norm=0.5)
    try:
        broken.train()
    except KeyboardInterrupt:
        found["interrupted"] = True
    broken.train()
    assert again.wire is not None
    found["begun anew"] = again.wire.stats.steps == STEPS and again.wire.method.clip_norm == 0.5
    found["clipping is back"] = broken.args.max_grad_norm == 0.5

    best = trainer_for(
        "best", ThinwireCallback(DRIFTING), load_best_model_at_end=True, metric_for_best_model="loss",
        greater_is_better=True,
    )  # fmt: skip  # the worst one, which is not the last one
    best.train()
    saved = Net()
    saved.load_state_dict(load_file(Path(best.state.best_model_checkpoint) / "model.safetensors"))
    found["the best is kept"] = digest(saved) == digest(best.model)
    found["the best"] = Path(best.state.best_model_checkpoint).name
    return found


def main() -> None:
    found: dict[str, Any] = {"plain": trained("plain")}
    whole = ThinwireCallback(METHOD)
    found["whole"] = trained("whole", whole)
    assert whole.wire is not None
    found["stats"] = whole.wire.stats.to_dict()
    found["resumed"] = trained("whole", ThinwireCallback(METHOD), resume=str(FOLDER / "whole" / f"checkpoint-{SAVED}"))
    if dist.get_world_size() > 2:
        return finish(found)
    clipped = ThinwireCallback(METHOD)
    found["clipped"] = trained("clipped", clipped, max_grad_norm=0.5)
    assert clipped.wire is not None
    found["clip_norm"] = clipped.wire.method.clip_norm
    try:
        trained("plain", ThinwireCallback(METHOD), resume=str(FOLDER / "plain" / f"checkpoint-{SAVED}"))
    except ValueError as error:
        found["told"] = str(error)
    begun = ThinwireCallback(METHOD, resume=False)
    trained("plain", begun, resume=str(FOLDER / "plain" / f"checkpoint-{SAVED}"))
    assert begun.wire is not None
    found["begun at"] = begun.wire.stats.steps

    found |= unlucky()
    spy = Spy()
    found["drifting"] = trained("drifting", spy, ThinwireCallback(DRIFTING))
    saved = load_file(FOLDER / "drifting" / f"checkpoint-{SAVED}" / "model.safetensors")
    spy.model.load_state_dict(saved)
    found["saved is mean"] = bool((values_of(spy.model) - spy.mean).abs().max() < 1e-6)
    found["evaluated is mean"] = all(bool((values - spy.mean).abs().max() < 1e-6) for values in spy.evaluated)
    found["evaluations"] = len(spy.evaluated)
    finish(found)


if __name__ == "__main__":
    main()
