"""Ranks that are threads: they take turns, and one failure ends all."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from thinwire.transport import ThreadNet, ThreadWorld


def test_thread_ranks_take_turns_and_one_failure_ends_all() -> None:
    world = ThreadWorld(4, 30, one_at_a_time=True)
    order: list[int] = []

    def work(net: ThreadNet) -> None:
        for _ in range(3):
            with world.turn(net.rank):
                order.append(net.rank)
        if net.rank == 2:
            raise ValueError("rank 2 has had enough")
        with world.turn(net.rank):
            pass
        net.all_reduce(torch.ones(1))

    with pytest.raises(ValueError, match="had enough"):
        world.run(work)
    assert order == [0, 1, 2, 3] * 3
    assert threading.active_count() < 20


def test_thread_rank_that_waits_for_a_message_hears_of_a_failure_at_once() -> None:
    world = ThreadWorld(2, 100, one_at_a_time=True)

    def work(net: ThreadNet) -> None:
        if net.rank == 1:
            raise ValueError("rank 1 has had enough")
        net.swap(1, torch.zeros(4, dtype=torch.uint8))

    started = time.monotonic()
    with pytest.raises(ValueError, match="had enough"):
        world.run(work)
    assert time.monotonic() - started < 50


def test_thread_ranks_that_wait_too_long_get_one_sentence() -> None:
    world = ThreadWorld(2, 0.1, one_at_a_time=True)
    with pytest.raises(TimeoutError, match=r"waited 0\.2 s for one of them"):
        world.run(lambda net: net.all_reduce(torch.ones(1)) if net.rank == 0 else None)
