"""Latency and bandwidth between the ranks of a group, measured in about a second, or a few dozen round trips."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations

import torch

from thinwire.transport import Net, overhead

SMALL = 64  # bytes: what such a message takes is latency
FIRST = 64 * 1024  # bytes of the first buffer that is added up
LARGEST = 64 * 2**20
ENOUGH_S = 0.1  # a call that takes this long shows the steady rate, a shaper's burst and a stolen time slice beside it
REPEATS = 3  # two where a call takes LONG_S
SMALL_REPEATS = 15
FEW = 3  # of the latter, where they take long
LONG_S = 0.5
GROWTH = 16  # of a buffer at most, from one call to the next


@dataclass(frozen=True)
class Link:
    """What a round takes in which every rank sends n bytes to one other: ``alpha_s + beta_s_per_byte * n``.

    ``rate_bits`` is the rate behind beta, what one rank can send and receive at the same time around a ring.
    """

    alpha_s: float
    beta_s_per_byte: float

    def seconds(self, nbytes: float, rounds: float = 1) -> float:
        """What ``rounds`` rounds of a ring take that carry ``nbytes`` altogether over each rank's link."""
        return rounds * self.alpha_s + nbytes * self.beta_s_per_byte

    @property
    def rate_bits(self) -> float:
        return 8 / self.beta_s_per_byte if self.beta_s_per_byte > 0 else float("inf")

    def __str__(self) -> str:
        rate = self.rate_bits
        scale, unit = next(((s, u) for s, u in ((1e9, "Gb/s"), (1e6, "Mb/s")) if rate >= 0.9995 * s), (1e3, "kb/s"))
        return f"{1e3 * self.alpha_s:.3g} ms per round, {rate / scale:.3g} {unit}"


def measure_link(net: Net) -> Link:
    """Measure alpha and beta of a group; a collective call after which all ranks have the same numbers.

    What is timed are rings, in which every link is busy both ways: the state in which our collectives meet it, with
    whatever the ranks share (a switch, or the cores of one machine). alpha comes from an all-gather of tiny messages.
    beta comes from an all-reduce in place, which touches no fresh memory, and from the differences between two sizes: a
    shaper lets its burst pass at full speed, so a message's own time would promise more than the link holds. Sizes
    double until a call takes 0.1 s, which keeps the measurement at about a second, and the median slope counts. Where a
    call of a few bytes takes that long by itself, they grow until the bytes take as long as the rounds.
    """
    if net.size == 1:
        return Link(0.0, 0.0)
    with overhead(net):
        tiny = torch.zeros(SMALL, dtype=torch.uint8)
        rounds = net.size - 1
        slowest_s(net, lambda: net.all_gather(tiny))  # connections, buffers and code that is used for the first time
        took: list[float] = []
        while len(took) < (SMALL_REPEATS if sum(took) < LONG_S else FEW):
            took.append(slowest_s(net, lambda: net.all_gather(tiny)))
        alpha = statistics.median(took) / rounds
        nbytes, call_s = _enough(net)
        on_link = 2 * rounds / net.size  # bytes that a byte of the buffer puts on each link
        points = [
            (on_link * size, _ring_s(net, size))
            for _ in range(REPEATS if call_s < LONG_S else 2)
            for size in (nbytes, 2 * nbytes)
        ]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(points, 2) if a[0] != b[0]]
    beta = statistics.median(slopes)
    if beta <= 0:  # so fast, or so disturbed, that the difference drowns: the whole time is the better estimate
        beta = statistics.median(took / sent for sent, took in points)
    return Link(alpha, beta)


def _enough(net: Net) -> tuple[int, float]:
    """Bytes whose all-reduce takes long enough to see what a byte takes, and the seconds of the last call."""
    nbytes, idle_s = FIRST, _ring_s(net, SMALL)
    took_s = idle_s
    while 4 * nbytes <= LARGEST:
        took_s = _ring_s(net, nbytes)
        if took_s >= max(ENOUGH_S, 2 * idle_s):
            break
        # Where a call takes long whatever it carries, there should be few of them: as many more bytes as are missing.
        missing = idle_s / max(took_s - idle_s, 1e-9) if idle_s > ENOUGH_S else 2.0
        nbytes = min(LARGEST // 2, nbytes * 2 ** math.ceil(math.log2(min(GROWTH, max(2.0, missing)))))
    return nbytes, took_s


def meet(net: Net) -> None:
    """Return at about the same time on all ranks."""
    net.all_gather(torch.zeros(8, dtype=torch.uint8))  # half the rounds of an all-reduce


def slowest_s(net: Net, work: Callable[[], object]) -> float:
    """Seconds that the slowest rank takes for work that all begin together; a collective call."""
    meet(net)
    start = time.perf_counter()
    work()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    took = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    return max(float(one.view(torch.float64)) for one in net.all_gather(took.view(torch.uint8)))


def _ring_s(net: Net, nbytes: int) -> float:
    """Seconds of an all-reduce of so many bytes."""
    # Written once: no page of it is new to the system any more.
    buffer = net.to_wire(torch.ones(nbytes // 4, dtype=torch.float32))
    return slowest_s(net, lambda: net.all_reduce(buffer))
