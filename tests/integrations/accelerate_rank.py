"""One rank of test_accelerate.py: a loop with accelerate.Accelerator, with and without the added line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from digits_net import DRIFTING, METHOD, Net, digest, digits, finish, mean_of_ranks, sgd, values_of
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from thinwire.integrations.accelerate import attach

FOLDER, STEPS, SAVED = Path(os.environ["FOLDER"]), 12, 6


def trained(name: str, method: str | None, *, resume: str | None = None) -> dict[str, Any]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    batch = 8
    data = digits(STEPS * 2 * batch * accelerator.num_processes)
    net = Net()
    model, optimizer, loader = accelerator.prepare(net, sgd(net), DataLoader(data, batch_size=batch))
    wire = attach(accelerator, model, optimizer, method) if method else None
    if resume:
        accelerator.load_state(str(FOLDER / resume))
        loader = accelerator.skip_first_batches(loader, 2 * SAVED)
    found: dict[str, Any] = {}
    for index, inputs in enumerate(loader, start=2 * SAVED if resume else 0):
        with accelerator.accumulate(model):
            loss = model(**inputs)["loss"]
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if index + 1 == 2 * SAVED and not resume:
            accelerator.save_state(str(FOLDER / name))
            saved = Net()
            accelerator.wait_for_everyone()
            saved.load_state_dict(load_file(FOLDER / name / "model.safetensors"))
            found["saved is mean"] = bool((values_of(saved) - mean_of_ranks(values_of(net))).abs().max() < 1e-6)
    if wire is not None:
        found["stats"] = wire.stats.to_dict()
        wire.detach()
    with torch.no_grad():
        everything = {key: torch.stack([one[key] for one in data]) for key in data[0]}
        found["loss"] = float(net(**everything)["loss"])
    accelerator.free_memory()
    return {**found, "digest": digest(net)}


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(32, 32, bias=False), torch.nn.Linear(32, 32, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


def unlucky() -> dict[str, Any]:
    """Tied weights of ranks that drift, and a model that is detached and attached again."""
    accelerator = Accelerator(cpu=True)
    net = Tied()
    model, optimizer = accelerator.prepare(net, sgd(net))
    wire = attach(accelerator, model, optimizer, DRIFTING)

    def step() -> None:
        accelerator.backward(model(torch.randn(4, 32)).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    torch.manual_seed(accelerator.process_index)
    step()
    accelerator.save_state(str(FOLDER / "tied"))
    mean = mean_of_ranks(values_of(net))
    wire.detach()
    accelerator.save_state(str(FOLDER / "detached"))
    again = attach(accelerator, model, optimizer, DRIFTING)
    step()
    accelerator.save_state(str(FOLDER / "again"))
    accelerator.load_state(str(FOLDER / "tied"))
    step()
    steps = again.stats.steps
    again.detach()
    accelerator.load_state(str(FOLDER / "tied"))
    return {"tied is mean": bool((values_of(net) - mean).abs().max() < 1e-6), "steps again": steps}


def main() -> None:
    found = {
        "plain": trained("plain", None),
        "whole": trained("whole", METHOD),
        "resumed": trained("resumed", METHOD, resume="whole"),
    }
    if dist.get_world_size() == 2:
        found |= {"drifting": trained("drifting", DRIFTING), "default": trained("default", "dense")} | unlucky()
    finish(found)


if __name__ == "__main__":
    main()
