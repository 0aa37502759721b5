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


@dataclass
class CutBucket:
    """A bucket whose parameters belong to several groups; complete when all of its parts are."""

    bucket: Bucket
    parts: int  # that are not complete


@dataclass(kw_only=True)
class BucketPart(Bucket):
    """The parameters of a bucket that belong to one group."""

    cut: CutBucket

    def complete(self, error: Exception | None = None) -> None:
        self.cut.parts -= 1
        if not self.cut.parts or error is not None:
            self.cut.bucket.complete(error)


class FixedBuckets(EachBucket):
    """Takes DDP's buckets as they come and gives groups out, each as soon as its last parameter is there.

    DDP hands over its buckets in one order on all ranks, so groups begin in one order as well.
    """

    def __init__(self, numels: Sequence[int]) -> None:
        self._groups = fixed_groups(numels)
        self._group_of = {ordinal: place for place, group in enumerate(self._groups) for ordinal in group}
        self.reset()

    def reset(self) -> None:
        self._parts: list[list[Bucket]] = [[] for _ in self._groups]  # that wait for the rest of their group
        self._missing = [len(group) for group in self._groups]  # parameters

    def arrived(self, bucket: Bucket) -> list[list[Bucket]]:
        """Take a bucket; return the groups that can be exchanged now, in parts of buckets."""
        if bucket.is_first and any(self._parts):  # an earlier backward pass was broken off
            self.reset()
        places: dict[int, list[int]] = {}  # in the bucket, by group
        for place, ordinal in enumerate(bucket.ordinals):
            places.setdefault(self._group_of[ordinal], []).append(place)
        cut, complete = CutBucket(bucket, len(places)), []
        for group, own in sorted(places.items()):
            self._parts[group].append(
                BucketPart(
                    parameters=[bucket.parameters[place] for place in own],
                    gradients=[bucket.gradients[place] for place in own],
                    buffer=bucket.buffer,
                    future=bucket.future,
                    is_last=False,
                    ready=bucket.ready,
                    handed_s=bucket.handed_s,
                    ordinals=[bucket.ordinals[place] for place in own],
                    in_backward=bucket.in_backward,
                    cut=cut,
                )
            )
            self._missing[group] -= len(own)
            if not self._missing[group]:
                complete.append(self._parts[group])
                self._parts[group], self._missing[group] = [], len(self._groups[group])
        if bucket.is_last:
            assert not any(self._parts), "the last bucket of a pass came, and a parameter has been in none"
            complete[-1][-1].is_last = True
        return complete
