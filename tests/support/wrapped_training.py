"""A library's wrapped model and optimizers on every rank, beside plain DDP, at density 1.

torchrun ... wrapped_training.py accelerate|fabric, or as test_wrapped_optimizers.py starts it
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire

EXACT = "density=1.0,dense_below=0,values=fp32"
SPLIT = f"perlayer:2.*=(dgc:{EXACT}),*=dense"
Backward = Callable[[Tensor], Any]


def one(net: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=0.02, nesterov=True)]


def two(net: Any) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.SGD(net[2].parameters(), lr=0.05, momentum=0.9),
        torch.optim.AdamW(net[0].parameters(), lr=0.01),
    ]


def prepared(library: str) -> tuple[Callable[..., Any], Backward]:
    if library == "accelerate":
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        return accelerator.prepare, accelerator.backward
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    return fabric.setup, fabric.backward


def train(model: nn.Module, optimizers: list[Any], backward: Backward) -> None:
    for step in range(6):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward(model(torch.randn(8, 6, generator=generator)).square().mean())
        for optimizer in optimizers:
            optimizer.step()


def main(library: str) -> None:
    prepare, backward = prepared(library)
    for make, method in ((one, f"dgc:{EXACT}"), (two, SPLIT), (two, "dense")):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5))
        net = copy.deepcopy(plain)
        model, *optimizers = prepare(net, *make(net))
        assert not isinstance(model, DDP) or library == "accelerate"
        wire = thinwire.attach(model, optimizers if len(optimizers) > 1 else optimizers[0], method)
        train(model, optimizers, backward)
        state = wire.state_dict()
        assert state["step"] == state["optimizer_steps"] == 6, state
        wire.detach()
        train(DDP(plain), make(plain), Tensor.backward)
        for mine, other in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=3e-6)
    if dist.get_rank() == 0:
        print(f"{library}: as plain DDP")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
