"""Which of DDP's buckets are exchanged together, and when an exchange begins: the simple ways."""

from __future__ import annotations

from thinwire.engine.worker import Bucket


class EachBucket:
    """Every bucket at once, in an exchange of its own.

    DDP hands over its buckets in one order on all ranks, so exchanges begin in one order as well.
    """

    def arrived(self, bucket: Bucket) -> list[list[Bucket]]:
        """Take a bucket; return what is exchanged now, each in one exchange."""
        return [[bucket]]

    def reset(self) -> None:
        """A new pass begins: let go of what one that was broken off has left here."""


class WholeStep(EachBucket):
    """All buckets of a pass in one exchange: for a method of the whole model, or a step that may be passed over."""

    def __init__(self) -> None:
        self._waiting: list[Bucket] = []  # of this pass, until their exchange begins

    def ends_group(self, bucket: Bucket) -> bool:
        return bucket.is_last

    def arrived(self, bucket: Bucket) -> list[list[Bucket]]:
        if self._waiting and any(p is bucket.parameters[0] for b in self._waiting for p in b.parameters):
            self._waiting = []  # an earlier backward pass was broken off
        self._waiting.append(bucket)
        if not self.ends_group(bucket):
            return []
        buckets, self._waiting = self._waiting, []
        return [buckets]

    def reset(self) -> None:
        self._waiting = []
