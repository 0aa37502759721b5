"""What every net does: the calls, what they count, and work that is done while frames travel."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass
class Traffic:
    """Bytes and seconds of one rank.

    ``handed`` counts each buffer once, as it is given to the transport (a rank's own part of an all-to-all stays home
    and is not counted). ``sent`` and ``received`` count what crosses this rank's link under the collective's algorithm:
    an all-gather sends a frame to P - 1 others around a ring, an all-reduce moves 2 (P - 1) / P of the buffer.
    ``aside`` is what was sent inside ``aside(net)``, and in none of the others.
    """

    handed: int = 0
    sent: int = 0
    received: int = 0
    seconds: float = 0.0
    overhead: int = 0

    def count(self, handed: int, sent: int, received: int) -> None:
        self.handed += handed
        self.sent += sent
        self.received += received


OverlapWith = Callable[[], object] | None
"""Work of a rank's own that has to be done anyway, and costs nothing while the link is what everybody waits for."""


class Net(Protocol):
    """A group of ranks. Every call is a collective that all ranks make in the same order, except send and receive."""

    rank: int
    size: int
    traffic: Traffic
    stage: str  # what the next calls are for, for the error that names it

    def to_wire(self, tensor: Tensor) -> Tensor:
        """The tensor where the transport reads it: on the host for Gloo, pinned; the others take it as it is."""
        ...

    def all_gather(
        self, frame: Tensor, room: Tensor | None = None, pairwise: bool = False, overlap_with: OverlapWith = None
    ) -> list[Tensor]:
        """Everybody's frames, (B,) uint8 with the same B everywhere; ``room`` is memory that may be used for them,
        ``meanwhile`` is done while they travel.

        Gloo holds all of them a second time while it gathers. With ``pairwise``, which all ranks then say, long frames
        go from rank to rank instead: the same bytes on every link, without that memory.
        """
        ...

    def gather_each(self, frame: Tensor, room: Tensor | None = None) -> Iterator[tuple[int, Tensor]]:
        """``all_gather`` one frame after the other, with its rank: each may be gone when the next one comes.

        ``room`` is memory that may be used for them, of a frame's length at least. All of them must be taken.
        """
        ...

    def all_to_all(self, frames: Sequence[Tensor], nbytes: Sequence[int], room: Tensor | None = None) -> list[Tensor]:
        """Send frames[r] to rank r; nbytes[r] is the known length of what comes from rank r.

        The longest of the frames that a rank sends and gets must be as long on every rank: it decides the way. ``room``
        is memory that may be used for what comes from the others, as long as that. The own frame may come back itself.
        """
        ...

    def swap(self, peer: int, frame: Tensor, room: Tensor | None = None, overlap_with: OverlapWith = None) -> Tensor:
        """Give a frame, (B,) uint8, and get the peer's, (B,); ``room`` is memory that may be used for that."""
        ...

    def send(self, peer: int, frame: Tensor) -> None: ...

    def receive(self, peer: int, nbytes: int) -> Tensor: ...

    def broadcast(self, tensor: Tensor, root: int) -> None: ...  # in place

    def all_reduce(self, tensor: Tensor, largest: bool = False) -> None: ...  # sum (or max) in place


class GroupNet(Net, Protocol):
    """A net for small agreements between workers."""

    device: torch.device  # where its tensors lie


@contextmanager
def overhead(net: Net) -> Iterator[None]:
    """What is done here is no gradient of a step (a measurement, a method that is left, an agreement): its bytes are
    counted apart, so that those of the exchanges, their seconds and the compression ratio belong together."""
    before, traffic = replace(net.traffic), net.traffic
    try:
        yield
    finally:
        traffic.overhead += traffic.sent - before.sent
        traffic.handed, traffic.sent, traffic.received = before.handed, before.sent, before.received
        traffic.seconds = before.seconds


class Counted:
    """The counting that every kind of net shares."""

    rank: int
    size: int

    def __init__(self) -> None:
        self.traffic = Traffic()
        self.stage = "exchange"

    def _timed(self, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        try:
            return work()
        finally:
            self.traffic.seconds += time.perf_counter() - start

    def _wait(self, works: Sequence[Any], overlap_with: OverlapWith) -> None:
        """Return when all are done, or one has failed; ``meanwhile`` is done first, and is no time on the wire."""
        start = time.perf_counter()
        if overlap_with is not None:
            overlap_with()
            self.traffic.seconds -= time.perf_counter() - start
        for work in works:  # after a failure the wire refuses further exchanges: nobody waits for the rest
            work.wait()

    def _count_all_gather(self, nbytes: int) -> None:
        others = self.size - 1
        self.traffic.count(nbytes if others else 0, others * nbytes, others * nbytes)

    def _count_all_to_all(self, sent: Sequence[int], received: Sequence[int]) -> None:
        out = sum(sent) - sent[self.rank]
        self.traffic.count(out, out, sum(received) - received[self.rank])

    def _count_all_reduce(self, nbytes: int) -> None:
        on_link = round(2 * (self.size - 1) / self.size * nbytes)
        self.traffic.count(nbytes if self.size > 1 else 0, on_link, on_link)

    def _count_broadcast(self, nbytes: int, root: int) -> None:
        if self.rank == root:
            self.traffic.count(nbytes if self.size > 1 else 0, (self.size - 1) * nbytes, 0)
        else:
            self.traffic.count(0, 0, nbytes)
