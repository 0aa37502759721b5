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


def trained(name: str, *callbacks: TrainerCallback, resume: str | None = None, **more: Any) -> dict[str, Any]:
    model = Net()
    args = TrainingArguments(
        output_dir=str(FOLDER / name), max_steps=STEPS, save_steps=SAVED, eval_steps=SAVED, eval_strategy="steps",
        per_device_train_batch_size=8, gradient_accumulation_steps=2, use_cpu=True, report_to=[], disable_tqdm=True,
        logging_steps=STEPS, save_strategy="steps", lr_scheduler_type="constant", seed=3,
        **{"max_grad_norm": 0.0, **more},
    )  # fmt: skip
    data = digits()
    trainer = Trainer(
        model, args, train_dataset=data, eval_dataset=data[:64], optimizers=(sgd(model), None), callbacks=[*callbacks]
    )
    trainer.train(resume_from_checkpoint=resume)
    return {"loss": trainer.evaluate()["eval_loss"], "digest": digest(model), "clips": args.max_grad_norm}


def main() -> None:
    found: dict[str, Any] = {"plain": trained("plain")}
    whole = ThinwireCallback(METHOD)
    found["whole"] = trained("whole", whole)
    assert whole.wire is not None
    found["stats"] = whole.wire.stats.to_dict()
    found["resumed"] = trained("whole", ThinwireCallback(METHOD), resume=str(FOLDER / "whole" / f"checkpoint-{SAVED}"))
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

    spy = Spy()
    found["drifting"] = trained("drifting", spy, ThinwireCallback(DRIFTING))
    saved = load_file(FOLDER / "drifting" / f"checkpoint-{SAVED}" / "model.safetensors")
    spy.model.load_state_dict(saved)
    found["saved is mean"] = bool((values_of(spy.model) - spy.mean).abs().max() < 1e-6)
    found["evaluated is mean"] = all(bool((values - spy.mean).abs().max() < 1e-6) for values in spy.evaluated)
    found["evaluations"] = len(spy.evaluated)
    dist.barrier()
    finish(found)


if __name__ == "__main__":
    main()
