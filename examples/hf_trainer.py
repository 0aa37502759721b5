"""transformers.Trainer with one added callback. Run it on two processes of this machine:

torchrun --nproc_per_node 2 examples/hf_trainer.py
"""

import os
from importlib import resources

import numpy as np
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from thinwire.integrations.huggingface import ThinwireCallback


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:  # (B, 64) and (B,)
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def main() -> None:
    with resources.files("thinwire").joinpath("lab/data/digits.npz").open("rb") as file, np.load(file) as arrays:
        images = torch.from_numpy(arrays["images"]).flatten(1).float() / 16
        labels = torch.from_numpy(arrays["labels"]).long()
    data = [{"x": x, "labels": y} for x, y in zip(images, labels, strict=True)]

    torch.manual_seed(0)
    args = TrainingArguments(
        output_dir="runs/hf_trainer", num_train_epochs=float(os.environ.get("EPOCHS", "10")), learning_rate=1e-3,
        per_device_train_batch_size=16, eval_strategy="epoch", save_strategy="epoch", save_total_limit=2, report_to=[],
        use_cpu=not torch.cuda.is_available(), disable_tqdm=True,
    )  # fmt: skip
    callback = ThinwireCallback("dropping:density=0.03")  # <- the added lines: this one
    trainer = Trainer(
        Net(), args, train_dataset=data[:1437], eval_dataset=data[1437:], callbacks=[callback],  # <- and this
        compute_metrics=lambda found: {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())},
    )  # fmt: skip
    trainer.train()
    if trainer.is_world_process_zero() and callback.wire is not None:
        print(callback.wire.stats)


if __name__ == "__main__":
    main()
