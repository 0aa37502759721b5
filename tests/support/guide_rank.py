"""One rank that runs blocks of the guide, with the names that its first page promises."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire

BARE = ("fully_shard(", "prepare(", "Trainer(", "attach(module")  # who does not take a model in DDP


def names(ranks: int, block: str = "") -> dict[str, Any]:
    """A new model, its optimizer, eight batches, and what else the guide's blocks take for granted."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 400), nn.ReLU(), nn.Linear(400, 300), nn.ReLU(), nn.Linear(300, 4))
    model = module if any(word in block for word in BARE) else DDP(module)
    loss = nn.CrossEntropyLoss()
    rank = dist.get_rank()
    dice = torch.Generator().manual_seed(rank)
    loader = [(torch.randn(8, 16, generator=dice), torch.randint(4, (8,), generator=dice)) for _ in range(8)]
    x, y = loader[0]
    known = {
        "contextlib": contextlib, "torch": torch, "dist": dist, "thinwire": thinwire, "module": module, "model": model,
        "loss": loss, "rank": rank, "loader": loader, "device": "cpu", "machines": ranks, "ranks_per_machine": 1,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        "evaluate": lambda one: float((one(x).argmax(dim=1) == y).float().mean()),
        "step": lambda: loss(known["model"](x), y).backward(),
    }  # fmt: skip
    return known


LAUNCHED = {  # what a launcher says, and hierarchy="auto" and the frameworks look at
    "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0",
    "TORCHELASTIC_RUN_ID": "guide", "HF_HUB_OFFLINE": "1",
}  # fmt: skip


def run(group: dist.ProcessGroup, blocks: Sequence[str], folder: str) -> int:
    """Run all blocks and return their number. One that attaches begins with a new model, others go on with the last."""
    before, rank, ranks = Path.cwd(), dist.get_rank(group), dist.get_world_size(group)
    os.chdir(folder)
    os.environ.update(LAUNCHED, RANK=str(rank), WORLD_SIZE=str(ranks))
    ended, known = 0, names(ranks)
    try:
        for block in blocks:
            if any(first in block for first in ("attach(", "thinwire.advise(", "Trainer(")):
                known = names(ranks, block)
            add_frameworks(block, known)
            exec(compile(block, "a block of the guide", "exec"), known)
            wire = known.get("wire")
            if wire is not None and wire.attached and "for x, y in loader" not in block:
                known["step"]()
                known["optimizer"].step()
            wire = trained_wire(known) or wire
            assert wire is None or (wire.stats.world_size, wire.stats.steps > 0) == (ranks, True), block
            ended += 1
    finally:
        os.chdir(before)
        for name in (*LAUNCHED, "RANK", "WORLD_SIZE"):
            del os.environ[name]
    return ended


def trained_wire(known: dict[str, Any]) -> Any:
    """The wire of a framework's trainer, if there is one."""
    if (trainer := known.get("trainer")) is None:
        return None
    callbacks = trainer.callback_handler.callbacks if hasattr(trainer, "callback_handler") else trainer.callbacks
    (wire,) = [one.wire for one in callbacks if type(one).__name__ == "ThinwireCallback"]
    assert wire is not None
    return wire


def add_frameworks(block: str, known: dict[str, Any]) -> None:
    """The data and models in the forms that these want."""
    if "transformers" in block:
        rows = [(x, y) for batch in known["loader"] for x, y in zip(*batch, strict=True)]
        known["net"], known["data"] = Net(known["module"]), [{"x": x, "labels": y} for x, y in rows]
    if "lightning" in block:
        known["lightning_module"] = of_lightning(known["module"])
    if "lightning" in block or "accelerate" in block:
        rows = [(x, y) for batch in known["loader"] for x, y in zip(*batch, strict=True)]
        known["loader"] = torch.utils.data.DataLoader(rows, batch_size=8)


class Net(nn.Module):
    """A model in the form that transformers.Trainer wants."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:  # (B, 16) and (B,)
        logits = self.module(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def of_lightning(module: nn.Module) -> Any:
    import lightning.pytorch as pl

    class Lit(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.module(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    return Lit()
