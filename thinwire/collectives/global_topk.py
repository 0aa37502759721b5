"""Global top-k in O(k log P) bytes for any number of ranks, with nothing lost.

The paper's tree (Algorithm 3) needs a power of two of ranks and a broadcast, and its put-back rule (Algorithm 4 line
10) loses gradient: an index that one merge rejects can come back through another pair, and then the rejected
contribution is neither applied nor kept. A butterfly instead lets every rank see all merges on its own path: a
contribution was used if and only if its index survived every one of them, and whatever was not used goes back to the
rank that gave it.

Ranks beyond the largest power of two give their set to a proxy first, and get back the result with one bit an entry
that says which of theirs were used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.codecs import SignsCodec, SparseCodec
from thinwire.codecs.sparse import Room
from thinwire.collectives.stateless_collective import StatelessCollective
from thinwire.engine.context import ExchangeContext
from thinwire.engine.group_mean import Base, SparseResult
from thinwire.engine.layout import Layout
from thinwire.engine.nonfinite_alarm import Alarm
from thinwire.engine.payloads import Accepted, Signs, Sparse
from thinwire.engine.protocols import Collected
from thinwire.engine.traffic_plan import Budget, Plan
from thinwire.engine.workspace import BACK, FRONT, Workspace
from thinwire.kernels import Entries, keep_masked, mask_contained, merge_topk, union_add
from thinwire.transport import Net


def add_sparse(a: Sparse, b: Sparse) -> Sparse:
    """a + b on the union of their indices; the same bits whichever comes first."""
    return Sparse(*union_add(a.indices, a.values, b.indices, b.values), a.numel, a.capacity)


def merge(a: Sparse, b: Sparse, room: Entries | None = None) -> Sparse:
    """The paper's Definition 1: the k largest magnitudes of a + b; ties go to the lower index."""
    return Sparse(*merge_topk(a.indices, a.values, b.indices, b.values, a.capacity, room), a.numel, a.capacity)


def _where(sparse: Sparse, mask: Tensor, room: Entries | None = None) -> Sparse:
    """The entries that the mask, (k,) bool, names."""
    return Sparse(*keep_masked(sparse.indices, sparse.values, mask, room), sparse.numel, sparse.capacity)


class _Path:
    """One rank's way through the merges: the current set of its group, and what became of the parts it answers for.

    Sets lie in the scratch memory, in two places in turn; at its back are the frame that leaves and, when that has
    left, what came in.
    """

    def __init__(
        self, collective: GlobalTopK, context: ExchangeContext, payload: Sparse, tail: Tensor, alarm: Alarm
    ) -> None:
        self.collective, self.context, self.workspace = collective, context, collective.workspace
        self.device = payload.values.device
        self.set, self.alarm = payload, alarm
        room = self.workspace.take(tail.numel(), torch.float32, self.device)
        self.tail = room.copy_(tail) if room is not None else tail.clone()
        self.claims: list[Tensor] = []  # per contributor on this path: the indices of its entries
        self.alive: list[Tensor] = []  # and which of them survived so far
        self.credit = Sparse(payload.indices[:0], payload.values[:0], payload.numel, payload.capacity)
        # Where the next merged set goes, and where the one after it: never where the last one is.
        self._free = [self.workspace.entries(payload.capacity, payload.numel, self.device) for _ in range(2)]

    @property
    def room(self) -> Entries | None:
        """Memory for a set, in which none is."""
        return self._free[0]

    def claim(self, indices: Tensor) -> None:
        self.claims.append(indices)
        alive = self.workspace.take(indices.numel(), torch.bool, self.device)
        self.alive.append(torch.ones_like(indices, dtype=torch.bool) if alive is None else alive.fill_(True))

    def _keep_only(self, survivors: Tensor) -> None:
        for claim, alive in zip(self.claims, self.alive, strict=True):
            mask_contained(alive, claim, survivors)
        if self.credit.indices.numel():
            still = torch.ones_like(self.credit.indices, dtype=torch.bool)
            mask_contained(still, self.credit.indices, survivors)
            self.credit = _where(self.credit, still)

    def frame(self, keeps_credit: bool) -> Tensor:
        """Encode the current set, and go on with what the frame says.

        What rounding takes away from a sum that is used in the end belongs to nobody in particular: one rank of the
        group, the one that ``keeps_credit``, takes it into its residual.
        """
        exact, codec = self.set, self.collective.codec
        frame = codec.encode_finished(self.context, exact, self.tail, self.workspace, self.alarm)
        if codec.says_all(frame, exact):
            return frame
        # Entries in scratch memory are this exchange's own. Where values travel as they are, those that the frame holds
        # can lie where they came from.
        lossless = codec.values == "fp32"
        room: Room | None = None
        if exact.indices.dtype == torch.int32:
            own = None if lossless else self.workspace.entries(exact.capacity, exact.numel, self.device)
            room = (own.indices, own.values) if own is not None else (exact.indices, exact.values)
        said, tail = self._open(frame, "this rank", room)
        if room is not None and room[1] is not None:
            values = room[1][: said.values.numel()]
            said = Sparse(said.indices, values.copy_(said.values), said.numel, said.capacity)
        else:  # the frame's memory is used again while the set is still needed
            said = Sparse(said.indices, said.values.clone(), said.numel, said.capacity)
        self.set = said
        self.tail.copy_(tail)
        self._keep_only(said.indices)
        if keeps_credit and not lossless:
            kept = torch.ones_like(exact.indices, dtype=torch.bool)
            mask_contained(kept, exact.indices, said.indices)
            lost = Sparse(said.indices, exact.values[kept] - said.values, exact.numel, exact.capacity)
            self.credit = add_sparse(self.credit, lost)
        return frame

    def _open(self, frame: Tensor, origin: str, room: Room | None) -> tuple[Sparse, Tensor]:
        numel, capacity = self.set.numel, self.set.capacity
        decoded = self.collective.codec.decode(
            self.context, frame, numel, capacity, self.tail.numel(), self.device, origin, room
        )
        self.alarm = self.alarm.heard([(origin, decoded.alarm)])
        return decoded.content, decoded.tail

    def open(self, frame: Tensor, origin: str, end: int = FRONT) -> tuple[Sparse, Tensor]:
        """Decode what came in, into memory from this end."""
        return self._open(frame, origin, self.collective.codec.room(self.set, self.workspace, end))

    def merge(self, other: Sparse, tail: Tensor) -> None:
        self.set = merge(self.set, other, self.room)
        self._free.reverse()
        self.tail.add_(tail)
        self._keep_only(self.set.indices)


@dataclass(frozen=True)
class GlobalTopK(StatelessCollective):
    """gTopKAllReduce as a butterfly: rank r merges with r xor 1, r xor 2, r xor 4 ..."""

    codec: SparseCodec
    workspace: Workspace = field(default_factory=Workspace, compare=False)

    frames_grow: ClassVar[bool] = True

    def plan(self, layout: Layout, budget: Budget, size: int) -> Plan:
        nbytes = self.codec.nbytes(layout.coded_numel, budget.entries, layout.tail_numel, budget.spread)
        swaps = size.bit_length() - 1
        if size & (size - 1):  # ranks beyond the power of two: to a proxy, and the result with a bit per entry back
            back = nbytes + SignsCodec().nbytes(budget.entries, 0, 0)
            return Plan(swaps + 2, swaps * nbytes + max(nbytes, back), swaps + 1, swaps + 2)
        return Plan(swaps, swaps * nbytes, swaps, swaps)

    def mean(
        self,
        context: ExchangeContext,
        payload: Sparse,
        tail: Tensor,
        net: Net,
        base: Base,
        alarm: Alarm,
        into: Sequence[Tensor] | None = None,
    ) -> Collected:
        power = 1 << (net.size.bit_length() - 1)  # largest power of two <= size
        extras = net.size - power
        path = _Path(self, context, payload, tail, alarm)
        # The first frame's rounding is this rank's own: it is charged with what the frame says.
        behind = self.workspace.mark(BACK)
        frame = path.frame(keeps_credit=False)
        mine = path.set
        swaps = 1 < power > net.rank
        if into is not None and not swaps:
            base.write(context, into)
        if net.rank >= power:
            alive = self._through_proxy(path, frame, net, net.rank - power)
        else:
            alive = self._butterfly(path, frame, net, power, extras, behind, base, into)
        used = _where(mine, alive, path.room)
        accepted = used
        if path.credit.indices.numel():
            credit = Sparse(path.credit.indices, -path.credit.values, mine.numel, mine.capacity)
            accepted = add_sparse(used, credit)
        result = SparseResult([path.set], path.tail, net.size, base if into is None else None)
        return Collected(result, Accepted(accepted, tail, sent=used.indices), path.alarm)

    def _butterfly(
        self,
        path: _Path,
        frame: Tensor,
        net: Net,
        power: int,
        extras: int,
        behind: int,
        base: Base,
        into: Sequence[Tensor] | None,
    ) -> Tensor:  # -> (k,) bool
        rank, proxy, workspace = net.rank, net.rank < extras, self.workspace
        path.claim(path.set.indices)
        if proxy:
            given, tail = path.open(net.receive(rank + power, frame.numel()), f"rank {rank + power}")
            path.claim(given.indices)
            path.merge(given, tail)
        distance = 1
        while distance < power:
            # Before the first merge the set is this rank's own, already rounded; later it is the group's.
            merged_before = distance > 1 or extras > 0
            if merged_before:
                workspace.release(behind, BACK)
                frame = path.frame(keeps_credit=rank % distance == 0)
            peer, before = rank ^ distance, workspace.mark()
            room = workspace.take(frame.numel(), torch.uint8, path.device)
            # In the last swap nobody computes any more: what is done then takes no processor from anybody.
            write_base = None
            if into is not None and 2 * distance == power:
                write_base = partial(base.write, path.context, into)
            received = net.swap(peer, frame, room, write_base)
            if room is not None and received.data_ptr() == room.data_ptr():
                workspace.release(behind, BACK)  # the frame has left
            path.merge(*path.open(received, f"rank {peer}", BACK))
            workspace.release(before)
            distance *= 2
        if extras:
            # The extras see the result through a frame, so everybody takes it from one: the same bits everywhere.
            workspace.release(behind, BACK)
            frame = path.frame(keeps_credit=rank == 0)
            if proxy:
                net.send(rank + power, frame)
                no_scales = torch.zeros(0, dtype=torch.float32, device=path.tail.device)
                mask = Signs(path.alive[1], no_scales, ((path.alive[1].numel(), 1),))
                net.send(rank + power, SignsCodec().encode(path.context, mask, no_scales, alarm=path.alarm))
        return path.alive[0]

    def _through_proxy(self, path: _Path, frame: Tensor, net: Net, proxy: int) -> Tensor:  # -> (k,) bool
        net.send(proxy, frame)
        own = path.set.indices.numel()
        path.set, tail = path.open(net.receive(proxy, frame.numel()), f"rank {proxy}")
        path.tail.copy_(tail)
        reply = net.receive(proxy, SignsCodec().nbytes(own, 0, 0))
        decoded = SignsCodec().decode(path.context, reply, ((own, 1),), 0, 0, path.tail.device, f"rank {proxy}")
        path.alarm = path.alarm.heard([(f"rank {proxy}", decoded.alarm)])
        return decoded.content.negative
