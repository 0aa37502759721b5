"""Which buckets of a backward pass travel together: chosen from measured times, and the same on all ranks.

An exchange of its own lets a bucket travel while backward goes on; an exchange together saves the fixed cost of one.
This is the choice of merged-gradient wait-free backpropagation (Shi, Chu and Li, MG-WFBP, 2019), made once from what
the first steps took, with one thing more: where all cores are busy, only the network's part of an exchange hides behind
backward. Its computation takes from backward what it needs, and the fixed part of that once an exchange.

THINWIRE_MERGE forces another choice, to see what the measured one is worth: ``none`` gives every bucket an exchange of
its own, ``all`` makes one of them all. It changes times, and no result.
"""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from thinwire.edges.bucket_plan import WholeStep
from thinwire.engine.worker import Bucket
from thinwire.transport import Net, overhead

log = logging.getLogger("thinwire")

VARIABLE = "THINWIRE_MERGE"
CHOICES = ("auto", "none", "all")

_TINY = 64  # bytes: what an all-gather of such frames takes is latency
_CALLS = 9
_SHORT, _LONG = 1 << 12, 1 << 18  # bytes: between these lies the frame whose all-gather tells the bandwidth
_LONG_CALLS = 3
_WORTH = 0.01  # of the time from the first bucket to the last exchange: for less than this no exchange is made


def choice() -> str:
    """How the environment wants buckets to be merged."""
    how = os.environ.get(VARIABLE, "auto")
    if how not in CHOICES:
        raise ValueError(f"{VARIABLE} must be one of {', '.join(CHOICES)}, not {how!r}")
    return how


def best_groups(ready: Sequence[float], cost: Sequence[float], saving: float, each: float = 0.0) -> tuple[int, ...]:
    """Return the places of the buckets that end a group: the fewest groups with which the last exchange ends as early
    as possible, up to a hundredth.

    ``ready`` are the times at which the buckets are complete, rising; ``cost`` what each one's own exchange takes;
    joining two exchanges costs ``saving`` less than both. Exchanges run one after the other, a group's begins when its
    last bucket is ready. Every exchange delays backward by ``each``.
    """
    fronts: list[dict[int, tuple[float, tuple[int, ...]]]] = [{0: (0.0, ())}]  # by number of buckets, then of groups
    for stop in range(1, len(ready) + 1):
        best: dict[int, tuple[float, tuple[int, ...]]] = {}
        for start in range(stop):
            took = sum(cost[start:stop]) - saving * (stop - start - 1)
            for groups, (end, places) in fronts[start].items():
                choice = (max(end, ready[stop - 1]) + took, (*places, stop - 1))
                best[groups + 1] = min(best.get(groups + 1, choice), choice)
        # More groups are only kept where they end earlier.
        front: dict[int, tuple[float, tuple[int, ...]]] = {}
        for groups in sorted(best):
            if not front or best[groups][0] < min(end for end, _ in front.values()):
                front[groups] = best[groups]
        fronts.append(front)
    ends = {groups: end + each * groups for groups, (end, _) in fronts[-1].items()}
    enough = (1 + _WORTH) * min(ends.values())
    return fronts[-1][min(groups for groups, end in ends.items() if end <= enough)][1]


def finish(
    ready: Sequence[float], cost: Sequence[float], saving: float, places: Sequence[int], each: float = 0.0
) -> float:
    """When the last exchange ends with this grouping."""
    end, start = 0.0, 0
    for place in places:
        end = max(end, ready[place]) + sum(cost[start : place + 1]) - saving * (place - start)
        start = place + 1
    return end + each * len(places)


def fixed_cost(numels: Sequence[int], cost: Sequence[float]) -> float:
    """What an exchange takes whatever its size: where a line through the costs begins, at most the cheapest of them."""
    mean_n, mean_c = statistics.fmean(numels), statistics.fmean(cost)
    spread = sum((n - mean_n) ** 2 for n in numels)
    slope = sum((n - mean_n) * (c - mean_c) for n, c in zip(numels, cost, strict=True)) / spread if spread else 0.0
    return min(max(0.0, mean_c - max(slope, 0.0) * mean_n), min(cost))


@dataclass(frozen=True)
class Spent:
    """What one exchange took of its rank, the waiting for others left out."""

    work_s: float  # seconds of computing, as they passed
    processor_s: float  # and what a processor really did in that time: less, where others had their turns
    sent: int  # bytes over this rank's link


class Meter:
    """Begins with an exchange; ``spent`` is called by the same thread when it has ended."""

    def __init__(self, net: Net) -> None:
        self._traffic = net.traffic
        self._before = self._now()

    def _now(self) -> tuple[float, float, int]:
        return time.perf_counter() - self._traffic.seconds, time.thread_time(), self._traffic.sent

    def spent(self) -> Spent:
        work_s, processor_s, sent = (now - then for now, then in zip(self._now(), self._before, strict=True))
        return Spent(work_s, processor_s, int(sent))


@dataclass
class _Pass:
    """What one backward pass has shown so far."""

    ordinals: list[int] = field(default_factory=list)  # of each bucket's first parameter
    numels: list[int] = field(default_factory=list)
    ready: list[float] = field(default_factory=list)
    spent: list[Spent] = field(default_factory=list)


class BucketFusion:
    """Times some passes of equal buckets, agrees with the other ranks, and then says where groups end.

    ``arrived`` is called inside backward, ``exchanged`` by the thread that exchanges. The plan is made while the last
    exchange of a pass is still under way on every rank, so that all use it from the next pass on. Buckets that differ
    from those of the plan (DDP rebuilds them after the first step) end it. With ``how`` "none" or "all" nothing is
    timed and there is no plan. ``rounds`` is how many latencies an exchange of the method contains
    (``Plan.waits``).
    """

    TIMED = 3  # passes of the same buckets

    def __init__(self, how: str = "auto", *, rounds: float = 1) -> None:
        assert how in CHOICES
        self.how, self._rounds = how, rounds
        self.plan: tuple[int, ...] | None = None  # None: nothing decided, every bucket travels on its own
        self._planned: list[int] = []
        self._timed: list[_Pass] = []
        self._now = _Pass()
        self._ended = False

    def arrived(self, ordinal: int, numel: int, is_last: bool) -> bool:
        """Note a bucket by its first parameter; return whether it ends a group, whose exchange then begins."""
        if self.how != "auto":
            return is_last or self.how == "none"
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

    def exchanged(self, spent: Spent, is_last: bool, net: Net) -> None:
        """Note what an exchange took; after the last one of enough equal passes, decide (a collective call)."""
        if self.plan is not None or self.how != "auto":
            return
        self._now.spent.append(spent)
        if not is_last:
            return
        if self._timed and self._timed[-1].ordinals != self._now.ordinals:
            self._timed = []
        self._timed.append(self._now)
        if len(self._timed) > self.TIMED:  # the first pass of new buckets lays out new state: it is not counted
            self._decide(net)

    def _decide(self, net: Net) -> None:
        passes = self._timed[1:]
        places = range(len(passes[0].ordinals))
        ready = [statistics.median(p.ready[i] - p.ready[0] for p in passes) for i in places]
        work = [statistics.median(p.spent[i].work_s for p in passes) for i in places]
        sent = [float(passes[-1].spent[i].sent) for i in places]
        with overhead(net):
            ready, work, sent, (crowd,) = _largest(net, ready, work, sent, [crowding(passes)])
            # Now that all ranks have come here, nothing else is under way: the links are measured as they are.
            frame = int(min(_LONG, max(_SHORT, sum(sent) / max(1, net.size - 1))))
            latency = _all_gather_s(net, _TINY, _CALLS)
            beta = max(0.0, _all_gather_s(net, frame, _LONG_CALLS) - latency) / (frame * max(1, net.size - 1))
            ((latency, beta),) = _largest(net, [latency, beta])
        latency *= self._rounds
        fixed = fixed_cost(passes[0].numels, work)
        cost = [latency + beta * nbytes + (1 - crowd) * w for nbytes, w in zip(sent, work, strict=True)]
        saving, each = latency + (1 - crowd) * fixed, crowd * fixed
        self.plan = best_groups(ready, cost, saving, each)
        self._planned = passes[0].ordinals
        log.info(
            "thinwire: %d buckets travel in %d exchanges (latency %.3g ms, %.3g Mb/s, fixed work %.3g ms, busy cores "
            "%.0f %%, expected end %.4g ms after the first bucket, %.4g ms with an exchange per bucket)",
            len(ready), len(self.plan), 1e3 * latency, 8e-6 / beta if beta else float("inf"), 1e3 * fixed, 100 * crowd,
            1e3 * finish(ready, cost, saving, self.plan, each), 1e3 * finish(ready, cost, saving, places, each),
        )  # fmt: skip


def crowding(passes: Sequence[_Pass]) -> float:
    """How much of an exchange's work delays backward, from 0 (there are idle cores) to 1 (it waited for a processor at
    least as long as it had one)."""
    work_s = sum(spent.work_s for one in passes for spent in one.spent)
    processor_s = sum(spent.processor_s for one in passes for spent in one.spent)
    return min(1.0, max(0.0, work_s / processor_s - 1.0)) if processor_s > 0 else 0.0


def _largest(net: Net, *lists: list[float]) -> list[list[float]]:
    """The largest of all ranks' numbers, place by place."""
    numbers = torch.tensor([number for one in lists for number in one], dtype=torch.float64)
    net.all_reduce(numbers, largest=True)
    return [part.tolist() for part in numbers.split([len(one) for one in lists])]


def _all_gather_s(net: Net, nbytes: int, calls: int) -> float:
    """Seconds of an all-gather of frames of this length, which go the way that they go in an exchange."""
    frame, seconds = torch.zeros(nbytes, dtype=torch.uint8), []
    for _ in range(calls):
        start = time.perf_counter()
        net.all_gather(frame, pairwise=True)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


class FusedBuckets(WholeStep):
    """The groups of buckets that fusion found to be faster; each bucket alone until then."""

    def __init__(self, fusion: BucketFusion) -> None:
        super().__init__()
        self.fusion = fusion

    def ends_group(self, bucket: Bucket) -> bool:
        return self.fusion.arrived(bucket.ordinals[0], bucket.buffer.numel(), bucket.is_last)
