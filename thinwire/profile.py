"""What the cost model needs to know about a model on these machines, measured by all ranks at once.

All at once, because ranks that share a machine also share its cores and its memory: a number that one of them measures
alone is too good. Every time is that of the slowest rank, and all ranks get the same numbers.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.cost import Bucket, CodecCost, Prediction, Workload, bucket_layouts, plan_exchange, predict
from thinwire.cost.steps import BUCKET, FIRST_BUCKET
from thinwire.dry import DryRun
from thinwire.methods import Method
from thinwire.probe import Link, measure_link, measure_patterns
from thinwire.transport import Net

Step = Callable[[], object]


@dataclass(frozen=True)
class Profile:
    """Everything that was measured, and what follows from it."""

    hosts: int
    work: Workload
    link: Link
    overlap: float  # share of the wire's time that costs no processor time
    codecs: Mapping[str, CodecCost]  # by method string

    def predict(self, method: Method, hosts: int | None = None) -> Prediction:
        return predict(method, self.work, self.link, self.codecs[str(method)], hosts or self.hosts, self.overlap)


def measure_profile(
    net: Net,
    parameters: Mapping[str, Tensor],
    step: Step,
    methods: Sequence[Method],
    *,
    optimizer_is_sgd: bool = True,
    sizes: Sequence[int] | None = None,
    repeats: int = 3,
) -> Profile:
    """Measure a step without communication, the link, and each method's computing; a collective call.

    ``step`` runs forward, backward and the optimizer once, without exchanging gradients. ``sizes`` are the group sizes
    that the methods' computing is measured for: with two, what a frame more costs is known.
    """
    work = measure_work(net, parameters, step, 2 * repeats)
    link = measure_patterns(net, measure_link(net))
    overlap = measure_overlap(net, step, work.compute_s, link)
    device = next(iter(parameters.values())).device
    group = _power_of_two(net.size)
    codecs = {
        str(method): measure_codec(net, method, work, sizes or (group, 4 * group), optimizer_is_sgd, device, repeats)
        for method in methods
    }
    return Profile(net.size, work, link, overlap, codecs)


def measure_work(net: Net, parameters: Mapping[str, Tensor], step: Step, repeats: int = 3) -> Workload:
    """Time steps, and when each gradient is ready in them; gradients are put into buckets as DDP does."""
    names = list(parameters)
    ready = dict.fromkeys(names, 0.0)
    started = 0.0

    def note(name: str) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            ready[name] = time.perf_counter() - started

        return hook

    handles = [p.register_post_accumulate_grad_hook(note(name)) for name, p in parameters.items()]
    device = next(iter(parameters.values())).device
    rows = []
    try:
        step()
        for _ in range(repeats):
            _meet(net)
            started = time.perf_counter()
            step()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            own = time.perf_counter() - started
            rows.append(_slowest(net, [own, *ready.values()]))
    finally:
        for handle in handles:
            handle.remove()
    medians = [statistics.median(column) for column in zip(*rows, strict=True)]
    return Workload(medians[0], tuple(buckets_of(parameters, dict(zip(names, medians[1:], strict=True)))))


def buckets_of(parameters: Mapping[str, Tensor], ready_s: Mapping[str, float]) -> list[Bucket]:
    """The buckets that DDP makes when gradients become ready at these times."""
    ordinals = {name: ordinal for ordinal, name in enumerate(parameters)}
    order = sorted(parameters, key=lambda name: (ready_s[name], -ordinals[name]))
    tensors = [parameters[name].detach() for name in order]
    groups, _ = dist._compute_bucket_assignment_by_size(tensors, [FIRST_BUCKET, BUCKET])
    buckets = []
    for places in groups:
        members = [order[place] for place in sorted(places)]
        rows = tuple((name, ordinals[name], parameters[name].shape) for name in sorted(members, key=ordinals.get))  # type: ignore[arg-type]
        buckets.append(Bucket(max(ready_s[name] for name in members), rows))
    return sorted(buckets, key=lambda bucket: bucket.ready_s)


def measure_overlap(net: Net, step: Step, compute_s: float, link: Link, repeats: int = 2) -> float:
    """The share of a transfer's time that a step beside it does not notice: 1 where the network card does the work,
    0 where moving bytes keeps the same cores busy as the step."""
    if net.size == 1 or link.beta_s_per_byte <= 0:
        return 1.0
    target_s = min(compute_s, 2.0)
    rounds = net.size - 1
    nbytes = int(min((target_s - rounds * link.alpha_s) / link.beta_s_per_byte / rounds, 2**28 / net.size))
    if nbytes < 1024:
        return 1.0
    frame = torch.zeros(nbytes, dtype=torch.uint8)
    handed, seconds = net.traffic.handed, net.traffic.seconds
    alone, both = [], []
    for _ in range(repeats):
        _meet(net)
        start = time.perf_counter()
        net.all_gather(frame)
        alone.append(_slowest(net, [time.perf_counter() - start])[0])
        _meet(net)
        start = time.perf_counter()
        sender = threading.Thread(target=net.all_gather, args=(frame,))
        sender.start()
        step()
        sender.join()
        both.append(_slowest(net, [time.perf_counter() - start])[0])
    net.traffic.handed, net.traffic.seconds = handed, seconds
    wire_s, both_s = statistics.median(alone), statistics.median(both)
    saved = (compute_s + wire_s - both_s) / min(compute_s, wire_s)
    return min(1.0, max(0.0, saved))


def measure_codec(
    net: Net,
    method: Method,
    work: Workload,
    sizes: Sequence[int],
    optimizer_is_sgd: bool,
    device: torch.device,
    repeats: int = 3,
    typical: Callable[[Sequence[float]], float] = statistics.median,
    clock: Callable[[], float] = time.perf_counter,
) -> CodecCost:
    """Seconds of computing in one step's exchanges; ``sizes`` of a pretended group are powers of two, rising.

    Ranks compute at the same time, and those that share cores end at about the same time: their mean is what a step
    sees, and suffers less than the largest from a rank that happened to be disturbed.
    """
    buckets = [bucket.rows for bucket in work.buckets]
    points = []
    for size in sizes:
        run = DryRun(method, buckets, size, optimizer_is_sgd, device)
        taken = []
        for turn in range(2 + repeats):
            _meet(net)
            seconds = run.seconds(clock)
            if turn >= 2:  # buffers are there, thresholds are known
                taken.append(_mean(net, seconds))
        frames = plan_exchange(method, bucket_layouts(method, buckets)[0], size).frames
        points.append((frames, typical(taken)))
        del run
    (first, first_s), (last, last_s) = points[0], points[-1]
    per_frame_s = max(0.0, (last_s - first_s) / (last - first)) if last > first else 0.0
    return CodecCost(first_s - per_frame_s * first, per_frame_s)


def _power_of_two(size: int) -> int:
    return 1 << max(1, (size - 1).bit_length())


def _meet(net: Net) -> None:
    net.all_reduce(torch.zeros(1, dtype=torch.float64))


def _slowest(net: Net, seconds: Sequence[float]) -> list[float]:
    """The largest of all ranks, place by place."""
    values = torch.tensor(list(seconds), dtype=torch.float64)
    net.all_reduce(values, largest=True)
    result: list[float] = values.tolist()
    return result


def _mean(net: Net, seconds: float) -> float:
    value = torch.tensor([seconds], dtype=torch.float64)
    net.all_reduce(value)
    return float(value) / net.size
