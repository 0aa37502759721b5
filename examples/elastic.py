"""Training that survives lost workers: every rank saves its part, and a new set of workers goes on from the last whole
set, bit for bit where the number of workers is the same, with all residuals where it is not. Kill workers as you like:

TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc_per_node 2 --max_restarts 100 examples/elastic.py \
    --folder /tmp/run

Without the variable torchrun (2.13) keeps one store over restarts: new workers can meet the addresses of dead ones.
"""

import argparse
import hashlib
import os
import re
import secrets
import shutil
from importlib import resources
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire

BATCH = 60  # images per step, of all workers together


class Checkpoints:
    """Sets of files, one per rank: FOLDER/step-00000040-TOKEN/rank-1-of-2.pt.

    A set counts when all its files are there. A file appears under its name only when it is whole, and every start of
    the workers has a token of its own, so no set is ever put together from two starts.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        token = torch.tensor([secrets.randbits(32)])
        dist.broadcast(token, 0)
        self.token = f"{int(token):08x}"

    def save(self, step: int, state: dict) -> None:
        folder = self.folder / f"step-{step:08}-{self.token}"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank-{dist.get_rank()}-of-{dist.get_world_size()}.pt"
        partial = path.with_suffix(".partial")
        with open(partial, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        if dist.get_rank() == 0:
            self._remove_old()

    def load_newest(self) -> list[dict]:
        """All ranks' states, in rank order, of the newest whole set; [] where there is none."""
        newest = torch.tensor([-1, 0])
        if dist.get_rank() == 0 and (sets := self._whole_sets()):
            _, step, token = sets[-1].name.split("-")
            newest = torch.tensor([int(step), int(token, 16)])
        dist.broadcast(newest, 0)  # one rank decides, for all
        step, token = newest.tolist()
        if step < 0:
            return []
        folder = self.folder / f"step-{step:08}-{token:08x}"
        paths = sorted(folder.glob("*.pt"), key=lambda path: int(path.name.split("-")[1]))
        return [torch.load(path, weights_only=True) for path in paths]

    def _whole_sets(self) -> list[Path]:
        """The folders of all whole sets, oldest first."""
        sets = []
        for folder in sorted(self.folder.glob("step-*")):
            names = [path.name for path in folder.glob("rank-*.pt")]
            sizes = {int(re.fullmatch(r"rank-\d+-of-(\d+)\.pt", name)[1]) for name in names}
            if sizes and len(names) == sizes.pop():
                sets.append(folder)
        return sets

    def _remove_old(self) -> None:
        """Keep the newest whole set and one before it, whatever is newer, and nothing else."""
        whole = self._whole_sets()
        for folder in sorted(self.folder.glob("step-*")) if len(whole) > 2 else ():
            if folder < whole[-2]:
                shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="for the checkpoints; seen by all workers")
    parser.add_argument("--method", default="dgc:density=0.01")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--save-every", type=int, default=10)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)

    with resources.files("thinwire").joinpath("lab/data/digits.npz").open("rb") as file, np.load(file) as arrays:
        images = torch.from_numpy(arrays["images"]).flatten(1).float() / 16  # (1797, 64)
        labels = torch.from_numpy(arrays["labels"]).long()  # (1797,)
    model = DDP(nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    wire = thinwire.attach(model, optimizer, options.method)

    checkpoints = Checkpoints(options.folder)
    states, first = checkpoints.load_newest(), 0
    if states:
        mine = states[rank % len(states)]
        model.module.load_state_dict(mine["model"])
        optimizer.load_state_dict(mine["optimizer"])
        wire.load_state_dict([state["wire"] for state in states])  # of another number of workers, too
        first = mine["step"]
        if rank == 0:
            print(f"resumed at step {first} with {world} workers; {len(states)} had saved", flush=True)

    for step in range(first, options.steps):
        # What a worker sees depends on the step alone, so that a step done again is the same step.
        batch = torch.randperm(len(labels), generator=torch.Generator().manual_seed(step))[:BATCH][rank::world]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
        if (step + 1) % options.save_every == 0 or step + 1 == options.steps:
            state = {"step": step + 1, "model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            checkpoints.save(step + 1, {**state, "wire": wire.state_dict()})
            if rank == 0:
                print(f"step {step + 1} of {options.steps}: loss {loss.item():.3f}", flush=True)

    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    print(f"rank {rank} of {world} ended: parameters {hashlib.sha256(flat.numpy().tobytes()).hexdigest()}", flush=True)
    wire.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
