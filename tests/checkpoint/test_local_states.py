"""States of local steps: inside a round to the bit, and for another number of ranks."""

from __future__ import annotations

import copy
import logging
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bowls import SIZES, SPARSE, Loop, everybody, flat, is_equal, residual
from cluster import Cluster
from heard import Heard
from torch import Tensor
from workers import sentence_of, through_a_file


def resumed(group: Any, n: int = 3) -> None:
    """Five steps, a state, five more; and the same five from the state, with another model and from one file of all."""
    for optimizer, method in (("adamw", f"local:every=4,method={SPARSE},outer_momentum=0.9"), ("two", "local:every=3")):
        loop = Loop(group, optimizer, method)
        loop.train(0, 5)
        one_file = [loop.wire.state_dict(all_ranks=True)]
        saved = through_a_file({"wire": loop.wire.state_dict(), "its": [o.state_dict() for o in loop.optimizers]})
        dist.broadcast_object_list(one_file, dist.get_process_group_ranks(group)[0], group=group)
        expected = loop.train(5, 10)
        for state in (saved["wire"], one_file[0]):
            other = Loop(group, optimizer, method)
            with torch.no_grad():
                other.bowl.w.add_(loop.rank)  # the state has all that is needed of the model
            for one, kept in zip(other.optimizers, copy.deepcopy(saved["its"]), strict=True):
                one.load_state_dict(kept)
            other.wire.load_state_dict(state)
            for mine, its in zip(other.train(5, 10), expected, strict=True):
                assert torch.equal(mine, its), method
            assert other.wire.stats.steps == 5 and other.wire.stats.rounds == loop.wire.stats.rounds
            last = through_a_file(other.wire.state_dict()), through_a_file(loop.wire.state_dict())
            assert last[0][f"rank {loop.rank}"]["seal"] == last[1][f"rank {loop.rank}"]["seal"]
            other.wire.detach()
        damaged = copy.deepcopy(saved["wire"])
        damaged[f"rank {loop.rank}"]["aggregator"]["rounds"]["theta"]["v"][3] += 1
        now = flat(loop.bowl)
        text = sentence_of(ValueError, partial(loop.wire.load_state_dict, damaged))
        assert "theta of 'v' was changed or damaged" in text and torch.equal(flat(loop.bowl), now)
        loop.wire.detach()


def test_a_state_resumes_bit_exact_inside_a_round(cluster: Cluster) -> None:
    cluster.run(resumed, 3)


METHOD = f"local:every=2,method={SPARSE},outer_momentum=0.9"


def saving(group: Any) -> Any:
    loop = Loop(group, "sgd", METHOD)
    loop.train(0, 5)
    waits = torch.stack(everybody(group, residual(loop.wire))).mean(0)
    state = loop.wire.state_dict(all_ranks=True)
    theta = torch.cat([loop.wire.edge._outer.theta[name].reshape(-1) for name in SIZES])  # type: ignore[attr-defined]
    loop.wire.abandon()
    return through_a_file(state), theta, waits


def loading(group: Any, state: Any, theta: Tensor, waits: Tensor) -> list[str]:
    loop = Loop(group, "sgd", METHOD)
    handler, log = Heard(), logging.getLogger("thinwire")
    log.addHandler(handler)
    loop.wire.load_state_dict(state)
    log.removeHandler(handler)
    assert torch.equal(flat(loop.bowl), theta)
    mean = torch.stack(everybody(group, residual(loop.wire))).mean(0)
    torch.testing.assert_close(mean, waits, rtol=1e-5, atol=1e-6)
    assert loop.wire.reducer.progress.step == 4 and loop.wire.stats.rounds == 2
    loop.train(4, 6)
    assert is_equal(group, loop.bowl) and loop.wire.stats.rounds == 3
    loop.wire.detach()
    return handler.sentences


@pytest.mark.parametrize(("n", "m"), [(3, 2), (2, 3)])
def test_another_number_of_ranks_begins_the_round_anew_with_all_that_waits(cluster: Cluster, n: int, m: int) -> None:
    state, theta, waits = cluster.run(saving, n)[0]
    lines = cluster.run(loading, m, state, theta, waits)
    assert any("saved 1 steps after a round had begun, by another group" in line for line in lines[0])
