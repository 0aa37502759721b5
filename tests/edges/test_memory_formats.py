"""Weights and momentum in other memory formats: no element changes its place, whatever lies in which order."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from cluster import Cluster
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from workers import close, flat, noise

import thinwire

EXACT = "dgc:density=1.0,factor_masking=false,dense_below=0,values=fp32"
CHANNELS_LAST, CONTIGUOUS = torch.channels_last, torch.contiguous_format


class Image(nn.Module):
    """A convolution, a transposed weight and one that is no single stretch of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)
        self.turned = nn.Parameter(noise((5, 6), 0, 0, "turned").t())
        self.sparse = nn.Parameter(noise((4, 10), 0, 0, "sparse").t()[:, ::2])

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.conv(x)).mean((2, 3)) @ self.turned
        return (hidden @ self.sparse[:5]).square().mean() + self.sparse.square().sum()


def steps(model: DDP, optimizer: Any, first: int, last: int) -> None:
    for step in range(first, last):
        optimizer.zero_grad()
        model(noise((4, 3, 8, 8), dist.get_rank(), step, "x")).backward()
        optimizer.step()


def trained(group: dist.ProcessGroup, method: str | None, before: Any, after: Any) -> Tensor:
    """Steps with one memory format, then with another; with a method, attached in the middle."""
    torch.manual_seed(3)
    module = Image().to(memory_format=before)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    steps(DDP(module, process_group=group), optimizer, 0, 3)
    module.to(memory_format=after)
    model = DDP(module, process_group=group)
    wire = thinwire.attach(model, optimizer, method) if method is not None else None
    steps(model, optimizer, 3, 6)
    if wire is not None:
        wire.switch("dense")  # momentum goes to the optimizer,
        steps(model, optimizer, 6, 7)
        wire.switch(method)  # and comes back
        module.to(memory_format=after)
        steps(model, optimizer, 7, 8)
        wire.detach()
    else:
        steps(model, optimizer, 6, 8)
    steps(DDP(module, process_group=group), optimizer, 8, 10)
    return flat(module)


def same_as_plain(group: dist.ProcessGroup) -> None:
    for before, after in ((CONTIGUOUS, CHANNELS_LAST), (CHANNELS_LAST, CONTIGUOUS), (CHANNELS_LAST, CHANNELS_LAST)):
        plain = trained(group, None, before, after)
        for method in (EXACT, "gtopk:density=1.0,dense_below=0,values=fp32"):
            close(trained(group, method, before, after), plain, f"{method}, {before} and then {after}")


def test_momentum_keeps_its_places_when_weights_have_another_memory_format(cluster: Cluster) -> None:
    cluster.run(same_as_plain, 2)
