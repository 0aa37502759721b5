"""The time of a training step, from what was measured about the model, the machine and the link.

A step is one program with two hands. The main thread computes: forward, backward, optimizer. As soon as a bucket of
gradients is there, a second thread encodes, sends and decodes it, one bucket after the other. What it waits for on
the wire overlaps with the rest of the backward pass. What it computes does not: encoding takes cores (or the GPU) away
from backward, and so does that part of sending which is work for the processor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from thinwire.advisor.cost.plans import exchanged_rows, layouts_of, plan_averaging, plan_exchange, plan_meeting, planner
from thinwire.advisor.link import Link
from thinwire.engine.traffic_plan import Plan
from thinwire.methods import Method

FIRST_BUCKET = 2**20  # bytes: DDP's own limits
BUCKET = 25 * 2**20


@dataclass(frozen=True)
class TimedBucket:
    """Gradients that become ready together: when, counted from the step's start, and which parameters."""

    ready_s: float
    rows: tuple[tuple[str, int, torch.Size], ...]  # name, ordinal, shape

    @property
    def numel(self) -> int:
        return sum(shape.numel() for _, _, shape in self.rows)


@dataclass(frozen=True)
class Workload:
    """A step without communication: ``compute_s`` from zero_grad to the end of optimizer.step, on the slowest rank."""

    compute_s: float
    buckets: tuple[TimedBucket, ...]

    @property
    def numel(self) -> int:
        return sum(bucket.numel for bucket in self.buckets)

    def at(self, compute_s: float) -> Workload:
        """The same model on a machine that computes faster or slower."""
        factor = compute_s / self.compute_s
        return Workload(compute_s, tuple(replace(bucket, ready_s=bucket.ready_s * factor) for bucket in self.buckets))

    @classmethod
    def of_size(cls, params: int, compute_s: float, tensor: int = 2**20) -> Workload:
        """A model of which only the size is known: equal tensors, a backward pass of two thirds of the step that
        begins with the tensor declared last."""
        rows, buckets, inside, limit = [], [], 0, FIRST_BUCKET
        done = 0
        starts = range(0, params, tensor)
        for ordinal, start in zip(reversed(range(len(starts))), starts, strict=True):
            count = min(tensor, params - start)
            rows.append((f"tensor{ordinal}", ordinal, torch.Size([1, count])))
            inside, done = inside + 4 * count, done + count
            if inside >= limit or done == params:
                buckets.append(TimedBucket(compute_s * (1 / 3 + 2 / 3 * done / params), tuple(rows)))
                rows, inside, limit = [], 0, BUCKET
        return cls(compute_s, tuple(buckets))


@dataclass(frozen=True)
class ExchangeCost:
    """What a method's exchanges of one step cost beyond their plan.

    Seconds of computing, from gradients to frames and from frames to the mean: a part that does not depend on the
    group, and one for every frame that a rank decodes. ``wire`` is how many times longer than planned the wire takes:
    other patterns than a ring get less out of a link.
    """

    fixed_s: float
    per_frame_s: float = 0.0
    wire: float = 1.0

    def computing_s(self, frames: float) -> float:
        return max(0.0, self.fixed_s + self.per_frame_s * frames)


@dataclass(frozen=True)
class Prediction:
    """One method on one number of hosts."""

    method: str
    hosts: int
    step_s: float
    nbytes: float  # over the busiest link, a step
    codec_s: float
    wire_s: float  # as if nothing overlapped

    @property
    def step_ms(self) -> float:
        return 1e3 * self.step_s


def schedule(
    compute_s: float, backward_end_s: float, jobs: Sequence[tuple[float, float, float]], overlap: float
) -> float:
    """Return a step's seconds; a job is (ready, seconds of computing, seconds on the wire), in order.

    ``overlap`` is the share of the wire's time that costs no processor time. While both threads compute they share
    the processor: backward is delayed by all that the other computes meanwhile. Encoding then takes twice as long; a
    transfer, which mostly waits for the wire, only where twice its computing is more than the wire's own time.
    """
    moving = 1.0 - overlap
    free_s = delay_s = 0.0
    for ready_s, codec_s, wire_s in jobs:
        start_s = max(free_s, ready_s + delay_s)
        busy_s = codec_s + moving * wire_s
        shared_s = min(busy_s, max(0.0, backward_end_s + delay_s - start_s))
        delay_s += shared_s
        longer_s = codec_s + max(0.0, 2 * moving - 1.0) * wire_s
        free_s = start_s + codec_s + wire_s + (longer_s * shared_s / busy_s if busy_s > 0 else 0.0)
    return max(backward_end_s + delay_s, free_s) + compute_s - backward_end_s


def fuses(method: Method) -> bool:
    """Whether buckets may share an exchange where that is faster (thinwire/edges/bucket_fusion.py)."""
    return method.bucket_independent and not method.whole_model and planner(method).fusible


def predict(
    method: Method, work: Workload, link: Link, cost: ExchangeCost, hosts: int, overlap: float = 1.0
) -> Prediction:
    """Predict a step; every host is a machine of its own and computes as fast as the measured one.

    Where buckets may travel together the better of two ways is taken: all of them
    alone, or all in one exchange after backward. A round of local steps overlaps with nothing, and every step of it
    has an equal part.
    """
    if method.outer_rule is not None:
        return _predict_rounds(method, method.outer_rule.every, work, link, cost, hosts)
    together = (TimedBucket(work.buckets[-1].ready_s, tuple(row for bucket in work.buckets for row in bucket.rows)),)
    ways = [work.buckets, together] if fuses(method) else [work.buckets]
    return min((_predict(method, work, way, link, cost, hosts, overlap) for way in ways), key=lambda one: one.step_s)


def _predict_rounds(
    method: Method, every: int, work: Workload, link: Link, cost: ExchangeCost, hosts: int
) -> Prediction:
    exchanges = exchanged_rows(method, [[row for bucket in work.buckets for row in bucket.rows]])
    plans = [plan_exchange(method, layout, hosts) for layout in layouts_of(method, [rows for rows, _ in exchanges])]
    codec_s = cost.computing_s(plans[0].frames) / every
    wire_s = (cost.wire * sum(plans, Plan()).seconds(link) + plan_meeting(hosts).seconds(link)) / every
    nbytes = sum(plans, plan_meeting(hosts)).nbytes / every
    return Prediction(str(method), hosts, work.compute_s + codec_s + wire_s, nbytes, codec_s, wire_s)


def _predict(
    method: Method,
    work: Workload,
    buckets: Sequence[TimedBucket],
    link: Link,
    cost: ExchangeCost,
    hosts: int,
    overlap: float,
) -> Prediction:
    jobs, total, codec_s = [], Plan(), 0.0
    exchanges = exchanged_rows(method, [bucket.rows for bucket in buckets])
    layouts = layouts_of(method, [rows for rows, _ in exchanges])
    for layout, (_, place) in zip(layouts, exchanges, strict=True):
        plan = plan_exchange(method, layout, hosts)
        seconds = cost.computing_s(plan.frames) * layout.numel / max(1, work.numel)  # frames are alike in all buckets
        jobs.append((buckets[place].ready_s, seconds, cost.wire * plan.seconds(link)))
        total, codec_s = total + plan, codec_s + seconds
    rows = [row for bucket in work.buckets for row in bucket.rows]
    averaging = plan_averaging(method, rows, hosts)  # after the optimizer, where nothing overlaps
    step_s = schedule(work.compute_s, work.buckets[-1].ready_s, jobs, overlap) + averaging.seconds(link)
    wire_s = cost.wire * total.seconds(link) + averaging.seconds(link)
    return Prediction(str(method), hosts, step_s, (total + averaging).nbytes, codec_s, wire_s)
