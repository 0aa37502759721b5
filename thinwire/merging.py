"""Which buckets of a backward pass travel together: chosen from measured times, and the same on all ranks.

An exchange of its own lets a bucket travel while backward goes on; an exchange together saves the fixed cost of one.
This is the choice of merged-gradient wait-free backpropagation (Shi, Chu and Li, MG-WFBP, 2019), made once from what
the first steps took.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from thinwire.transport import Net

log = logging.getLogger("thinwire")

_TINY = 64  # bytes: what an all-gather of such frames takes is latency
_CALLS = 9
_WORTH = 0.01  # of the time from the first bucket to the last exchange: below this a plan is noise


def best_groups(ready: Sequence[float], cost: Sequence[float], saving: float) -> tuple[int, ...]:
    """Return the places of the buckets that end a group, so that the last exchange ends as early as possible.

    ``ready`` are the times at which the buckets are complete, rising; ``cost`` what each one's own exchange takes;
    joining two exchanges costs ``saving`` less than both. Exchanges run one after the other, a group's begins when its
    last bucket is ready. Of equally good groupings the one with more groups is taken.
    """
    ends: list[tuple[float, int, tuple[int, ...]]] = [(0.0, 0, ())]  # by number of buckets: time, -groups, places
    for stop in range(1, len(ready) + 1):
        choices = []
        for start in range(stop):
            time_, groups, places = ends[start]
            took = sum(cost[start:stop]) - saving * (stop - start - 1)
            choices.append((max(time_, ready[stop - 1]) + took, groups - 1, (*places, stop - 1)))
        ends.append(min(choices))
    return ends[-1][2]


def finish(ready: Sequence[float], cost: Sequence[float], saving: float, places: Sequence[int]) -> float:
    """When the last exchange ends with this grouping."""
    end, start = 0.0, 0
    for place in places:
        end = max(end, ready[place]) + sum(cost[start : place + 1]) - saving * (place - start)
        start = place + 1
    return end


def fixed_cost(numels: Sequence[int], cost: Sequence[float], latency: float) -> float:
    """What an exchange takes whatever its size: where a straight line through the costs begins, at least the latency
    and at most the cheapest exchange."""
    mean_n, mean_c = statistics.fmean(numels), statistics.fmean(cost)
    spread = sum((n - mean_n) ** 2 for n in numels)
    slope = sum((n - mean_n) * (c - mean_c) for n, c in zip(numels, cost, strict=True)) / spread if spread else 0.0
    return min(max(latency, mean_c - max(slope, 0.0) * mean_n), min(cost))


@dataclass
class _Pass:
    """What one backward pass has shown so far."""

    ordinals: list[int] = field(default_factory=list)  # of each bucket's first parameter
    numels: list[int] = field(default_factory=list)
    ready: list[float] = field(default_factory=list)
    cost: list[float] = field(default_factory=list)


class Merger:
    """Times some passes of equal buckets, agrees with the other ranks, and then says where groups end.

    ``arrived`` is called inside backward, ``exchanged`` by the thread that exchanges. The plan is made while the last
    exchange of a pass is still under way on every rank, so that all use it from the next pass on. Buckets that differ
    from those of the plan (DDP rebuilds them after the first step) end it.
    """

    TIMED = 3  # passes of the same buckets

    def __init__(self) -> None:
        self.plan: tuple[int, ...] | None = None  # None: nothing decided, every bucket travels on its own
        self._planned: list[int] = []
        self._timed: list[_Pass] = []
        self._now = _Pass()
        self._ended = False

    def arrived(self, ordinal: int, numel: int, is_last: bool) -> bool:
        """Note a bucket by its first parameter; return whether it ends a group, whose exchange then begins."""
        if self._ended or ordinal in self._now.ordinals:  # the latter after a pass that was broken off
            self._now = _Pass()
        self._ended = is_last
        place = len(self._now.ordinals)
        self._now.ordinals.append(ordinal)
        self._now.numels.append(numel)
        self._now.ready.append(time.perf_counter())
        if self.plan is not None and self._planned[place : place + 1] != [ordinal]:
            self.plan, self._timed = None, []
        return is_last or self.plan is None or place in self.plan

    def exchanged(self, seconds: float, is_last: bool, net: Net) -> None:
        """Note what an exchange took; after the last one of enough equal passes, decide (a collective call)."""
        if self.plan is not None:
            return
        self._now.cost.append(seconds)
        if not is_last:
            return
        if self._timed and self._timed[-1].ordinals != self._now.ordinals:
            self._timed = []
        self._timed.append(self._now)
        if len(self._timed) > self.TIMED:  # the first pass of new buckets lays out new state: it is not counted
            self._decide(net)

    def _decide(self, net: Net) -> None:
        passes = self._timed[1:]
        ready = [statistics.median(p.ready[i] - p.ready[0] for p in passes) for i in range(len(passes[0].ordinals))]
        cost = [statistics.median(p.cost[i] for p in passes) for i in range(len(passes[0].ordinals))]
        # The slowest rank's buckets; and the cheapest view of an exchange, because the others' contains waiting for it.
        numbers = torch.tensor([*ready, *(-c for c in cost), _latency(net)], dtype=torch.float64)
        handed = net.traffic.handed
        net.all_reduce(numbers, largest=True)
        net.traffic.handed = handed  # no gradient of a step
        agreed = numbers.tolist()
        ready, cost, latency = agreed[: len(ready)], [-c for c in agreed[len(ready) : -1]], agreed[-1]
        saving = fixed_cost(passes[0].numels, cost, latency)
        alone = tuple(range(len(ready)))
        plan = best_groups(ready, cost, saving)
        before, after = finish(ready, cost, saving, alone), finish(ready, cost, saving, plan)
        self.plan = plan if before - after > _WORTH * before else alone
        self._planned = passes[0].ordinals
        log.info(
            "thinwire: %d buckets travel in %d exchanges (latency %.3g ms, fixed cost %.3g ms, expected end %.4g ms "
            "instead of %.4g ms after the first bucket)",
            len(ready), len(self.plan), 1e3 * latency, 1e3 * saving, 1e3 * after, 1e3 * before,
        )  # fmt: skip


def _latency(net: Net) -> float:
    """Seconds of an all-gather that carries next to nothing."""
    handed, frame, seconds = net.traffic.handed, torch.zeros(_TINY, dtype=torch.uint8), []
    for _ in range(_CALLS):
        start = time.perf_counter()
        net.all_gather(frame)
        seconds.append(time.perf_counter() - start)
    net.traffic.handed = handed
    return statistics.median(seconds)
