"""AdamW, mixed precision, accumulated gradients and checkpoints, in one loop. Run it, stop it, and run it again:

torchrun --nproc_per_node 2 examples/adamw_amp.py
"""

import os
from contextlib import nullcontext
from importlib import resources
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire

STEPS, BATCH, ACCUMULATED, SAVE_EVERY = int(os.environ.get("STEPS", "200")), 16, 2, 50
FOLDER = Path(os.environ.get("FOLDER", "runs/adamw_amp"))


class Transformer(nn.Module):
    """Reads an image of 8 x 8 pixels as a sentence of 8 words."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.words, self.places = nn.Linear(8, width), nn.Parameter(torch.zeros(8, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.layers, self.out = nn.TransformerEncoder(layer, 2), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, 8, 8) -> (B, 10)
        return self.out(self.layers(self.words(x) + self.places).mean(dim=1))


def main() -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    with resources.files("thinwire").joinpath("lab/data/digits.npz").open("rb") as file, np.load(file) as arrays:
        images, labels = torch.from_numpy(arrays["images"]).float() / 16, torch.from_numpy(arrays["labels"]).long()

    model = DDP(Transformer())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    wire = thinwire.attach(model, optimizer, "dropping:density=0.03")  # <- the added line
    first = max((int(done.parent.name) for done in FOLDER.glob("*/.metadata")), default=0)
    if first:
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.load(state, checkpoint_id=FOLDER / str(first))
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        wire.load_checkpoint(FOLDER / str(first))  # behind model and optimizer; with any number of ranks

    for step in range(first, STEPS):
        dice = torch.Generator().manual_seed(step * ranks + rank)
        for part in range(ACCUMULATED):
            chosen = torch.randint(0, 1437, (BATCH,), generator=dice)
            last = part == ACCUMULATED - 1
            with nullcontext() if last else model.no_sync(), torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen]) / ACCUMULATED
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % SAVE_EVERY == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "wire": wire}
            dcp.save(state, checkpoint_id=FOLDER / str(step + 1))
            if rank == 0:
                print(f"step {step + 1}: loss {ACCUMULATED * loss.item():.3f}; {wire.stats}", flush=True)

    with torch.no_grad():
        right = (model.module(images[1437:]).argmax(dim=1) == labels[1437:]).float().mean()
    if rank == 0:
        print(f"test accuracy {100 * right:.1f}%")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
