"""What test_ray.py gives to every worker of a Ray TorchTrainer."""

from __future__ import annotations

from typing import Any


def train(settings: dict[str, Any]) -> None:
    import ray.train
    import torch
    from digits_net import METHOD, digest, digits
    from ray.train.torch import prepare_model
    from torch import nn

    import thinwire

    torch.manual_seed(0)
    model: Any = prepare_model(nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wire = thinwire.attach(model, optimizer, METHOD)
    rank, ranks = ray.train.get_context().get_world_rank(), ray.train.get_context().get_world_size()
    data = digits()[rank::ranks]
    x, y = (torch.stack([one[name] for one in data]) for name in ("x", "labels"))
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    stats = wire.stats
    with open(f"{settings['folder']}/{rank}", "w") as file:
        sent = f"{stats.steps} {stats.bytes_sent} {stats.dense_bytes_sent}"
        file.write(f"{digest(model.module)} {sent} {losses[0]} {losses[-1]}")
    wire.detach()
