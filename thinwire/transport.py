"""torch.distributed behind a byte-level face, with counters; and ranks as threads of one process.

A ``Net`` moves uint8 frames (and, for the dense methods, float vectors). It knows nothing about what is inside them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from queue import Queue
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.errors import ExchangeError
from thinwire.lookout import Lookout, reason_of
from thinwire.timing import DeviceSpans, mark


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
    aside: int = 0

    def count(self, handed: int, sent: int, received: int) -> None:
        self.handed += handed
        self.sent += sent
        self.received += received


GRACE_S = 5.0  # for threads that were told to end
_ROUNDS_FROM = 1 << 17  # bytes: messages of this length may go round by round on Gloo


Meanwhile = Callable[[], object] | None
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
        self, frame: Tensor, room: Tensor | None = None, by_rounds: bool = False, meanwhile: Meanwhile = None
    ) -> list[Tensor]:
        """Everybody's frames, (B,) uint8 with the same B everywhere; ``room`` is memory that may be used for them,
        ``meanwhile`` is done while they travel.

        Gloo holds all of them a second time while it gathers. With ``by_rounds``, which all ranks then say, long frames
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

    def swap(self, peer: int, frame: Tensor, room: Tensor | None = None, meanwhile: Meanwhile = None) -> Tensor:
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
def aside(net: Net) -> Iterator[None]:
    """What is done here is no gradient of a step (a measurement, a method that is left, an agreement): its bytes are
    counted apart, so that those of the exchanges, their seconds and the compression ratio belong together."""
    before, traffic = replace(net.traffic), net.traffic
    try:
        yield
    finally:
        traffic.aside += traffic.sent - before.sent
        traffic.handed, traffic.sent, traffic.received = before.handed, before.sent, before.received
        traffic.seconds = before.seconds


class _Counted:
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

    def _wait(self, works: Sequence[Any], meanwhile: Meanwhile) -> None:
        """Return when all are done, or one has failed; ``meanwhile`` is done first, and is no time on the wire."""
        start = time.perf_counter()
        if meanwhile is not None:
            meanwhile()
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


def _all_gather_single(output: Tensor, tensor: Tensor, group: dist.ProcessGroup) -> Any:
    # torch 2.13 renamed this collective and warns about the old name; older versions know only that one.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(output, tensor, group=group, async_op=True)


class TorchNet(_Counted):
    """A torch.distributed process group.

    Gloo works on host memory: a frame that was made on a GPU crosses through pinned memory, and arrives on the host.
    With NCCL everything stays on the device. What fails on the way becomes an ExchangeError; with a ``lookout`` it says
    which rank is missing.
    """

    lookout: Lookout | None = None

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__()
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.compute_device = device
        on_device = device.type == "cuda" and "nccl" in dist.get_backend(group)
        self.device = device if on_device else torch.device("cpu")
        self._spans = DeviceSpans()

    @property
    def seconds(self) -> float:
        """Seconds inside collectives; with NCCL on the GPU's clock, and then this waits for those under way."""
        return self.traffic.seconds + self._spans.seconds

    def _timed(self, work: Callable[[], Any]) -> Any:
        if self.device.type == "cpu":
            return super()._timed(work)
        begin = mark(self.device)
        try:
            return work()
        finally:
            self._spans.add(begin, mark(self.device))

    @property
    def alive(self) -> bool:
        """Whether the process group still exists."""
        return self.group in dist.distributed_c10d._world.pg_map

    def _call(self, work: Callable[[], Any], peer: int | None = None) -> None:
        """Do what waits for other ranks; ``peer`` is the only one of them, where it is only one."""
        if self.lookout is not None:
            self.lookout.begin(self.stage)
        try:
            self._timed(work)
        except RuntimeError as error:
            if self.lookout is None:
                raise ExchangeError(f"stage '{self.stage}' failed: {reason_of(error)}", stage=self.stage) from None
            known = dist.get_global_rank(self.group, peer) if peer is not None else None
            raise self.lookout.explain(error, self.stage, known) from None
        finally:
            if self.lookout is not None:
                self.lookout.finish()

    def to_wire(self, tensor: Tensor) -> Tensor:
        if tensor.device == self.device:
            return tensor.contiguous()
        if self.device.type == "cpu":
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            host.copy_(tensor)
            return host
        return tensor.to(self.device)

    def all_gather(
        self, frame: Tensor, room: Tensor | None = None, by_rounds: bool = False, meanwhile: Meanwhile = None
    ) -> list[Tensor]:
        self._count_all_gather(frame.numel())
        frame = self.to_wire(frame)
        if self.size == 1:
            self._timed(lambda: self._wait([], meanwhile))
            return [frame]
        nbytes = self.size * frame.numel()
        out = room if room is not None else torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        frames = list(out.view(self.size, -1))
        if by_rounds and self.device.type == "cpu" and frame.numel() >= _ROUNDS_FROM:
            frames[self.rank].copy_(frame)
            for distance in range(1, self.size):
                to, source = (self.rank + distance) % self.size, (self.rank - distance) % self.size
                first = meanwhile if distance == 1 else None
                self._point_to_point((dist.isend, frame, to), (dist.irecv, frames[source], source), meanwhile=first)
        else:
            self._call(lambda: self._wait([_all_gather_single(out, frame, self.group)], meanwhile))
        return frames

    def gather_each(self, frame: Tensor, room: Tensor | None = None) -> Iterator[tuple[int, Tensor]]:
        if self.device.type != "cpu" or self.size == 1 or frame.numel() < _ROUNDS_FROM:
            yield from enumerate(self.all_gather(frame))
            return
        self._count_all_gather(frame.numel())
        frame = self.to_wire(frame)
        yield self.rank, frame
        other = room[: frame.numel()] if room is not None else torch.empty_like(frame)
        for distance in range(1, self.size):
            to, source = (self.rank + distance) % self.size, (self.rank - distance) % self.size
            self._point_to_point((dist.isend, frame, to), (dist.irecv, other, source))
            yield source, other

    def all_to_all(self, frames: Sequence[Tensor], nbytes: Sequence[int], room: Tensor | None = None) -> list[Tensor]:
        sizes = [frame.numel() for frame in frames]
        self._count_all_to_all(sizes, nbytes)
        if self.device.type == "cpu" and self.size > 1 and max(*sizes, *nbytes) >= _ROUNDS_FROM:
            return self._all_to_all_in_rounds(frames, nbytes, room)
        outgoing = self.to_wire(torch.cat(list(frames)))
        if self.size == 1:
            return [outgoing]
        incoming = torch.empty(sum(nbytes), dtype=torch.uint8, device=self.device)
        self._call(lambda: dist.all_to_all_single(incoming, outgoing, list(nbytes), sizes, group=self.group))
        return list(incoming.split(list(nbytes)))

    def _all_to_all_in_rounds(
        self, frames: Sequence[Tensor], nbytes: Sequence[int], room: Tensor | None
    ) -> list[Tensor]:
        """Gloo posts all messages at once: they meet in front of one receiver, and its link loses packets. In round d
        every rank sends to the one d behind it, so that each link carries one message a way."""
        others = [0 if rank == self.rank else size for rank, size in enumerate(nbytes)]
        if room is None:
            room = torch.empty(sum(others), dtype=torch.uint8)
        incoming = list(room[: sum(others)].split(others))
        incoming[self.rank] = self.to_wire(frames[self.rank])
        for distance in range(1, self.size):
            to, source = (self.rank + distance) % self.size, (self.rank - distance) % self.size
            outgoing = self.to_wire(frames[to])
            operations: list[tuple[Callable[..., Any], Tensor, int]] = []
            if outgoing.numel():
                operations.append((dist.isend, outgoing, to))
            if nbytes[source]:
                operations.append((dist.irecv, incoming[source], source))
            if operations:
                self._point_to_point(*operations)
        return incoming

    def _point_to_point(self, *operations: tuple[Callable[..., Any], Tensor, int], meanwhile: Meanwhile = None) -> None:
        batch = [dist.P2POp(op, tensor, group=self.group, group_peer=peer) for op, tensor, peer in operations]
        peers = {peer for _, _, peer in operations}
        only = peers.pop() if len(peers) == 1 else None
        self._call(lambda: self._wait(dist.batch_isend_irecv(batch), meanwhile), peer=only)

    def swap(self, peer: int, frame: Tensor, room: Tensor | None = None, meanwhile: Meanwhile = None) -> Tensor:
        self.traffic.count(frame.numel(), frame.numel(), frame.numel())
        frame = self.to_wire(frame)
        other = room if room is not None else torch.empty_like(frame)
        self._point_to_point((dist.isend, frame, peer), (dist.irecv, other, peer), meanwhile=meanwhile)
        return other

    def send(self, peer: int, frame: Tensor) -> None:
        self.traffic.count(frame.numel(), frame.numel(), 0)
        self._point_to_point((dist.isend, self.to_wire(frame), peer))

    def receive(self, peer: int, nbytes: int) -> Tensor:
        self.traffic.count(0, 0, nbytes)
        frame = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self._point_to_point((dist.irecv, frame, peer))
        return frame

    def broadcast(self, tensor: Tensor, root: int) -> None:
        self._count_broadcast(tensor.numel() * tensor.element_size(), root)
        if self.size == 1:
            return
        wire = self.to_wire(tensor)
        self._call(lambda: dist.broadcast(wire, group=self.group, group_src=root))
        if wire is not tensor:
            tensor.copy_(wire)

    def all_reduce(self, tensor: Tensor, largest: bool = False) -> None:
        self._count_all_reduce(tensor.numel() * tensor.element_size())
        if self.size == 1:
            return
        op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        wire = self.to_wire(tensor)
        self._call(lambda: dist.all_reduce(wire, op=op, group=self.group))
        if wire is not tensor:
            tensor.copy_(wire)


class BystanderNet(TorchNet):
    """What a rank that is no member sees of a group: its size, and never a byte."""

    def __init__(self, size: int, device: torch.device) -> None:
        _Counted.__init__(self)
        self.rank, self.size, self.compute_device = -1, size, device
        self._spans = DeviceSpans()


class ThreadWorld:
    """Shared ground of ranks that are threads of one process: no sockets, any number of ranks.

    With ``one_at_a_time`` a rank computes only while no other does, until it waits for the others. Python runs one
    thread at a time anyway, and threads that ask for the interpreter at every call of torch are several times slower.
    """

    def __init__(self, size: int, timeout_s: float = 60.0, one_at_a_time: bool = False) -> None:
        self.size = size
        self.timeout_s = timeout_s
        self._baton = threading.Lock() if one_at_a_time else None
        self._patience_s = timeout_s * size if one_at_a_time else timeout_s  # the others may compute one after another
        self._barrier = threading.Barrier(size)
        self._gate, self._next = threading.Condition(), 0
        self._slots: list[Any] = [None] * size
        self._mail: dict[tuple[int, int], Queue[Tensor | None]] = {
            (a, b): Queue() for a in range(size) for b in range(size)
        }

    def meet(self) -> None:
        """Return when all ranks have come here; raises BrokenBarrierError where one has failed instead."""
        with self._resting():
            self._barrier.wait(self._patience_s)

    @contextmanager
    def _resting(self) -> Iterator[None]:
        """Let others compute while this rank waits."""
        if self._baton is None:
            yield
            return
        self._baton.release()
        try:
            yield
        finally:
            self._baton.acquire()

    def receive(self, sender: int, receiver: int) -> Tensor:
        """What one rank sent to another, when it is there."""
        with self._resting():
            frame = self._mail[sender, receiver].get(timeout=self._patience_s)
        if frame is None:
            raise threading.BrokenBarrierError
        return frame

    def share(self, rank: int, thing: Any) -> list[Any]:
        """Every rank puts one thing in and gets everybody's."""
        self._slots[rank] = thing
        self.meet()
        everybody = list(self._slots)
        self.meet()
        return everybody

    @contextmanager
    def turn(self, rank: int) -> Iterator[None]:
        """Let the ranks through the block one at a time, in the order of their numbers."""
        with self._resting(), self._gate:
            while self._next != rank:
                if self._barrier.broken or not self._gate.wait(self._patience_s):
                    raise threading.BrokenBarrierError
        try:
            yield
        finally:
            with self._gate:
                self._next = (rank + 1) % self.size
                self._gate.notify_all()

    def _abort(self) -> None:
        self._barrier.abort()
        with self._gate:
            self._gate.notify_all()
        for box in self._mail.values():
            box.put(None)

    def run(self, work: Callable[[ThreadNet], Any]) -> list[Any]:
        """Call work(net) on every rank in a thread of its own; return the results, or raise the first error."""
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def one(rank: int) -> None:
            try:
                with self._baton or nullcontext():
                    results[rank] = work(ThreadNet(self, rank))
            except BaseException as error:
                errors.append(error)
                self._abort()

        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException:  # Ctrl-C: they end at their next meeting, and not inside torch with the interpreter
            self._abort()
            for thread in threads:
                thread.join(GRACE_S)
            raise
        if errors:
            cause = next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), None)
            raise cause or TimeoutError(f"the workers waited {self._patience_s:g} s for one of them")
        return results


class ThreadNet(_Counted):
    """One rank of a ThreadWorld. On a GPU all ranks must use the same stream, which then keeps their work in order."""

    device = torch.device("cpu")

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        super().__init__()
        self.world, self.rank, self.size = world, rank, world.size

    def to_wire(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(
        self, frame: Tensor, room: Tensor | None = None, by_rounds: bool = False, meanwhile: Meanwhile = None
    ) -> list[Tensor]:
        self._count_all_gather(frame.numel())
        self._timed(lambda: self._wait([], meanwhile))
        return [other.clone() for other in self.world.share(self.rank, frame.clone())]

    def gather_each(self, frame: Tensor, room: Tensor | None = None) -> Iterator[tuple[int, Tensor]]:
        return iter(list(enumerate(self.all_gather(frame))))

    def all_to_all(self, frames: Sequence[Tensor], nbytes: Sequence[int], room: Tensor | None = None) -> list[Tensor]:
        self._count_all_to_all([frame.numel() for frame in frames], nbytes)
        everybody = self.world.share(self.rank, [frame.clone() for frame in frames])
        incoming = [theirs[self.rank] for theirs in everybody]
        assert [frame.numel() for frame in incoming] == list(nbytes), "all_to_all: a frame has an unexpected length"
        return incoming

    def swap(self, peer: int, frame: Tensor, room: Tensor | None = None, meanwhile: Meanwhile = None) -> Tensor:
        self.send(peer, frame)
        self._timed(lambda: self._wait([], meanwhile))
        return self.receive(peer, frame.numel())

    def send(self, peer: int, frame: Tensor) -> None:
        self.traffic.count(frame.numel(), frame.numel(), 0)
        self.world._mail[self.rank, peer].put(frame.clone())

    def receive(self, peer: int, nbytes: int) -> Tensor:
        self.traffic.count(0, 0, nbytes)
        frame = self.world.receive(peer, self.rank)
        assert frame.numel() == nbytes, "receive: a frame has an unexpected length"
        return frame

    def broadcast(self, tensor: Tensor, root: int) -> None:
        self._count_broadcast(tensor.numel() * tensor.element_size(), root)
        tensor.copy_(self.world.share(self.rank, tensor.clone())[root])

    def all_reduce(self, tensor: Tensor, largest: bool = False) -> None:
        self._count_all_reduce(tensor.numel() * tensor.element_size())
        everybody = torch.stack(self.world.share(self.rank, tensor.clone()))
        tensor.copy_(everybody.amax(dim=0) if largest else everybody.sum(dim=0))
