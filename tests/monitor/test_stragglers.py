"""Which rank is named as the slowest, and what asking costs."""

from __future__ import annotations

import time

import pytest

from thinwire.monitor.stragglers import Pace, StragglerMonitor, _rounds
from thinwire.transport import ThreadNet, ThreadWorld


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7])
def test_pacer_lets_every_rank_meet_both_neighbours(size: int) -> None:
    met: list[set[int]] = [set() for _ in range(size)]
    for peers in _rounds(size):
        assert all(peers[peer] == rank for rank, peer in peers.items())
        for rank, peer in peers.items():
            met[rank].add(peer)
    assert met == [{(rank - 1) % size, (rank + 1) % size} for rank in range(size)]


def test_pace_names_who_stands_out() -> None:
    assert Pace().slowest is None and Pace((1.0,), 2.0).slowest is None
    assert Pace((1.0, 1.1, 0.9), 10.0).slowest is None  # nobody
    rank, why = Pace((5.0, 0.2, 5.1), 10.0).slowest or (None, "")
    assert rank == 1 and "waited" in why
    rank, why = Pace((5.0, 5.0, 5.1), 10.0, (0.01, 0.01, 0.09), 4096).slowest or (None, "")
    assert rank == 2 and "link" in why and "4096 bytes" in why
    assert Pace((5.0, 5.0, 5.1), 10.0, (0.0001, 0.0001, 0.0009), 4096).slowest is None  # fast enough
    assert Pace((5.0, 5.1), 10.0, (0.09, 0.09), 4096).slowest is None  # a link has two ends


def test_pace_of_two_ranks_that_run_in_turn_is_no_alarm() -> None:
    assert Pace((0.12, 0.22), 0.38).slowest is None  # 2 ms per step
    assert Pace((0.12, 1.22), 2.38).slowest is not None  # 22 ms per step


class _SlowLink(ThreadNet):
    """A net whose rank 1 needs long for every block."""

    def swap(self, peer: int, frame):  # type: ignore[no-untyped-def]
        if 1 in (peer, self.rank):
            time.sleep(0.05)
        return super().swap(peer, frame)


def test_pacer_finds_a_slow_link_and_counts_as_no_frame() -> None:
    def work(net: ThreadNet) -> tuple[Pace, int, int]:
        slow, pacer = _SlowLink(net.world, net.rank), StragglerMonitor()
        slow.traffic.handed = 7
        pacer.sample(slow, waited_s=1.0, handed=50_000, links=True)
        return pacer.pace, slow.traffic.handed, slow.traffic.overhead

    for pace, handed, sent in ThreadWorld(4).run(work):
        assert pace.slowest is not None and pace.slowest[0] == 1 and "link" in pace.slowest[1]
        assert pace.waited_s == (1.0,) * 4 and handed == 7
        assert 2 * 1024 < sent < 2 * 1024 + 200  # a block for each neighbour, and a few numbers
