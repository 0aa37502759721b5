"""Ranks as threads of one process: no sockets, any number of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from queue import Queue
from typing import Any

import torch
from torch import Tensor

from thinwire.transport.net import Counted, OverlapWith

GRACE_S = 5.0  # for threads that were told to end


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
        self._in_turn, self._next = threading.Condition(), 0
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
        with self._resting(), self._in_turn:
            while self._next != rank:
                if self._barrier.broken or not self._in_turn.wait(self._patience_s):
                    raise threading.BrokenBarrierError
        try:
            yield
        finally:
            with self._in_turn:
                self._next = (rank + 1) % self.size
                self._in_turn.notify_all()

    def _abort(self) -> None:
        self._barrier.abort()
        with self._in_turn:
            self._in_turn.notify_all()
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


class ThreadNet(Counted):
    """One rank of a ThreadWorld. On a GPU all ranks must use the same stream, which then keeps their work in order."""

    device = torch.device("cpu")

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        super().__init__()
        self.world, self.rank, self.size = world, rank, world.size

    def to_wire(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(
        self, frame: Tensor, room: Tensor | None = None, pairwise: bool = False, overlap_with: OverlapWith = None
    ) -> list[Tensor]:
        self._count_all_gather(frame.numel())
        self._timed(lambda: self._wait([], overlap_with))
        return [other.clone() for other in self.world.share(self.rank, frame.clone())]

    def gather_each(self, frame: Tensor, room: Tensor | None = None) -> Iterator[tuple[int, Tensor]]:
        return iter(list(enumerate(self.all_gather(frame))))

    def all_to_all(self, frames: Sequence[Tensor], nbytes: Sequence[int], room: Tensor | None = None) -> list[Tensor]:
        self._count_all_to_all([frame.numel() for frame in frames], nbytes)
        everybody = self.world.share(self.rank, [frame.clone() for frame in frames])
        incoming = [theirs[self.rank] for theirs in everybody]
        assert [frame.numel() for frame in incoming] == list(nbytes), "all_to_all: a frame has an unexpected length"
        return incoming

    def swap(self, peer: int, frame: Tensor, room: Tensor | None = None, overlap_with: OverlapWith = None) -> Tensor:
        self.send(peer, frame)
        self._timed(lambda: self._wait([], overlap_with))
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
