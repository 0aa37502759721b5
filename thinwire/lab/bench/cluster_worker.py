"""One host's part of `thinwire bench cluster`: measures the machine, then every method's steps; rank 0 prints rows.

python -m thinwire.lab.bench.cluster_worker JOB        # JOB: a BenchJob as JSON, in the environment of thinwire cluster
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from thinwire.advisor.advice import planned
from thinwire.advisor.profile import Profile, measure_profile
from thinwire.edges.bucket_fusion import VARIABLE
from thinwire.lab.bench.models import MODELS
from thinwire.lab.bench.peers import PEERS, wrapped
from thinwire.lab.bench.rows import percentiles
from thinwire.lab.bench.turns import order_of, shares_of
from thinwire.transport import TorchNet
from thinwire.transport.groups import acquire_group

WARMUP, FEWEST = 2, 4  # turns; the latter of all rounds together
SETTLING = 4  # further steps of a wire that compresses: what it learns from its first steps is then in use
MARK = "THINWIRE-ROW "


@dataclasses.dataclass(frozen=True)
class BenchJob:
    """What a combination of hosts and rate measures."""

    model: str
    methods: tuple[str, ...]  # noop is the first
    steps: int
    row_seconds: float  # a row with long steps does fewer
    predict: bool
    rounds: int = 1  # the machine and all methods are measured so many times, a part of the steps each
    at_once: int = 64  # methods beside noop that are in memory at the same time

    def batches(self) -> list[tuple[str, ...]]:
        """The methods that take turns with each other, each time with noop in front."""
        free, *others = self.methods
        starts = range(0, len(others), self.at_once)
        return [(free, *others[start : start + self.at_once]) for start in starts] or [(free,)]


def split_merging(method: str) -> tuple[str, str]:
    """A row's method, and how its buckets are merged: "dgc@none" -> ("dgc", "none"), "auto" where it does not say."""
    spec, _, how = method.partition("@")
    return spec, how or "auto"


class Host:
    """One rank: its batch, and fresh models."""

    def __init__(self, job: BenchJob) -> None:
        self.job, self.spec = job, MODELS[job.model]
        torch.manual_seed(1 + dist.get_rank())
        self.inputs, self.labels = self.spec.inputs(), self.spec.labels()
        self.rank = dist.get_rank()

    def fresh(self, method: str) -> tuple[DDP, torch.optim.Optimizer, Any]:
        """A model that is equal on all ranks without a broadcast over the thin link, and its wire."""
        torch.manual_seed(0)
        spec, how = split_merging(method)
        peer = spec if spec in PEERS else None
        model = wrapped(self.spec.make(), peer)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
        if peer is not None:
            return model, optimizer, None
        os.environ[VARIABLE] = how
        return model, optimizer, thinwire.attach(model, optimizer, spec)

    def step(self, model: DDP, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        self.spec.loss(model, self.inputs, self.labels).backward()
        optimizer.step()

    def profile(self) -> Profile:
        """What the predictions are made from, measured before any row."""
        model, optimizer, wire = self.fresh("noop")
        net = acquire_group(TorchNet(model.process_group, torch.device("cpu")))
        specs = dict.fromkeys(split_merging(method)[0] for method in self.job.methods)
        known, _ = planned([thinwire.parse_method(spec) for spec in specs if spec not in PEERS])
        found = measure_profile(
            net, dict(model.module.named_parameters()), lambda: self.step(model, optimizer), known, more_hosts=False
        )
        wire.abandon()
        return found

    def rows(self, methods: Sequence[str]) -> list[dict[str, Any]]:
        """One row per method, noop first: all of them are set up, and then take turns step by step."""
        lanes = [Lane(self, method) for method in methods]
        for lane in lanes:
            lane.commit()
            say(self.rank, {"settled": lane.method})
        longest = self._slowest([lane.timer.seconds[-1] * lane.every for lane in lanes[1:]])
        steps, rounds = self.job.steps, self.job.rounds
        wanted = [-(-min(steps, max(FEWEST, int(self.job.row_seconds / one))) // rounds) for one in longest]
        order = order_of(wanted)
        for lane in lanes:
            lane.begin()
        gc.collect()
        gc.freeze()  # the other methods' models are nothing that a method's collections should look at
        for place in order:
            lanes[place].turn()
        gc.unfreeze()
        taken = [iter(lane.timer.seconds) for lane in lanes]
        shares = shares_of(order, self._slowest([next(taken[place]) for place in order]))
        found = [
            {**lane.row(self._slowest(lane.timer.seconds)), "shares": shares.get(place, [])}
            for place, lane in enumerate(lanes)
        ]
        for lane in lanes:
            lane.leave()
        return found

    @staticmethod
    def _slowest(seconds: list[float]) -> list[float]:
        """The slowest rank's time of every step: without communication ranks do not end together."""
        values = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return list(values.tolist())


def steps_per_turn(method: str) -> int:
    """1, or the optimizer steps of a whole round, the last of which exchanges."""
    spec, _ = split_merging(method)
    rule = None if spec in PEERS else thinwire.parse_method(spec).outer_rule
    return 1 if rule is None else rule.every


class Lane:
    """One method with its own model, optimizer and wire, and what its turns took: a step each, or a round of steps.

    All that is told is per step: a turn's time is divided by its steps.
    """

    def __init__(self, host: Host, method: str) -> None:
        self.host, self.method = host, method
        self.model, self.optimizer, self.wire = host.fresh(method)
        self.every = steps_per_turn(method)
        self.timer = StepTimer(self.model, self.every)
        self.begin()

    def begin(self) -> None:
        """Count from here on."""
        self.timer.clear()
        self.processor_s, self.nbytes = 0.0, 0
        self._before = self.wire.snapshot(residual_norm=False) if self.wire is not None else None

    def commit(self) -> None:
        compresses = self.wire is not None and self.wire.reducer.running.aggregator.fusible
        late = self.method.startswith("powersgd")  # its first steps are plain all-reduces, and say nothing of the later
        settling = SETTLING if compresses else 1 if late else 0
        for _ in range(WARMUP + settling if self.every == 1 else 1):
            self.turn()

    def turn(self) -> None:
        """It begins when all ranks are here; what its wire does in the background has ended, too."""
        dist.barrier()
        sent, processor = bytes_on_link(), time.process_time()
        self.timer.start()
        for _ in range(self.every):
            self.timer.forward()
            self.optimizer.zero_grad()
            self.host.spec.loss(self.model, self.host.inputs, self.host.labels).backward()
            self.timer.backward_done()
            self.optimizer.step()
        self.timer.stop()
        if self.wire is not None:
            self.wire.snapshot(residual_norm=False)
        self.processor_s += time.process_time() - processor
        self.nbytes += bytes_on_link() - sent

    def row(self, seconds: list[float]) -> dict[str, Any]:
        """What is told of this rank's steps; ``seconds`` are those of the slowest rank."""
        timer, steps = self.timer, len(seconds) * self.every
        row: dict[str, Any] = {"method": self.method, "seconds": seconds, "bytes_per_step": self.nbytes / steps}
        row["every"] = self.every
        row["processor_ms"] = 1e3 * self.processor_s / steps
        breakdown = {"forward_backward": timer.median(timer.computed), "wait": timer.median(timer.waited)}
        if self.wire is not None and self._before is not None:
            done = self.wire.snapshot(residual_norm=False)
            for name, keys in {
                "compress": ("seconds_compensating", "seconds_compressing"),
                "communicate": ("seconds_communicating",),
            }.items():
                breakdown[name] = 1e3 * sum(getattr(done, key) - getattr(self._before, key) for key in keys) / steps
            row["ratio"] = done.ratio
            row["counted_bytes_per_step"] = (done.bytes_sent - self._before.bytes_sent) / steps
        row["breakdown_ms"] = {k: breakdown.get(k) for k in ("forward_backward", "compress", "communicate", "wait")}
        return row

    def leave(self) -> None:
        if self.wire is not None:
            self.wire.abandon()
        self.timer.remove()


class StepTimer:
    """Seconds of a step, until the last gradient was computed, and from then on until backward returned."""

    def __init__(self, model: DDP, every: int = 1) -> None:
        self._every = every
        self.clear()
        self._handles = [p.register_post_accumulate_grad_hook(self._note) for p in model.parameters()]

    def clear(self) -> None:
        self.seconds: list[float] = []
        self.computed: list[float] = []
        self.waited: list[float] = []

    def start(self) -> None:
        self._began = time.perf_counter()

    def forward(self) -> None:
        self._started = self._last = time.perf_counter()

    def _note(self, _: Tensor) -> None:
        self._last = time.perf_counter()

    def backward_done(self) -> None:
        self.computed.append(self._last - self._started)
        self.waited.append(time.perf_counter() - self._last)

    def stop(self) -> None:
        self.seconds.append((time.perf_counter() - self._began) / self._every)

    @staticmethod
    def median(seconds: list[float]) -> float:
        return percentiles(seconds)[1]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def bytes_on_link() -> int:
    """What the kernel counted as sent on this host's interface."""
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def say(rank: int, row: dict[str, Any]) -> None:
    if rank == 0:
        print(MARK + json.dumps(row), flush=True)


def main() -> None:
    given = json.loads(sys.argv[1])
    job = BenchJob(**{**given, "methods": tuple(given["methods"])})
    torch.set_num_threads(1)  # all hosts share this machine's cores
    dist.init_process_group("gloo")
    host = Host(job)
    for _ in range(job.rounds):
        one_round(host)
    dist.barrier()


def one_round(host: Host) -> None:
    """Measure the machine, predict, and measure a part of every method's steps."""
    predicted: dict[str, float] = {}
    if host.job.predict:
        profile = host.profile()
        for method in profile.costs:
            predicted[method] = profile.predict(thinwire.parse_method(method)).step_ms
        say(host.rank, {"profile": summary(profile)})
    for methods in host.job.batches():
        for row in host.rows(methods):
            spec, _ = split_merging(row["method"])
            known = "dense" if spec == "ddp" else "" if spec in PEERS else str(thinwire.parse_method(spec))
            say(host.rank, {**row, "predicted_ms": predicted.get(known)})
        gc.collect()


def summary(profile: Profile) -> dict[str, Any]:
    """A profile in JSON's terms."""
    return {
        "hosts": profile.hosts,
        "compute_ms": 1e3 * profile.work.compute_s,
        "params": profile.work.numel,
        "alpha_s": profile.link.alpha_s,
        "beta_s_per_byte": profile.link.beta_s_per_byte,
        "overlap": profile.overlap,
        "drift": profile.drift,
        "buckets": [{"ready_ms": 1e3 * b.ready_s, "params": b.numel} for b in profile.work.buckets],
        "codec_ms": {name: 1e3 * profile.predict(thinwire.parse_method(name)).codec_s for name in profile.costs},
        "wire_ms": {name: 1e3 * profile.predict(thinwire.parse_method(name)).wire_s for name in profile.costs},
        "wire_factor": {name: cost.wire for name, cost in profile.costs.items()},
    }


if __name__ == "__main__":
    main()
