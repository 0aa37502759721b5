"""Models compiled by torch.compile, inside and outside of DDP."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist
from cluster import Cluster
from torch.nn.parallel import DistributedDataParallel as DDP
from workers import LR, close, flat, noise

import thinwire


def compiled(group: dist.ProcessGroup) -> None:
    """DDP around a compiled module; and the DDP model compiled, attached to the compiled one."""
    finals = {}
    for form in ("plain", "inside", "outside, attached to the compiled one"):
        torch._dynamo.reset()
        torch.manual_seed(1)
        module = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
        inner = torch.compile(module, backend="aot_eager") if form == "inside" else module
        ddp = DDP(inner, process_group=group)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=LR, momentum=0.9)
        model = ddp if form in ("plain", "inside") else torch.compile(ddp, backend="aot_eager")
        wire = thinwire.attach(
            model if form.startswith("outside") else ddp,
            optimizer,
            "dgc:density=1,dense_below=0,values=fp32,factor_masking=true",
        )
        for step in range(4):
            optimizer.zero_grad()
            model(noise((4, 6), dist.get_rank(group), step, "x")).square().mean().backward()
            optimizer.step()
        assert wire.stats.steps == 4 and wire.stats.dense_bytes == 4 * 4 * flat(module).numel()
        finals[form] = flat(module)
        wire.detach()
    for form, final in finals.items():
        close(final, finals["plain"], form)


def test_compiled_models_train_as_they_do_uncompiled(cluster: Cluster) -> None:
    cluster.run(compiled, 2)


def inductor(group: dist.ProcessGroup) -> float:
    torch.manual_seed(1)
    ddp = DDP(torch.nn.Linear(8, 4), process_group=group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LR)
    wire, model = (
        thinwire.attach(ddp, optimizer, "dgc:density=0.2,dense_below=0,values=fp32,factor_masking=true"),
        torch.compile(ddp),
    )
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = (model(noise((16, 8), dist.get_rank(group), 0, "x")) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    wire.detach()
    return losses[-1] / losses[0]


@pytest.mark.skipif(sys.platform != "linux", reason="the inductor compiles with g++ here")
def test_model_compiled_with_the_inductor_learns(cluster: Cluster) -> None:
    assert max(cluster.run(inductor, 2)) < 0.5
