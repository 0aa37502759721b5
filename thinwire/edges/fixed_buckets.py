"""The same exchanges whatever DDP's buckets are, for methods whose result depends on what travels together.

int8 and int4 values share a scale with their neighbours in the frame (``Method.bucket_independent``), and a ring
all-reduce of three ranks or more adds up in an order that depends on the place (``Aggregator.sums_by_place``). DDP cuts
its buckets anew after the first step of every process, so a resumed run would round one step otherwise than the run
that was not interrupted. Here the cut depends on the model alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.edges.bucket_plan import EachBucket
from thinwire.engine.fixed_groups import fixed_groups
from thinwire.engine.worker import Bucket


@dataclass(kw_only=True)
class Piece(Bucket):
    """The parameters of a bucket that belong to one group; the last piece that is exchanged completes the bucket."""

    whole: Bucket
    finishes: bool

    def complete(self, error: Exception | None = None) -> None:
        if self.finishes or error is not None:
            self.whole.complete(error)


class FixedBuckets(EachBucket):
    """Takes DDP's buckets as they come and gives groups out, each as soon as its last parameter is there.

    DDP hands over its buckets in one order on all ranks, so groups begin in one order as well.
    """

    def __init__(self, numels: Sequence[int]) -> None:
        self._groups = fixed_groups(numels)
        self._group_of = {ordinal: place for place, group in enumerate(self._groups) for ordinal in group}
        self.reset()

    def reset(self) -> None:
        self._parts: list[list[tuple[Bucket, list[int]]]] = [[] for _ in self._groups]  # buckets, places in them
        self._missing = [len(group) for group in self._groups]
        self._open: dict[int, int] = {}  # by id of a bucket: groups that still need it

    def arrived(self, bucket: Bucket) -> list[list[Bucket]]:
        """Take a bucket; return the groups that can be exchanged now, in pieces."""
        if bucket.is_first and self._open:  # an earlier backward pass was broken off
            self.reset()
        touched: dict[int, list[int]] = {}
        for place, ordinal in enumerate(bucket.ordinals):
            touched.setdefault(self._group_of[ordinal], []).append(place)
        self._open[id(bucket)] = len(touched)
        complete = []
        for group, places in sorted(touched.items()):
            self._parts[group].append((bucket, places))
            self._missing[group] -= len(places)
            if not self._missing[group]:
                complete.append(self._pieces(group))
        if bucket.is_last:
            assert not self._open, "the last bucket of a pass came, and a parameter has been in none"
            complete[-1][-1].is_last = True
        return complete

    def _pieces(self, group: int) -> list[Bucket]:
        pieces: list[Bucket] = []
        for bucket, places in self._parts[group]:
            self._open[id(bucket)] -= 1
            finishes = not self._open[id(bucket)]
            if finishes:
                del self._open[id(bucket)]
            pieces.append(
                Piece(
                    parameters=[bucket.parameters[place] for place in places],
                    gradients=[bucket.gradients[place] for place in places],
                    buffer=bucket.buffer,
                    future=bucket.future,
                    is_last=False,
                    ordinals=[bucket.ordinals[place] for place in places],
                    ready=bucket.ready,
                    handed_s=bucket.handed_s,
                    in_backward=bucket.in_backward,
                    whole=bucket,
                    finishes=finishes,
                )
            )
        self._parts[group], self._missing[group] = [], len(self._groups[group])
        return pieces
