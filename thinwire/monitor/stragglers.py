"""Which rank the others wait for: a few bytes every so many steps.

A rank that computes slowly comes last to every exchange and waits least in it. A rank whose link is slow makes
everybody wait alike; it is found by swapping a small block with both neighbours on the ring: it is slow with either of
them, its neighbours only with it. Nothing of this takes part in a result, and its bytes are counted apart.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from thinwire.transport import Net, overhead

SAMPLE_EVERY = 50  # steps
MIN_PROBE, MAX_PROBE = 1 << 10, 1 << 16  # bytes; in between half a step's frames, so that 2 % are never exceeded
LATE_SHARE = 0.2  # of the time: what the others must wait more than the slow rank
LATE_S = 0.005  # a step: below that it is the scheduler that lets one rank run before the other
SLOW_LINK = 3.0  # times the others' median
SLOW_LINK_S = 0.005  # below that a block is fast enough for everybody


@dataclass(frozen=True)
class Pace:
    """The last sample: seconds that each rank waited for others, of ``window_s``, and its time for a block."""

    waited_s: tuple[float, ...] = ()
    window_s: float = 0.0
    block_s: tuple[float, ...] = ()  # empty where links were not compared
    block_nbytes: int = 0

    @property
    def slowest(self) -> tuple[int, str] | None:
        """The rank that holds the others up, and how; None where none stands out."""
        if len(self.waited_s) < 2:
            return None
        late = min(range(len(self.waited_s)), key=self.waited_s.__getitem__)
        others = [waited for rank, waited in enumerate(self.waited_s) if rank != late]
        lost_s = statistics.median(others) - self.waited_s[late]
        if lost_s > max(LATE_SHARE * self.window_s, LATE_S * SAMPLE_EVERY):
            return (
                late,
                f"it waited {self.waited_s[late]:.2g} s of {self.window_s:.2g} s, the others {min(others):.2g} s",
            )
        if len(self.block_s) > 2:
            slow = max(range(len(self.block_s)), key=self.block_s.__getitem__)
            usual = statistics.median(seconds for rank, seconds in enumerate(self.block_s) if rank != slow)
            if self.block_s[slow] > max(SLOW_LINK_S, SLOW_LINK * usual):
                times = f"{self.block_s[slow] * 1e3:.3g} ms, the others {usual * 1e3:.3g} ms"
                return slow, f"its link took {times} for {self.block_nbytes} bytes"
        return None


class StragglerMonitor:
    """Takes the samples; all ranks call ``sample`` after the same steps."""

    def __init__(self) -> None:
        self.pace = Pace()
        self._waited_s, self._handed = 0.0, 0
        self._since_s = time.perf_counter()

    def sample(
        self, net: Net, waited_s: float, handed: int, links: bool, numbers: Sequence[float] = ()
    ) -> list[list[float]]:
        """``waited_s`` and ``handed`` are the totals of this rank so far; ``links``: compare them too. Return the
        ``numbers`` of all ranks, which travel along."""
        now_s = time.perf_counter()
        mine = [waited_s - self._waited_s, now_s - self._since_s, (handed - self._handed) / SAMPLE_EVERY, *numbers]
        net.stage = "compare ranks' pace"
        with overhead(net):
            everybody = _gather(net, mine)
            waited, window_s = tuple(row[0] for row in everybody), max(row[1] for row in everybody)
            block_s: tuple[float, ...] = ()
            nbytes = int(min(MAX_PROBE, max(MIN_PROBE, max(row[2] for row in everybody) / 2)))
            if links and net.size > 2:
                block_s = _probe(net, nbytes)
        self.pace = Pace(waited, window_s, block_s, nbytes)
        self._waited_s, self._handed = waited_s, handed
        self._since_s = time.perf_counter()
        return [row[3:] for row in everybody]


def _gather(net: Net, numbers: list[float]) -> list[list[float]]:
    frame = torch.tensor(numbers, dtype=torch.float32).view(torch.uint8)
    return [part.cpu().clone().view(torch.float32).tolist() for part in net.all_gather(frame)]


def _probe(net: Net, nbytes: int) -> tuple[float, ...]:
    """Every rank's seconds for a block to and from the faster of its two neighbours on the ring."""
    block, best = torch.zeros(nbytes, dtype=torch.uint8), [float("inf")] * net.size
    for peers in _rounds(net.size):
        start_s = time.perf_counter()
        if net.rank in peers:
            net.swap(peers[net.rank], block)
        spent_s = time.perf_counter() - start_s if net.rank in peers else float("inf")
        # Hearing from everybody also starts the next round on all ranks at about the same time.
        best = [min(pair) for pair in zip(best, (row[0] for row in _gather(net, [spent_s])), strict=True)]
    return tuple(best)


def _rounds(size: int) -> list[dict[int, int]]:
    """Who swaps with whom: in two rounds, three for an odd size, every rank meets both neighbours on the ring."""
    edges = [(rank, (rank + 1) % size) for rank in range(size)]
    rounds = [edges[0 : size - size % 2 : 2], edges[1::2], edges[-1:] if size % 2 else []]
    return [{**dict(pairs), **{b: a for a, b in pairs}} for pairs in rounds if pairs]
