"""Which of DDP's buckets are exchanged together, and when an exchange begins."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from thinwire.edges.bucket_fusion import BucketFusion, choice
from thinwire.edges.fixed_buckets import FixedBuckets
from thinwire.engine.aggregators import Exchange
from thinwire.engine.worker import Bucket
from thinwire.reducer import Reducer


class BucketPlanner:
    """Four ways: each bucket at once; all with the last one (a whole model, or a step that may be passed over); groups
    that fusion found to be faster; or groups that the model alone decides, where what travels together changes the
    result. Made anew whenever the method changes."""

    def __init__(self, reducer: Reducer, ordinals: Mapping[int, int], may_have_unused: bool) -> None:
        self._ordinals = ordinals  # by id: a parameter's place in the model
        self._waiting: list[Bucket] = []  # of this pass, until their exchange begins
        aggregator, nets, independent = reducer.running.aggregator, reducer.nets, reducer.method.bucket_independent
        self._waits_for_last = aggregator.whole_model or reducer.skipper is not None
        self._fixed: FixedBuckets | None = None
        self.fusion: BucketFusion | None = None
        if not independent and not self._waits_for_last:
            self._fixed = FixedBuckets([parameter.numel() for parameter in reducer.parameters.values()])
        on_host = nets.compute_device.type == "cpu"  # elsewhere a call's end says nothing about its duration
        fusible = isinstance(aggregator, Exchange) and independent and not self._waits_for_last
        if fusible and on_host and not may_have_unused and nets.own.size > 1:
            assert isinstance(aggregator, Exchange)
            self.fusion = BucketFusion(choice(), rounds=aggregator.rounds)

    def places(self, parameters: list[Tensor]) -> list[int]:
        return [self._ordinals[id(parameter)] for parameter in parameters]

    def arrived(self, bucket: Bucket) -> list[list[Bucket]]:
        """Take a bucket, in the same order on every rank; return what is exchanged now, each in one exchange."""
        if self._fixed is not None:
            return self._fixed.arrived(bucket, self.places(bucket.parameters))
        if self._waiting and any(p is bucket.parameters[0] for b in self._waiting for p in b.parameters):
            self._waiting = []  # an earlier backward pass was broken off
        self._waiting.append(bucket)
        begins = bucket.is_last or not self._waits_for_last
        if self.fusion is not None:
            ordinal = self._ordinals[id(bucket.parameters[0])]
            begins = self.fusion.arrived(ordinal, bucket.buffer.numel(), bucket.is_last)
        if not begins:
            return []
        buckets, self._waiting = self._waiting, []
        return [buckets]

    def reset(self) -> None:
        """A new pass begins: let go of what one that was broken off has left here."""
        self._waiting = []
        if self._fixed is not None:
            self._fixed.reset()
