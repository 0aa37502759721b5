"""attach on some ranks only: who is missing is said while the others wait, and again when they give up."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist
from cluster import Cluster, group_of_same_ranks
from heard import Heard
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from workers import sentence_of

import thinwire
from thinwire.transport import attach_roll_call
from thinwire.transport.attach_roll_call import wait_for_all


def some(group: dist.ProcessGroup) -> None:
    """Rank 0 alone, then all of them, and one late."""
    rank = dist.get_rank(group)
    short = group_of_same_ranks(group, timeout_s=2)
    model = DDP(nn.Linear(4, 3), process_group=short)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if rank == 0:
        start = time.monotonic()
        text = sentence_of(thinwire.ExchangeError, lambda: thinwire.attach(model, optimizer, "dgc"))
        assert "not every rank called thinwire.attach" in text and "ranks 1, 2 did not" in text
        assert 1.5 < time.monotonic() - start < 10
    dist.barrier(group)
    time.sleep(0.3 * rank)
    wire = thinwire.attach(model, optimizer, "dgc:density=0.5")
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert wire.stats.steps == 1
    wire.detach()
    thinwire.attach(model, optimizer, "dense").detach()


def test_ranks_that_do_not_attach_are_named_and_may_come_later(cluster: Cluster) -> None:
    cluster.run(some, 3)


def test_waiting_is_told_once_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach_roll_call, "PATIENCE_S", 0.1)
    store, handler = dist.HashStore(), Heard()
    late = threading.Timer(0.6, lambda: wait_for_all(store, 0, 1, (0, 1), 5.0))
    late.start()
    attach_roll_call.log.addHandler(handler)
    try:
        wait_for_all(store, 0, 0, (0, 1), 5.0)
    finally:
        attach_roll_call.log.removeHandler(handler)
    late.join()
    (sentence,) = handler.sentences
    assert "rank 0 waits for rank 1 to call thinwire.attach" in sentence


class Gone:
    def set(self, key: str, value: str) -> None:
        raise RuntimeError("Connection reset by peer")


def test_a_store_that_goes_away_is_said() -> None:
    assert "hosts it has ended" in sentence_of(thinwire.ExchangeError, lambda: wait_for_all(Gone(), 0, 1, (0, 1), 5.0))
