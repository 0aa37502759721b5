"""Parameters frozen or unfrozen behind DDP's back are refused in a sentence; no pass leaves pieces behind."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_regroup import Crossed
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._python_dispatch import TorchDispatchMode

import thinwire
from thinwire.edges import fixed_buckets as regroup
from thinwire.torch_private import exchanged_by_ddp

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


class Fuse(torch.autograd.Function):
    """Passes gradients on until it blows."""

    blows = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        if Fuse.blows:
            raise ArithmeticError("the fuse has blown")
        return grads[0]


class Fused(nn.Module):
    """Six layers with a fuse in the middle: half of the gradients are there when it blows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for place, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if place == 2:
                x = Fuse.apply(x)
        return x


def clean(regrouper: regroup.FixedBuckets) -> bool:
    """Whether nothing of an earlier pass waits there for the rest of a group."""
    return not regrouper._seen and not any(regrouper._parts) and not regrouper._open


def accumulated_and_broken_off(group: dist.ProcessGroup, cap: float) -> list[Any]:
    """Steps of two micro-batches, one under no_sync; a backward pass that fails half-way; and steps behind it."""
    kept = regroup.FIRST_NBYTES, regroup.LATER_NBYTES
    regroup.FIRST_NBYTES, regroup.LATER_NBYTES = 10_000, 35_000  # several groups in a small model
    try:
        torch.manual_seed(0)
        model = DDP(Fused(), process_group=group, bucket_cap_mb=cap)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        wire = thinwire.attach(model, optimizer, "dgc:density=0.05,dense_below=0")
        regrouper, found = wire._fixed_buckets, []
        assert regrouper is not None

        def step(number: int) -> None:
            generator = torch.Generator().manual_seed(100 * dist.get_rank(group) + number)
            optimizer.zero_grad()
            for sync in (False, True):
                with contextlib.nullcontext() if sync else model.no_sync():
                    model(torch.randn(8, 64, generator=generator)).square().mean().backward()
                    assert clean(regrouper), "a pass that ended left something behind"
            optimizer.step()

        for number in range(4):
            step(number)
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        Fuse.blows = True
        with pytest.raises(ArithmeticError):
            model(torch.ones(8, 64)).square().mean().backward()
        Fuse.blows = False
        found.append(not clean(regrouper))
        model.reducer._reset_state()  # else DDP itself refuses every further step
        x = model(torch.ones(8, 64)).square().mean()
        assert clean(regrouper), "the pass that was broken off is still there when the next one begins"
        optimizer.zero_grad()
        x.backward()
        optimizer.step()
        step(5)
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        wire.detach()
        return found
    finally:
        regroup.FIRST_NBYTES, regroup.LATER_NBYTES = kept


def test_no_pass_leaves_pieces_for_the_next_one(cluster: Any) -> None:
    several, whole = (cluster.run(accumulated_and_broken_off, 2, cap) for cap in (0.04, 25))
    for ranks in (several, whole):
        assert torch.equal(ranks[0][0], ranks[1][0]) and torch.equal(ranks[0][2], ranks[1][2])
    assert several[0][1], "nothing was there when the pass was broken off: the test tests nothing"
    assert torch.equal(several[0][0], whole[0][0]), "accumulated gradients depend on DDP's buckets"
