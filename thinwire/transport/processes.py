"""Ranks as processes: a group of torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.errors import ExchangeError
from thinwire.torch_private import is_alive
from thinwire.transport.device_time import DeviceSpans, mark
from thinwire.transport.failures import FailureDetector, reason_of
from thinwire.transport.net import Counted, OverlapWith

PAIRWISE_FROM = 1 << 16  # bytes: messages of this length may go round by round on Gloo


def _all_gather_single(output: Tensor, tensor: Tensor, group: dist.ProcessGroup) -> Any:
    # torch 2.13 renamed this collective and warns about the old name; older versions know only that one.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(output, tensor, group=group, async_op=True)


class TorchNet(Counted):
    """A torch.distributed process group.

    Gloo works on host memory: a frame that was made on a GPU crosses through pinned memory, and arrives on the host.
    With NCCL everything stays on the device. What fails on the way becomes an ExchangeError; with a
    ``failure_detector`` it says which rank is missing.
    """

    failure_detector: FailureDetector | None = None

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
        return is_alive(self.group)

    def _call(self, work: Callable[[], Any], peer: int | None = None) -> None:
        """Do what waits for other ranks; ``peer`` is the only one of them, where it is only one."""
        if self.failure_detector is not None:
            self.failure_detector.begin(self.stage)
        try:
            self._timed(work)
        except RuntimeError as error:
            if self.failure_detector is None:
                raise ExchangeError(f"stage '{self.stage}' failed: {reason_of(error)}", stage=self.stage) from None
            known = dist.get_global_rank(self.group, peer) if peer is not None else None
            raise self.failure_detector.explain(error, self.stage, known) from None
        finally:
            if self.failure_detector is not None:
                self.failure_detector.finish()

    def to_wire(self, tensor: Tensor) -> Tensor:
        if tensor.device == self.device:
            return tensor.contiguous()
        if self.device.type == "cpu":
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            host.copy_(tensor)
            return host
        return tensor.to(self.device)

    def all_gather(
        self, frame: Tensor, room: Tensor | None = None, pairwise: bool = False, overlap_with: OverlapWith = None
    ) -> list[Tensor]:
        self._count_all_gather(frame.numel())
        frame = self.to_wire(frame)
        if self.size == 1:
            self._timed(lambda: self._wait([], overlap_with))
            return [frame]
        nbytes = self.size * frame.numel()
        out = room if room is not None else torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        frames = list(out.view(self.size, -1))
        if pairwise and self._goes_pairwise(frame.numel()):
            frames[self.rank].copy_(frame)
            for _ in self._pairwise(lambda to: frame, frames.__getitem__, overlap_with):
                pass
        else:
            self._call(lambda: self._wait([_all_gather_single(out, frame, self.group)], overlap_with))
        return frames

    def gather_each(self, frame: Tensor, room: Tensor | None = None) -> Iterator[tuple[int, Tensor]]:
        if not self._goes_pairwise(frame.numel()):
            yield from enumerate(self.all_gather(frame))
            return
        self._count_all_gather(frame.numel())
        frame = self.to_wire(frame)
        yield self.rank, frame
        other = room[: frame.numel()] if room is not None else torch.empty_like(frame)
        for source in self._pairwise(lambda to: frame, lambda source: other):
            yield source, other

    def all_to_all(self, frames: Sequence[Tensor], nbytes: Sequence[int], room: Tensor | None = None) -> list[Tensor]:
        sizes = [frame.numel() for frame in frames]
        self._count_all_to_all(sizes, nbytes)
        if self._goes_pairwise(max(*sizes, *nbytes)):
            return self._all_to_all_pairwise(frames, nbytes, room)
        outgoing = self.to_wire(torch.cat(list(frames)))
        if self.size == 1:
            return [outgoing]
        incoming = torch.empty(sum(nbytes), dtype=torch.uint8, device=self.device)
        self._call(lambda: dist.all_to_all_single(incoming, outgoing, list(nbytes), sizes, group=self.group))
        return list(incoming.split(list(nbytes)))

    def _all_to_all_pairwise(
        self, frames: Sequence[Tensor], nbytes: Sequence[int], room: Tensor | None
    ) -> list[Tensor]:
        others = [0 if rank == self.rank else size for rank, size in enumerate(nbytes)]
        if room is None:
            room = torch.empty(sum(others), dtype=torch.uint8)
        incoming = list(room[: sum(others)].split(others))
        incoming[self.rank] = self.to_wire(frames[self.rank])
        for _ in self._pairwise(lambda to: self.to_wire(frames[to]), incoming.__getitem__):
            pass
        return incoming

    def _goes_pairwise(self, nbytes: int) -> bool:
        return self.device.type == "cpu" and self.size > 1 and nbytes >= PAIRWISE_FROM

    def _pairwise(
        self, outgoing: Callable[[int], Tensor], incoming: Callable[[int], Tensor], overlap_with: OverlapWith = None
    ) -> Iterator[int]:
        """Send outgoing(r) to every other rank r and take what r sends into incoming(r), where they are not empty;
        yields r when that is there.

        Gloo posts all messages at once: they meet in front of one receiver, and its link loses packets. In round d
        every rank sends to the one d behind it, so that each link carries one message a way.
        """
        for distance in range(1, self.size):
            to, source = (self.rank + distance) % self.size, (self.rank - distance) % self.size
            both = (dist.isend, outgoing(to), to), (dist.irecv, incoming(source), source)
            operations = [operation for operation in both if operation[1].numel()]
            if operations:
                self._point_to_point(*operations, overlap_with=overlap_with if distance == 1 else None)
            yield source

    def _point_to_point(
        self, *operations: tuple[Callable[..., Any], Tensor, int], overlap_with: OverlapWith = None
    ) -> None:
        # Gloo sends a message when the receiver has said that it is ready, and that word queues behind what it sends to
        # the same rank itself: with receives posted last, two ranks that swap frames send one after the other.
        ordered = sorted(operations, key=lambda operation: operation[0] is not dist.irecv)
        batch = [dist.P2POp(op, tensor, group=self.group, group_peer=peer) for op, tensor, peer in ordered]
        peers = {peer for _, _, peer in operations}
        only = peers.pop() if len(peers) == 1 else None
        self._call(lambda: self._wait(dist.batch_isend_irecv(batch), overlap_with), peer=only)

    def swap(self, peer: int, frame: Tensor, room: Tensor | None = None, overlap_with: OverlapWith = None) -> Tensor:
        self.traffic.count(frame.numel(), frame.numel(), frame.numel())
        frame = self.to_wire(frame)
        other = room if room is not None else torch.empty_like(frame)
        self._point_to_point((dist.isend, frame, peer), (dist.irecv, other, peer), overlap_with=overlap_with)
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
        Counted.__init__(self)
        self.rank, self.size, self.compute_device = -1, size, device
        self._spans = DeviceSpans()
