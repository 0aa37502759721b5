"""A complete DistributedDataParallel script with one added line. Run it on two processes of this machine:

torchrun --nproc_per_node 2 examples/ddp_digits.py
"""

import os
from importlib import resources

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import thinwire

EPOCHS = int(os.environ.get("EPOCHS", "20"))


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)

    with resources.files("thinwire").joinpath("lab/data/digits.npz").open("rb") as file, np.load(file) as arrays:
        images = torch.from_numpy(arrays["images"]).unsqueeze(1).float() / 16  # (1797, 1, 8, 8)
        labels = torch.from_numpy(arrays["labels"]).long()  # (1797,)
    order = torch.randperm(len(labels))
    train, test = order[:1437], order[1437:]
    data = TensorDataset(images[train], labels[train])
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler, drop_last=True)

    model = DDP(
        nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(1024, 96),
            nn.ReLU(),
            nn.Linear(96, 10),
        )
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    wire = thinwire.attach(model, optimizer, thinwire.DGC(density=0.01, warmup=100))  # <- the added line

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1} of {EPOCHS}: loss {loss.item():.3f}", flush=True)

    if dist.get_rank() == 0:
        with torch.no_grad():
            correct = (model.module(images[test]).argmax(dim=1) == labels[test]).float().mean()
        print(f"test accuracy {100 * correct:.1f}%")
        print(wire.stats)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
