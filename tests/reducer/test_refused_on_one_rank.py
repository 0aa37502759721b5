"""A gradient that one rank refuses: the others, who wait for it, hear of it."""

from __future__ import annotations

import logging
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cluster import Cluster
from heard import Heard
from test_reducer import DROPPING, Loop
from workers import flat, pulls

import thinwire


def refused(group: Any, comes_back: bool) -> tuple[str, list[str], torch.Tensor]:
    """What this rank raises and hears when rank 1 gives a wrong shape at step 2."""
    brief = dist.new_group(list(range(dist.get_world_size())), timeout=timedelta(seconds=6))
    loop, handler, raised = Loop(brief, DROPPING), Heard(), ""
    loop.train(0, 2)
    logging.getLogger("thinwire").addHandler(handler)
    try:
        if loop.rank == 1:
            with pytest.raises(ValueError, match="whose shape is") as refusal:
                loop.reducer.reduce({**pulls(1, 2), "b": torch.zeros(51)})
            raised = str(refusal.value)
            time.sleep(2)  # the others give a sign of life every 0.3 s
        if comes_back:
            loop.train(2, 4)
        elif loop.rank != 1:
            with pytest.raises(thinwire.ExchangeError) as failure:
                loop.train(2, 3)
            raised = str(failure.value)
            assert failure.value.peers == (1,)
        else:
            time.sleep(4)
    finally:
        logging.getLogger("thinwire").removeHandler(handler)
    return raised, handler.sentences, flat(loop.module)


def test_others_hear_of_a_refused_gradient_and_go_on_with_the_right_one(cluster: Cluster) -> None:
    results = cluster.run(refused, 5, True)
    for rank, (_, heard, parameters) in enumerate(results):
        told = [one for one in heard if "rank 1, which failed at step 2 with ValueError: reduce got (51,)" in one]
        assert len(told) == (rank != 1), heard
        assert torch.equal(parameters, results[0][2])


def test_others_are_told_why_a_rank_did_not_come(cluster: Cluster) -> None:
    for rank, (raised, _, _) in enumerate(cluster.run(refused, 5, False)):
        assert "reduce got (51,) for 'b', whose shape is (50,)" in raised
        assert rank == 1 or "rank 1 had failed at step 2 with ValueError" in raised
