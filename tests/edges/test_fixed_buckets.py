"""Values that share scales are rounded with the same neighbours whatever DDP's buckets are: no bit depends on them."""

from __future__ import annotations

import contextlib
import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from crossed import Crossed
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from thinwire.edges.fixed_buckets import FixedBuckets
from thinwire.engine import fixed_groups as groups
from thinwire.engine.fixed_groups import fixed_groups
from thinwire.engine.worker import Bucket

KB = 256  # elements of float32


def test_fixed_groups_are_cut_from_the_end_when_they_are_full() -> None:
    assert fixed_groups([3, 4]) == [(1, 0)] and fixed_groups([]) == []
    assert fixed_groups([5, 25 * 1024 * KB, 7, 1024 * KB, 1]) == [(4, 3), (2, 1), (0,)]


def bucket_of(ordinals: list[int], is_first: bool, is_last: bool) -> Bucket:
    tensors = [torch.full((1,), float(ordinal)) for ordinal in ordinals]
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    return Bucket(tensors, tensors, torch.zeros(1), future, is_last, is_first=is_first, ordinals=ordinals)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(order=st.permutations(range(9)), cuts=st.sets(st.integers(1, 8)), broken=st.booleans())
def test_fixed_buckets_give_every_group_once_and_complete_every_bucket_once(
    order: list[int], cuts: set[int], broken: bool
) -> None:
    """Any buckets, also behind a pass that was broken off: the groups of the model, each whole, the last one marked."""
    numels = [400 * KB] * 9
    fixed, places = FixedBuckets(numels), [0, *sorted(cuts), 9]
    pieces_of = [order[start:stop] for start, stop in pairwise(places)]
    if broken and len(pieces_of) > 1:
        fixed.arrived(bucket_of(pieces_of[0], True, False))
    buckets, found = [], []
    for ordinals in pieces_of:
        buckets.append(bucket_of(ordinals, ordinals is pieces_of[0], ordinals is pieces_of[-1]))
        for pieces in fixed.arrived(buckets[-1]):
            found.append(tuple(sorted((int(p) for piece in pieces for p in piece.parameters), reverse=True)))
            assert all(p is g for piece in pieces for p, g in zip(piece.parameters, piece.gradients, strict=True))
            assert [piece.is_last for piece in pieces] == [False] * (len(pieces) - 1) + [len(found) == 2]
            assert not any(bucket.future.done() for bucket in buckets if bucket.is_last and not pieces[-1].is_last)
            for piece in pieces:
                piece.complete()
    assert sorted(found, reverse=True) == fixed_groups(numels) and len(found) == 2
    assert all(bucket.future.done() for bucket in buckets)


def test_bucket_has_the_error_of_any_of_its_pieces() -> None:
    fixed, bucket = FixedBuckets([400 * KB] * 4), bucket_of([3, 2, 1, 0], True, True)
    bucket.in_backward = True
    first, second = fixed.arrived(bucket)
    error = ValueError("an exchange failed")
    first[0].complete(error)
    second[0].complete(error)
    assert bucket.error is error and bucket.future.done()


def prepared(group: dist.ProcessGroup, spec: str, order: tuple[int, ...], cap: float) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = DDP(Crossed(order), process_group=group, bucket_cap_mb=cap)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, thinwire.attach(model, optimizer, spec)


def steps(group: dist.ProcessGroup, model: DDP, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(100 * dist.get_rank(group) + step)
        optimizer.zero_grad()
        model(torch.randn(16, 64, generator=generator)).square().mean().backward()
        optimizer.step()


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def whole_cut_and_otherwise_bucketed(group: dist.ProcessGroup, spec: str, order: tuple[int, ...]) -> list[torch.Tensor]:
    """Parameters after ten steps; after five, a checkpoint into new objects, and five; after ten with other buckets."""
    kept = groups.FIRST_NBYTES, groups.LATER_NBYTES
    groups.FIRST_NBYTES, groups.LATER_NBYTES = 10_000, 35_000  # several groups in a small model
    results = []
    try:
        for cap, cut in ((0.04, False), (0.04, True), (1e-5, False), (25, False)):
            model, optimizer, wire = prepared(group, spec, order, cap)
            if cut:
                steps(group, model, optimizer, 0, 5)
                saved = copy.deepcopy((model.module.state_dict(), optimizer.state_dict(), wire.state_dict()))
                wire.detach()
                model, optimizer, wire = prepared(group, spec, order, cap)
                for one, state in zip((model.module, optimizer, wire), saved, strict=True):
                    one.load_state_dict(state)
            steps(group, model, optimizer, 5 if cut else 0, 10)
            assert len(fixed_groups([p.numel() for p in model.parameters()])) == 3, "one group alone would show nothing"
            results.append(flat(model))
            wire.detach()
    finally:
        groups.FIRST_NBYTES, groups.LATER_NBYTES = kept
    return results


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4, 5), (3, 0, 5, 1, 4, 2)], ids=["in order", "crossed"])
@pytest.mark.parametrize(
    "spec",
    [
        "dgc",
        "dgc:density=0.05,dense_below=0,values=int8",
        "dgc:density=0.05,values=int4",
        "dgc:density=0.05,values=int2,scope=chunk",
    ],
)
def test_fixed_buckets_change_no_bit_with_a_checkpoint_or_other_buckets(
    cluster: Any, spec: str, order: tuple[int, ...]
) -> None:
    everybody = cluster.run(whole_cut_and_otherwise_bucketed, 2, spec, order)
    assert all(torch.equal(parameters, everybody[0][0]) for ranks in everybody for parameters in ranks)


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


def clean(fixed: FixedBuckets) -> bool:
    """Whether nothing of an earlier pass waits there for the rest of a group."""
    return not any(fixed._parts)


def accumulated_and_broken_off(group: dist.ProcessGroup, cap: float) -> list[Any]:
    """Steps of two micro-batches, one under no_sync; a backward pass that fails half-way; and steps behind it."""
    kept = groups.FIRST_NBYTES, groups.LATER_NBYTES
    groups.FIRST_NBYTES, groups.LATER_NBYTES = 10_000, 35_000  # several groups in a small model
    try:
        torch.manual_seed(0)
        model = DDP(Fused(), process_group=group, bucket_cap_mb=cap)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        wire = thinwire.attach(model, optimizer, "dgc:density=0.05,dense_below=0")
        fixed, found = wire.edge._plan, []
        assert isinstance(fixed, FixedBuckets)

        def step(number: int) -> None:
            generator = torch.Generator().manual_seed(100 * dist.get_rank(group) + number)
            optimizer.zero_grad()
            for sync in (False, True):
                with contextlib.nullcontext() if sync else model.no_sync():
                    model(torch.randn(8, 64, generator=generator)).square().mean().backward()
                    assert clean(fixed), "a pass that ended left something behind"
            optimizer.step()

        for number in range(4):
            step(number)
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        Fuse.blows = True
        with pytest.raises(ArithmeticError):
            model(torch.ones(8, 64)).square().mean().backward()
        Fuse.blows = False
        found.append(not clean(fixed))
        model.reducer._reset_state()  # else DDP itself refuses every further step
        x = model(torch.ones(8, 64)).square().mean()
        assert clean(fixed), "the pass that was broken off is still there when the next one begins"
        optimizer.zero_grad()
        x.backward()
        optimizer.step()
        step(5)
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        wire.detach()
        return found
    finally:
        groups.FIRST_NBYTES, groups.LATER_NBYTES = kept


def test_fixed_buckets_leave_no_pieces_for_the_next_pass(cluster: Any) -> None:
    several, whole = (cluster.run(accumulated_and_broken_off, 2, cap) for cap in (0.04, 25))
    for ranks in (several, whole):
        assert torch.equal(ranks[0][0], ranks[1][0]) and torch.equal(ranks[0][2], ranks[1][2])
    assert several[0][1], "nothing was there when the pass was broken off: the test tests nothing"
    assert torch.equal(several[0][0], whole[0][0]), "accumulated gradients depend on DDP's buckets"
