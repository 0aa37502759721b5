"""A model of fully_shard on a mesh of two replicas in two shards each; what travels between the replicas is compressed.
Run it on four processes of this machine:

torchrun --nproc_per_node 4 examples/fsdp_hsdp.py
"""

import os
from importlib import resources

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import thinwire

EPOCHS = int(os.environ.get("EPOCHS", "20"))


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    # The last dimension is the fast wire, such as inside a machine: torch gathers and scatters there.
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))

    with resources.files("thinwire").joinpath("lab/data/digits.npz").open("rb") as file, np.load(file) as arrays:
        images = torch.from_numpy(arrays["images"]).flatten(1).float() / 16  # (1797, 64)
        labels = torch.from_numpy(arrays["labels"]).long()  # (1797,)
    order = torch.randperm(len(labels))
    train, test = order[:1437], order[1437:]
    data = TensorDataset(images[train], labels[train])
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler, drop_last=True)

    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh["shard"])  # on the last dimension alone
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    wire = thinwire.attach(model, optimizer, thinwire.DGC(density=0.01, warmup=100), mesh=mesh)  # <- the added line

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1} of {EPOCHS}: loss {loss.item():.3f}", flush=True)

    with torch.no_grad():  # on all ranks: the forward pass gathers the shards
        correct = (model(images[test]).argmax(dim=1) == labels[test]).float().mean()
    if dist.get_rank() == 0:
        print(f"test accuracy {100 * correct:.1f}%")
        print(wire.stats)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
