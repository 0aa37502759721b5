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
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs import SignsCodec, SparseCodec
from thinwire.collectives.stateless import StatelessCollective
from thinwire.kernels import contained, select_topk, union_add
from thinwire.layout import Turn
from thinwire.payloads import Accepted, Signs, Sparse, SparseResult, clear
from thinwire.transport import Net


def add_sparse(a: Sparse, b: Sparse) -> Sparse:
    """a + b on the union of their indices; the same bits whichever comes first."""
    return Sparse(*union_add(a.indices, a.values, b.indices, b.values), a.numel, a.capacity)


def merge(a: Sparse, b: Sparse) -> Sparse:
    """The paper's Definition 1: the k largest magnitudes of a + b; ties go to the lower index."""
    union = add_sparse(a, b)
    kept = select_topk(union.values, min(a.capacity, union.indices.numel()))
    return Sparse(union.indices[kept], union.values[kept], a.numel, a.capacity)


class _Path:
    """One rank's way through the merges: the current set of its group, and what became of the parts it answers for."""

    def __init__(self, collective: GlobalTopK, turn: Turn, payload: Sparse, tail: Tensor) -> None:
        self.collective, self.turn = collective, turn
        self.set, self.tail = payload, tail.clone()
        self.claims: list[Tensor] = []  # per contributor on this path: the indices of its entries
        self.alive: list[Tensor] = []  # and which of them survived so far
        self.credit = Sparse(payload.indices[:0], payload.values[:0], payload.numel, payload.capacity)

    def claim(self, indices: Tensor) -> None:
        self.claims.append(indices)
        self.alive.append(torch.ones_like(indices, dtype=torch.bool))

    def _keep_only(self, survivors: Tensor) -> None:
        for claim, alive in zip(self.claims, self.alive, strict=True):
            alive &= contained(claim, survivors)
        if not self.credit.indices.numel():
            return
        still = contained(self.credit.indices, survivors)
        self.credit = Sparse(
            self.credit.indices[still], self.credit.values[still], self.credit.numel, self.credit.capacity
        )

    def frame(self, keeps_credit: bool) -> Tensor:
        """Encode the current set, and go on with what the frame says.

        What rounding takes away from a sum that is used in the end belongs to nobody in particular: one rank of the
        group, the one that ``keeps_credit``, takes it into its residual.
        """
        exact = self.set
        frame = self.collective.codec.encode_finished(self.turn, exact, self.tail)
        if self.collective.codec.says_all(frame, exact):
            return frame
        self.set, self.tail = self.open(frame, "this rank")
        self._keep_only(self.set.indices)
        if keeps_credit:
            kept = contained(exact.indices, self.set.indices)
            lost = Sparse(self.set.indices, exact.values[kept] - self.set.values, exact.numel, exact.capacity)
            self.credit = add_sparse(self.credit, lost)
        return frame

    def open(self, frame: Tensor, origin: str) -> tuple[Sparse, Tensor]:
        set_ = self.set
        return self.collective.codec.decode(
            self.turn, frame, set_.numel, set_.capacity, self.tail.numel(), set_.values.device, origin
        )

    def merge(self, other: Sparse, tail: Tensor) -> None:
        self.set = merge(self.set, other)
        self.tail = self.tail + tail
        self._keep_only(self.set.indices)


@dataclass(frozen=True)
class GlobalTopK(StatelessCollective):
    """gTopKAllReduce as a butterfly: rank r merges with r xor 1, r xor 2, r xor 4 ..."""

    codec: SparseCodec

    def mean(
        self, turn: Turn, payload: Sparse, tail: Tensor, net: Net, into: Sequence[Tensor] | None = None
    ) -> tuple[SparseResult, Accepted]:
        power = 1 << (net.size.bit_length() - 1)  # largest power of two <= size
        extras = net.size - power
        path = _Path(self, turn, payload, tail)
        # The first frame's rounding is this rank's own: it is charged with what the frame says.
        frame = path.frame(keeps_credit=False)
        mine = path.set
        swaps = 1 < power > net.rank
        if into is not None and not swaps:
            clear(turn.layout, into)
        if net.rank >= power:
            alive = self._through_proxy(path, frame, net, net.rank - power)
        else:
            alive = self._butterfly(path, frame, net, power, extras, into)
        used = Sparse(mine.indices[alive], mine.values[alive], mine.numel, mine.capacity)
        credit = Sparse(path.credit.indices, -path.credit.values, mine.numel, mine.capacity)
        accepted = add_sparse(used, credit) if credit.indices.numel() else used
        result = SparseResult([path.set], path.tail, net.size, cleared=into is not None)
        return result, Accepted(accepted, tail, sent=used.indices)

    def _butterfly(
        self, path: _Path, frame: Tensor, net: Net, power: int, extras: int, into: Sequence[Tensor] | None
    ) -> Tensor:  # -> (k,) bool
        rank, proxy = net.rank, net.rank < extras
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
                frame = path.frame(keeps_credit=rank % distance == 0)
            peer = rank ^ distance
            # In the last swap nobody computes any more: what is done then takes no processor from anybody.
            last = into is not None and 2 * distance == power
            theirs = net.swap(peer, frame, (lambda: clear(path.turn.layout, into or ())) if last else None)
            path.merge(*path.open(theirs, f"rank {peer}"))
            distance *= 2
        if extras:
            # The extras see the result through a frame, so everybody takes it from one: the same bits everywhere.
            frame = path.frame(keeps_credit=rank == 0)
            if proxy:
                net.send(rank + power, frame)
                no_scales = torch.zeros(0, device=path.tail.device)
                mask = Signs(path.alive[1], no_scales, ((path.alive[1].numel(), 1),))
                net.send(rank + power, SignsCodec().encode(path.turn, mask, no_scales))
        return path.alive[0]

    def _through_proxy(self, path: _Path, frame: Tensor, net: Net, proxy: int) -> Tensor:  # -> (k,) bool
        net.send(proxy, frame)
        own = path.set.indices.numel()
        path.set, path.tail = path.open(net.receive(proxy, frame.numel()), f"rank {proxy}")
        reply = net.receive(proxy, SignsCodec().nbytes(own, 0, 0))
        mask, _ = SignsCodec().decode(path.turn, reply, ((own, 1),), 0, 0, path.tail.device, f"rank {proxy}")
        return mask.negative
