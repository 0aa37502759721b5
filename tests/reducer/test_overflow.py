"""Gradients that are finite, and whose sums are not: nothing that is kept or sent ever overflows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cluster import Cluster
from test_reducer import Loop
from workers import digest, flat, pulls, tensors_of

from thinwire.errors import NonFiniteError

HUGE = 3e38  # two of them overflow float32
SPECS = [
    "dgc:density=0.05,dense_below=0,values=int8",
    "gtopk:density=0.05",
    "dropping:density=0.05",
    "blocksign:dense_below=1",
]


def huge(rank: int, step: int) -> dict[str, torch.Tensor]:
    gradients = pulls(rank, step)
    if rank == 1:
        gradients["c"][3, 4] = -HUGE
    return gradients


def passed_over(group: Any) -> None:
    for spec in SPECS:
        for optimizer in (None, "heavy"):
            loop, other = (Loop(group, spec, optimizer, on_nonfinite="skip") for _ in range(2))
            for one in (loop, other):
                one.train(0, 2)
            state, parameters = digest(*tensors_of(loop.reducer.state_dict())), flat(loop.module)
            for step in (2, 3):
                bad = huge(loop.rank, step)
                if optimizer is not None:
                    loop.step(bad)
                else:
                    loop.reducer.reduce(bad)
                assert all(bool(gradient.isinf().all()) for gradient in bad.values()), spec
            assert torch.equal(flat(loop.module), parameters)
            assert digest(*tensors_of(loop.reducer.state_dict())) == state, spec
            assert torch.equal(loop.train(2, 4), other.train(2, 4)) and loop.reducer.stats.steps_skipped == 2


def test_steps_whose_gradients_would_overflow_are_passed_over(cluster: Cluster) -> None:
    cluster.run(passed_over, 2)


def stopped(group: Any, spec: str) -> str:
    loop = Loop(group, spec, "heavy")
    loop.train(0, 2)
    with pytest.raises(NonFiniteError) as caught:
        loop.step(huge(loop.rank, 2))
    assert all(bool(tensor.isfinite().all()) for tensor in loop.reducer.detach().values())
    return str(caught.value)


@pytest.mark.parametrize("spec", SPECS)
def test_gradient_that_would_overflow_ends_all_ranks_with_one_sentence(cluster: Cluster, spec: str) -> None:
    first, second = cluster.run(stopped, 2, spec)
    assert "of 'c' on this rank holds an inf or a nan, or a number beyond 1.8e+19, at step 2" in second
    assert "on another rank" in first and 'on_nonfinite="skip"' in first
