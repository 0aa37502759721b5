"""Frozen parameters: left alone, and refused in a sentence where they were frozen or unfrozen behind DDP's back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers
from cluster import Cluster
from crossed import Crossed
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._python_dispatch import TorchDispatchMode
from workers import LR, Dot, Run, Training, close, pulls

import thinwire
from thinwire.edges.ddp_hook import exchanged_by_ddp


def frozen(group: dist.ProcessGroup) -> None:
    module = Dot()
    module.b.requires_grad_(False)
    module.c.requires_grad_(False)
    model = DDP(module, process_group=group)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=LR, momentum=0.9)
    wire = thinwire.attach(model, optimizer, thinwire.BlockSign(dense_below=1))
    start = {name: p.detach().clone() for name, p in module.named_parameters()}
    for step in range(3):
        optimizer.zero_grad()
        model(pulls(dist.get_rank(group), step)).backward()
        optimizer.step()
    moved = {name for name, p in module.named_parameters() if not torch.equal(p.detach(), start[name])}
    assert moved == {"a", "d", "e"}
    assert wire.stats.dense_bytes == 3 * 4 * (1200 + 15 + 1)
    wire.detach()


def test_frozen_parameters_stay_and_the_rest_trains(cluster: Cluster) -> None:
    cluster.run(frozen, 2)


def frozen_and_unfrozen(group: dist.ProcessGroup) -> None:
    """Frozen on the way, with find_unused_parameters: left alone, its residual waits, and it goes on when unfrozen."""
    for method in (
        "dgc:density=1.0,dense_below=0,values=fp32,factor_masking=true",
        "dgc:density=0.02,dense_below=0,values=fp32,factor_masking=true",
        "gtopk:density=0.02",
        "blocksign:dense_below=1",
    ):
        training = Training(group, Run(method, "plain", ddp={"find_unused_parameters": True}))
        module, size = training.module, dist.get_world_size(group)
        start = {name: p.detach().clone() for name, p in module.named_parameters()}
        total = {name: torch.zeros_like(p) for name, p in start.items()}
        for step in range(9):
            frozen = {"a", "d"} if 3 <= step < 6 else set()
            for name, p in module.named_parameters():
                p.requires_grad_(name not in frozen)
            held = {name: module.get_parameter(name).detach().clone() for name in frozen}
            training.step(step)
            for name, before in held.items():
                assert torch.equal(module.get_parameter(name), before), f"{method}: {name} is frozen"
            for rank in range(size):
                for name, pull in workers.pulls(rank, step).items():
                    if name not in frozen:
                        total[name] += pull / size
        rest = training.wire.detach()
        for name, p in module.named_parameters():
            close(p.detach() - LR * rest[name], start[name] - LR * total[name], f"{method} {name}", atol=1e-5)


def thawed(group: dist.ProcessGroup) -> None:
    """Frozen when DDP was made: it takes a new DDP and a new attach, and momentum and leftovers come along."""
    for optimizer, method in (
        ("plain", "dgc:density=0.05,dense_below=0,values=fp32,factor_masking=true"),
        ("heavy", workers.EXACT),
    ):
        finals = []
        for wired in (False, True):
            module = workers.Dot()
            module.a.requires_grad_(False)
            optim = workers.OPTIMIZERS[optimizer](module)
            model = DDP(module, process_group=group)
            wire = thinwire.attach(model, optim, method) if wired else None
            owed: dict[str, torch.Tensor] = {}
            for step in range(8):
                if step == 4:
                    module.a.requires_grad_(True)
                    owed = wire.detach() if wire is not None else {}
                    model = DDP(module, process_group=group)
                    wire = thinwire.attach(model, optim, method) if wired else None
                optim.zero_grad()
                model(workers.pulls(dist.get_rank(group), step)).backward()
                optim.step()
            rest = wire.detach() if wire is not None else {}
            whole = [
                p.detach() - LR * (rest.get(name, 0 * p) + owed.get(name, 0 * p)).detach()
                for name, p in module.named_parameters()
            ]
            finals.append(torch.cat([one.reshape(-1) for one in whole]))
        close(finals[1], finals[0], str(method), atol=1e-5)


def test_frozen_parameters_wait_and_go_on_when_they_are_unfrozen(cluster: Cluster) -> None:
    cluster.run(frozen_and_unfrozen, 3)
    cluster.run(thawed, 2)


METHODS = ["dgc", "terngrad", "gtopk", "dense"]  # int8 in groups of its own, buckets that merge, the whole model, plain


def made(group: dist.ProcessGroup, frozen: bool, **options: Any) -> tuple[DDP, torch.optim.Optimizer]:
    """A model whose second layer was frozen, or not, when DDP was made."""
    torch.manual_seed(0)
    module = Crossed((0, 1, 2))
    module.layers[1].weight.requires_grad_(not frozen)
    model = DDP(module, process_group=group, **options)
    return model, torch.optim.SGD(module.parameters(), lr=0.1)


def one_step(model: DDP, optimizer: torch.optim.Optimizer, seed: int) -> None:
    optimizer.zero_grad()
    model(torch.randn(8, 64, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
    optimizer.step()


def unfrozen_before_attach(group: dist.ProcessGroup, spec: str) -> None:
    model, optimizer = made(group, frozen=True)
    model.module.layers[1].weight.requires_grad_(True)
    thinwire.attach(model, optimizer, spec)


def unfrozen_after_attach(group: dist.ProcessGroup, spec: str) -> None:
    model, optimizer = made(group, frozen=True)
    wire = thinwire.attach(model, optimizer, spec)
    one_step(model, optimizer, dist.get_rank(group))
    model.module.layers[1].weight.requires_grad_(True)
    try:
        one_step(model, optimizer, dist.get_rank(group))
    finally:
        model.module.layers[1].weight.requires_grad_(False)
        one_step(model, optimizer, dist.get_rank(group))  # nothing was exchanged: the wire works as before
        wire.detach()


def frozen_before_attach(group: dist.ProcessGroup, spec: str) -> None:
    model, optimizer = made(group, frozen=False, find_unused_parameters=True)
    model.module.layers[1].weight.requires_grad_(False)
    thinwire.attach(model, optimizer, spec)


@pytest.mark.parametrize("spec", METHODS)
@pytest.mark.parametrize("work", [unfrozen_before_attach, unfrozen_after_attach, frozen_before_attach])
def test_parameter_frozen_behind_ddps_back_is_refused_on_every_rank(cluster: Any, work: Any, spec: str) -> None:
    for raised in cluster.run(work, 2, spec, expect_errors=True, timeout_s=30):
        assert raised.type == "ValueError", raised
        assert "'layers.1.weight' is " in raised.message and "wrap the module in a new DDP" in raised.message


class Recorder(TorchDispatchMode):
    """Which of torch's operations were called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def asked(group: dist.ProcessGroup) -> list[str]:
    model, optimizer = made(group, frozen=True)
    one_step(model, optimizer, 0)
    with Recorder() as recorder:
        exchanged = exchanged_by_ddp(model)
    assert {id(p) for p in exchanged} == {id(p) for p in model.parameters() if p.requires_grad}
    return recorder.seen


def test_exchanged_by_ddp_takes_no_memory_of_the_gradients_size(cluster: Any) -> None:
    for seen in cluster.run(asked, 2):
        assert set(seen) == {"detach"}, "no zeros, nothing is copied"
