"""Latency and bandwidth between the ranks of a group, measured in a fraction of a second."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations

import torch
from torch import Tensor

from thinwire.transport import Net

SMALL = 64  # bytes: what such a message takes is latency
FIRST = 16 * 1024
ENOUGH_S = 0.02  # a call that takes this long shows the steady rate: shapers let less than a millisecond pass at once
MOST_ON_HOST = 64 * 2**20  # bytes that an all-gather may leave on one rank
REPEATS = 3
PATTERN_S = 0.1  # what the ring takes with the bytes that other patterns are compared on
MOST_SLOWDOWN = 4.0  # more than this is a disturbance, not the pattern
SMALL_REPEATS = 15


@dataclass(frozen=True)
class Link:
    """What a round takes in which every rank sends n bytes to one other: ``alpha_s + beta_s_per_byte * n``.

    ``rate_bits`` is the rate behind beta, what one rank can send and receive at the same time around a ring. Other
    patterns can take longer than the ring all-gather with the same bytes: ``scatter``, ``swap`` and ``reduce`` say
    how many times, for messages to all others, for two ranks that exchange, and for a ring that also adds. They
    are 1 unless ``measure_patterns`` was asked.
    """

    alpha_s: float
    beta_s_per_byte: float
    scatter: float = 1.0
    swap: float = 1.0
    reduce: float = 1.0

    def seconds(self, nbytes: float, rounds: float = 1) -> float:
        """What ``rounds`` rounds of a ring take that carry ``nbytes`` altogether over each rank's link."""
        return rounds * self.alpha_s + nbytes * self.beta_s_per_byte

    @property
    def rate_bits(self) -> float:
        return 8 / self.beta_s_per_byte if self.beta_s_per_byte > 0 else float("inf")

    def __str__(self) -> str:
        rate = self.rate_bits
        scale, unit = next(((s, u) for s, u in ((1e9, "Gb/s"), (1e6, "Mb/s")) if rate >= 0.9995 * s), (1e3, "kb/s"))
        return f"{1e3 * self.alpha_s:.3g} ms a round, {rate / scale:.3g} {unit}"


def measure_link(net: Net) -> Link:
    """Measure alpha and beta of a group; a collective call after which all ranks have the same numbers.

    What is timed is the ring all-gather, P - 1 rounds in which every link is busy both ways: the state in which our
    collectives meet it, with whatever the ranks share (a switch, or the cores of one machine). alpha comes from tiny
    messages. beta comes from the differences between large ones: a shaper lets its burst pass at full speed, so a
    message's own time would promise more than the link holds. Sizes double until a call takes 20 ms, which keeps
    the whole measurement below a second from 10 Mb/s upwards, and each size's repeats count by their median.
    """
    if net.size == 1:
        return Link(0.0, 0.0)
    handed, seconds = net.traffic.handed, net.traffic.seconds
    rounds = net.size - 1
    _call(net, SMALL)  # connections, buffers and code that is used for the first time
    alpha = statistics.median(_call(net, SMALL) for _ in range(SMALL_REPEATS)) / rounds
    points: list[tuple[float, float]] = []  # bytes over each link, seconds
    nbytes = FIRST
    while True:
        took = _call(net, nbytes)
        if took >= ENOUGH_S or 4 * net.size * nbytes > MOST_ON_HOST:
            break
        nbytes *= 2
    for size in (nbytes, 2 * nbytes):
        points += [(rounds * size, _call(net, size)) for _ in range(REPEATS)]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(points, 2) if a[0] != b[0]]
    beta = statistics.median(slopes)
    if beta <= 0:  # so fast, or so disturbed, that the difference drowns: the whole time is the better estimate
        beta = statistics.median(took / sent for sent, took in points)
    # A measurement is no gradient of a step: it stays out of the compression ratio and out of the seconds.
    net.traffic.handed, net.traffic.seconds = handed, seconds
    return Link(alpha, beta)


def measure_patterns(net: Net, link: Link) -> Link:
    """Add to a link how much longer than the ring all-gather the other patterns take; a collective call.

    Gloo posts an all-to-all's messages at once, and where they meet in front of one receiver packets are lost; two
    ranks that swap share one connection. On shaped links both cost up to half the rate. An all-reduce cuts its buffer
    into more pieces, which uses a link better, and adds them up, which takes the processor.
    """
    if net.size == 1 or link.beta_s_per_byte <= 0:
        return link
    handed, seconds = net.traffic.handed, net.traffic.seconds
    share = int(max(FIRST, min(PATTERN_S / link.beta_s_per_byte, MOST_ON_HOST / 4) / (net.size - 1)))
    frame = torch.zeros(share, dtype=torch.uint8)
    peer, whole = net.rank ^ 1, torch.zeros(share * (net.size - 1), dtype=torch.uint8)

    def scatter() -> Tensor:
        return net.all_to_all([frame] * net.size, [share] * net.size)[net.rank - 1]

    def swap() -> Tensor:
        return net.swap(peer, whole) if peer < net.size else frame

    sent, total = whole.numel(), torch.zeros(share * net.size // 8)  # 2 (P - 1) / P of it cross each link

    def reduce() -> Tensor:
        net.all_reduce(total)
        return total

    def factor(work: Callable[[], Tensor], rounds: int, least: float) -> float:
        took = statistics.median(_timed(net, work) for _ in range(REPEATS)) - rounds * link.alpha_s
        return min(MOST_SLOWDOWN, max(least, took / (sent * link.beta_s_per_byte)))

    found = replace(
        link, scatter=factor(scatter, 1, 1.0), swap=factor(swap, 1, 1.0), reduce=factor(reduce, 2 * (net.size - 1), 0.5)
    )
    net.traffic.handed, net.traffic.seconds = handed, seconds
    return found


def _call(net: Net, nbytes: int) -> float:
    """Seconds that an all-gather of so many bytes a rank takes, for the slowest rank."""
    frame = torch.zeros(nbytes, dtype=torch.uint8)
    return _timed(net, lambda: net.all_gather(frame)[-1])


def _timed(net: Net, work: Callable[[], Tensor]) -> float:
    net.all_reduce(torch.zeros(1, dtype=torch.float64))  # all begin together
    start = time.perf_counter()
    int(work()[-1])  # reading waits for a GPU
    took = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    net.all_reduce(took, largest=True)
    return float(took)
