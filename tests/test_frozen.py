"""Parameters frozen or unfrozen behind DDP's back are refused in a sentence; no pass leaves pieces behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from crossed import Crossed
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._python_dispatch import TorchDispatchMode

import thinwire
from thinwire.edges.ddp import exchanged_by_ddp

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
def test_a_parameter_that_ddp_does_not_know_so_is_refused_on_every_rank(cluster: Any, work: Any, spec: str) -> None:
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


def test_ddp_is_asked_about_its_parameters_without_memory_of_the_gradients_size(cluster: Any) -> None:
    for seen in cluster.run(asked, 2):
        assert set(seen) == {"detach"}, "no zeros, nothing is copied"
