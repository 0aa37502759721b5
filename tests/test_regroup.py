"""Values that share scales are rounded with the same neighbours whatever DDP's buckets are: no bit depends on them."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from thinwire.edges import fixed_buckets as regroup
from thinwire.edges.fixed_buckets import FixedBuckets
from thinwire.engine.fixed_groups import fixed_groups
from thinwire.engine.worker import Bucket

KB = 256  # elements of float32


def test_groups_are_cut_from_the_end_when_they_are_full() -> None:
    assert fixed_groups([3, 4]) == [(1, 0)] and fixed_groups([]) == []
    assert fixed_groups([5, 25 * 1024 * KB, 7, 1024 * KB, 1]) == [(4, 3), (2, 1), (0,)]


def bucket_of(ordinals: list[int], is_last: bool) -> Bucket:
    tensors = [torch.full((1,), float(ordinal)) for ordinal in ordinals]
    return Bucket(tensors, tensors, torch.zeros(1), torch.futures.Future(), is_last)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(order=st.permutations(range(9)), cuts=st.sets(st.integers(1, 8)), broken=st.booleans())
def test_every_group_once_and_every_bucket_completed_once(order: list[int], cuts: set[int], broken: bool) -> None:
    """Any buckets, also behind a pass that was broken off: the groups of the model, each whole, the last one marked."""
    numels = [400 * KB] * 9
    regrouper, places = FixedBuckets(numels), [0, *sorted(cuts), 9]
    pieces_of = [order[start:stop] for start, stop in pairwise(places)]
    if broken and len(pieces_of) > 1:
        regrouper.arrived(bucket_of(pieces_of[0], False), pieces_of[0])
    buckets, found = [], []
    for ordinals in pieces_of:
        buckets.append(bucket_of(ordinals, ordinals is pieces_of[-1]))
        for pieces in regrouper.arrived(buckets[-1], ordinals):
            found.append(tuple(sorted((int(p) for piece in pieces for p in piece.parameters), reverse=True)))
            assert all(p is g for piece in pieces for p, g in zip(piece.parameters, piece.gradients, strict=True))
            assert [piece.is_last for piece in pieces] == [False] * (len(pieces) - 1) + [len(found) == 2]
            assert not any(bucket.future.done() for bucket in buckets if bucket.is_last and not pieces[-1].is_last)
            for piece in pieces:
                piece.complete()
    assert sorted(found, reverse=True) == fixed_groups(numels) and len(found) == 2
    assert all(bucket.future.done() for bucket in buckets)


def test_an_error_of_any_piece_is_the_buckets_error() -> None:
    regrouper, bucket = FixedBuckets([400 * KB] * 4), bucket_of([3, 2, 1, 0], True)
    bucket.in_backward = True
    first, second = regrouper.arrived(bucket, [3, 2, 1, 0])
    error = ValueError("an exchange failed")
    first[0].complete(error)
    second[0].complete(error)
    assert bucket.error is error and bucket.future.done()


class Crossed(nn.Module):
    """Six layers; ``order`` is the one in which they are used, which DDP's rebuilt buckets follow."""

    def __init__(self, order: tuple[int, ...]) -> None:
        super().__init__()
        self.layers, self.order = nn.ModuleList(nn.Linear(64, 64) for _ in order), order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for place in self.order:
            x = torch.tanh(self.layers[place](x))
        return x


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


def whole_cut_and_otherwise_bucketed(
    group: dist.ProcessGroup, spec: str, order: tuple[int, ...]
) -> list[tuple[torch.Tensor, int]]:
    """Ten steps; five, a checkpoint into new objects, and five; ten with other buckets. Parameters, and groups."""
    kept = regroup.FIRST_NBYTES, regroup.LATER_NBYTES
    regroup.FIRST_NBYTES, regroup.LATER_NBYTES = 10_000, 35_000  # several groups in a small model
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
            regrouper = wire._fixed_buckets
            results.append((flat(model), len(regrouper._groups) if regrouper is not None else 0))
            wire.detach()
    finally:
        regroup.FIRST_NBYTES, regroup.LATER_NBYTES = kept
    return results


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4, 5), (3, 0, 5, 1, 4, 2)], ids=["in order", "crossed"])
@pytest.mark.parametrize("spec", ["dgc", "dgc:density=0.05,dense_below=0,values=int8", "dgc:density=0.05,values=int4"])
def test_neither_a_checkpoint_nor_other_buckets_change_a_bit(cluster: Any, spec: str, order: tuple[int, ...]) -> None:
    everybody = cluster.run(whole_cut_and_otherwise_bucketed, 2, spec, order)
    for ranks in zip(*everybody, strict=True):
        assert torch.equal(ranks[0][0], ranks[1][0]) and ranks[0][1] == ranks[1][1] == 3
    for parameters, _ in everybody[0][1:]:
        assert torch.equal(parameters, everybody[0][0][0])
