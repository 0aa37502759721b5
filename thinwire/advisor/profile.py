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
from torch import Tensor

from thinwire.advisor.cost import ExchangeCost, Plan, Prediction, TimedBucket, Workload, plan_exchange, predict
from thinwire.advisor.cost.plans import exchanged_rows, layouts_of, planner
from thinwire.advisor.cost.steps import BUCKET, FIRST_BUCKET
from thinwire.advisor.link import Link, measure_link, meet, slowest_s
from thinwire.advisor.microbench import DryRun, ExchangeBenchmark
from thinwire.engine.layout import Layout
from thinwire.engine.traffic_plan import all_reduce
from thinwire.methods import Method
from thinwire.methods.base import Rows
from thinwire.torch_private import bucket_assignment
from thinwire.transport import Net, TorchNet, overhead

Step = Callable[[], object]

WARMUP = 2  # steps: memory and code settle
LONG_STEP_S = 1.0  # such a step is timed less often: the whole must not take much more than half a minute
LONGEST_S = 1.25  # planned wire time of a rehearsed exchange; of a longer one a share is rehearsed
LONG_S = 0.5  # an exchange of this length is rehearsed less often: it holds many messages
UNTIMED = 4  # rehearsals after which buffers are there and thresholds are known
SAMPLE = 2**20  # elements on which the cost of one more frame is measured
TRANSFER_SHARE = 0.5  # of a step's time: the transfer that a step runs beside
ODD = 4.0  # a wire that takes this many times longer or shorter than planned is a disturbance, not the method


@dataclass(frozen=True)
class Profile:
    """Everything that was measured, and what follows from it."""

    hosts: int
    work: Workload
    link: Link
    overlap: float  # share of the wire's time that costs no processor time
    costs: Mapping[str, ExchangeCost]  # by method string
    drift: float = 0.0  # how much longer the step without communication took after the measurements than before

    def predict(self, method: Method, hosts: int | None = None) -> Prediction:
        return predict(method, self.work, self.link, self.costs[str(method)], hosts or self.hosts, self.overlap)


def measure_profile(
    net: Net,
    parameters: Mapping[str, Tensor],
    step: Step,
    methods: Sequence[Method],
    *,
    optimizer_is_sgd: bool = True,
    more_hosts: bool = True,
    repeats: int = 3,
) -> Profile:
    """Measure the link, a step without communication, and each method's exchanges; a collective call.

    ``step`` runs forward, backward and the optimizer once, without exchanging gradients. ``more_hosts`` also measures
    what one more frame costs, which predictions for larger groups need.
    """
    with overhead(net), StepWatch(net, parameters, step) as steps:
        link = measure_link(net)
        for _ in range(repeats):
            steps.time_one()
        before = steps.work()
        again = repeats if before.compute_s < LONG_STEP_S else 2
        transfer = Transfer(net, link, before.compute_s * TRANSFER_SHARE)
        for _ in range(again):
            transfer.alone()
            transfer.beside(step)
        device = next(iter(parameters.values())).device
        costs = {
            str(method): measure_exchange(net, method, before, link, optimizer_is_sgd, device, repeats, more_hosts)
            for method in methods
        }
        for _ in range(again):
            steps.time_one()
    after_s = statistics.median(steps.noted[repeats:])
    work = steps.work()
    return Profile(net.size, work, link, transfer.overlap(work.compute_s), costs, after_s / before.compute_s - 1)


def measure_work(net: Net, parameters: Mapping[str, Tensor], step: Step, repeats: int = 3) -> Workload:
    """Time steps, and when each gradient is ready in them."""
    with StepWatch(net, parameters, step) as steps:
        for _ in range(repeats):
            steps.time_one()
    return steps.work()


class StepWatch:
    """Times steps without communication on all ranks, and when each gradient is ready in them.

    Used in a with statement: its hooks leave the parameters however that ends.
    """

    def __init__(self, net: Net, parameters: Mapping[str, Tensor], step: Step) -> None:
        self._net, self._parameters, self._step = net, parameters, step
        self._ready = dict.fromkeys(parameters, 0.0)
        self._started = 0.0
        self._rows: list[list[float]] = []  # of the slowest rank: the step, then every gradient
        self._handles = [p.register_post_accumulate_grad_hook(self._hook(name)) for name, p in parameters.items()]
        self._device = next(iter(parameters.values())).device

    def __enter__(self) -> StepWatch:
        try:
            for _ in range(WARMUP):
                self._step()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, name: str) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            self._ready[name] = time.perf_counter() - self._started

        return hook

    @property
    def noted(self) -> list[float]:
        """Seconds of the steps so far, of the slowest rank."""
        return [row[0] for row in self._rows]

    def time_one(self) -> None:
        """Time one step; a collective call."""
        meet(self._net)
        self._started = time.perf_counter()
        self._step()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        own_s = time.perf_counter() - self._started
        self._rows.append(_slowest(self._net, [own_s, *self._ready.values()]))

    def work(self) -> Workload:
        """The median step so far; its gradients are put into buckets as DDP does."""
        compute_s, *ready_s = (statistics.median(column) for column in zip(*self._rows, strict=True))
        ready = dict(zip(self._parameters, ready_s, strict=True))
        return Workload(compute_s, tuple(buckets_of(self._parameters, ready)))


def buckets_of(parameters: Mapping[str, Tensor], ready_s: Mapping[str, float]) -> list[TimedBucket]:
    """The buckets that DDP makes when gradients become ready at these times."""
    ordinals = {name: ordinal for ordinal, name in enumerate(parameters)}
    order = sorted(parameters, key=lambda name: (ready_s[name], -ordinals[name]))
    tensors = [parameters[name].detach() for name in order]
    groups = bucket_assignment(tensors, (FIRST_BUCKET, BUCKET))
    buckets = []
    for places in groups:
        members = [order[place] for place in sorted(places)]
        rows = tuple((name, ordinals[name], parameters[name].shape) for name in sorted(members, key=ordinals.get))  # type: ignore[arg-type]
        buckets.append(TimedBucket(max(ready_s[name] for name in members), rows))
    return sorted(buckets, key=lambda bucket: bucket.ready_s)


class Transfer:
    """An all-reduce of a given planned length, timed alone and beside a step."""

    LARGEST = 2**26  # elements
    WORTH_S = 1e-4  # what is shorter disturbs no step

    def __init__(self, net: Net, link: Link, wanted_s: float) -> None:
        self._net = net
        self._alone: list[float] = []
        self._both: list[float] = []
        plan = all_reduce(4, net.size)  # of one element; the latency comes once
        free_s = wanted_s - plan.rounds * link.alpha_s
        numel = free_s / (plan.nbytes * link.beta_s_per_byte) if link.beta_s_per_byte > 0 else 0.0
        self._buffer = net.to_wire(torch.zeros(min(self.LARGEST, max(0, int(numel))), dtype=torch.float32))

    def _move(self) -> None:
        self._net.all_reduce(self._buffer)

    def alone(self) -> None:
        if self._buffer.numel():
            self._alone.append(slowest_s(self._net, self._move))

    def beside(self, step: Step) -> None:
        def both() -> None:
            sender = threading.Thread(target=self._move)
            sender.start()
            try:
                step()
            finally:
                sender.join()

        if self._buffer.numel():
            self._both.append(slowest_s(self._net, both))

    def overlap(self, compute_s: float) -> float:
        """The share of a transfer's time that a step beside it does not notice: 1 where the network card does the work,
        0 where moving bytes keeps the same cores busy as the step."""
        wire_s = statistics.median(self._alone) if self._alone else 0.0
        if wire_s < self.WORTH_S:
            return 1.0
        saved_s = compute_s + wire_s - statistics.median(self._both)
        return min(1.0, max(0.0, saved_s / min(compute_s, wire_s)))


def measure_exchange(
    net: Net,
    method: Method,
    work: Workload,
    link: Link,
    optimizer_is_sgd: bool,
    device: torch.device,
    repeats: int = 3,
    more_hosts: bool = True,
    longest_s: float = LONGEST_S,
) -> ExchangeCost:
    """Rehearse one step's exchanges of a method over the real net: what they compute, and the wire against its plan.

    A collective call. Where the plan takes longer than ``longest_s``, every tensor is cut to a share, still so long
    that bytes and not latency decide. A rank's time on the wire contains waiting for others that still compute: so
    the computing is that of the rank that computes longest, and the rest of the slowest rank's time is the wire's.
    """
    whole = exchanges_of(method, work)
    planned_s = _plan(method, layouts_of(method, whole), net.size).seconds(link)
    share = min(1.0, longest_s / max(1e-9, planned_s))
    rows = [cut(one, share, dense_below(method)) for one in whole]
    run = ExchangeBenchmark(method, rows, net, optimizer_is_sgd, device)
    computed: list[float] = []
    on_wire: list[float] = []
    untimed, timed = UNTIMED, repeats
    while len(computed) < timed:
        meet(net)
        before = _wire_s(net)
        own_s = run.seconds()
        own_wire_s = _wire_s(net) - before
        slowest, computing = _slowest(net, [own_s, own_s - own_wire_s])
        if slowest > LONG_S:  # there a search of the whole gradient counts for little
            untimed, timed = min(untimed, 1), min(timed, 2)
        if untimed:
            untimed -= 1
        else:
            computed.append(computing)
            on_wire.append(slowest - computing)
    run.close()
    layouts = run.layouts
    del run
    rehearsed_s = _plan(method, layouts, net.size).seconds(link)
    factor = statistics.median(on_wire) / rehearsed_s if rehearsed_s > 0 else 1.0
    codec_s = statistics.median(computed) * work.numel / max(1, sum(layout.numel for layout in layouts))
    frames = plan_exchange(method, layouts[0], net.size).frames
    per_frame_s = frame_cost(net, method, work, optimizer_is_sgd, device) if more_hosts and frames else 0.0
    return ExchangeCost(codec_s - per_frame_s * frames, per_frame_s, min(ODD, max(1 / ODD, factor)))


def exchanges_of(method: Method, work: Workload) -> list[Rows]:
    """What a step's exchanges carry: found out before tensors are cut, which would change what fits into a group."""
    return [rows for rows, _ in exchanged_rows(method, [bucket.rows for bucket in work.buckets])]


def _plan(method: Method, layouts: Sequence[Layout], hosts: int) -> Plan:
    return sum((plan_exchange(method, layout, hosts) for layout in layouts), Plan())


def dense_below(method: Method) -> int:
    """Tensors of fewer elements are not compressed."""
    return max(getattr(one, "dense_below", 0) for one in method.members)


def cut(rows: Rows, share: float, least: int = 0) -> Rows:
    """The same tensors with this share of their first dimensions, but of ``least`` elements or more where they were;
    vectors, mostly sent as they are, stay whole."""

    def shape_of(shape: torch.Size) -> torch.Size:
        if len(shape) < 2:
            return shape
        first = max(1, round(shape[0] * share), -(-least // max(1, shape[1:].numel())))
        return torch.Size([min(first, shape[0]), *shape[1:]])

    return [(name, ordinal, shape_of(shape)) for name, ordinal, shape in rows] if share < 1 else rows


def frame_cost(net: Net, method: Method, work: Workload, optimizer_is_sgd: bool, device: torch.device) -> float:
    """Seconds that one more frame costs a step, from a sample of the model in two pretended groups."""
    share = min(1.0, SAMPLE / max(1, work.numel))
    sample = [cut(rows, share, dense_below(method)) for rows in exchanges_of(method, work)]
    group = 1 << max(1, (net.size - 1).bit_length())
    cost = measure_codec(net, method, sample, (group, 4 * group), optimizer_is_sgd, device, repeats=2)
    numel = sum(shape.numel() for rows in sample for _, _, shape in rows)
    return cost.per_frame_s * (work.numel / numel if frames_grow(method) else 1.0)


def frames_grow(method: Method) -> bool:
    """Whether a frame grows with the model whatever the group. A server's frames share one model between them: what one
    more of them costs is only its handling, once an exchange."""
    return planner(method).frames_grow


def measure_codec(
    net: Net,
    method: Method,
    exchanges: Sequence[Rows],
    sizes: Sequence[int],
    optimizer_is_sgd: bool,
    device: torch.device,
    repeats: int = 3,
    typical: Callable[[Sequence[float]], float] = statistics.median,
    clock: Callable[[], float] = time.perf_counter,
) -> ExchangeCost:
    """Seconds of computing in one step's exchanges; ``sizes`` of a pretended group are powers of two, rising."""
    points = []
    for size in sizes:
        run = DryRun(method, exchanges, size, optimizer_is_sgd, device)
        taken = []
        for context in range(UNTIMED + repeats):
            meet(net)
            seconds = run.seconds(clock)
            if context >= UNTIMED:
                taken.append(_mean(net, seconds))
        frames = plan_exchange(method, run.layouts[0], size).frames
        points.append((frames, typical(taken)))
        run.close()
        del run
    (first, first_s), (last, last_s) = points[0], points[-1]
    per_frame_s = max(0.0, (last_s - first_s) / (last - first)) if last > first else 0.0
    return ExchangeCost(first_s - per_frame_s * first, per_frame_s)


def _wire_s(net: Net) -> float:
    return net.seconds if isinstance(net, TorchNet) else net.traffic.seconds


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
