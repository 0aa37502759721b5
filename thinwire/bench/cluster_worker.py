"""One host's part of `thinwire bench cluster`: measures the machine, then every method's steps; rank 0 prints rows.

python -m thinwire.bench.cluster_worker JOB        # JOB: a Job as JSON, in the environment of thinwire cluster
"""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from thinwire.bench.models import MODELS
from thinwire.bench.peers import PEERS, wrapped
from thinwire.bench.rows import percentiles
from thinwire.groups import own_net
from thinwire.profile import Profile, measure_profile
from thinwire.transport import TorchNet

WARMUP, FEWEST = 2, 4  # steps; the latter of all rounds together
SETTLING = 4  # further steps of a wire that compresses: what it learns from its first steps is then in use
MARK = "THINWIRE-ROW "


@dataclasses.dataclass(frozen=True)
class Job:
    """What a combination of hosts and rate measures."""

    model: str
    methods: tuple[str, ...]
    steps: int
    row_seconds: float  # a row with long steps does fewer
    predict: bool
    rounds: int = 1  # the machine and all methods are measured so many times, a part of the steps each


class Host:
    """One rank: fresh models, timed steps."""

    def __init__(self, job: Job) -> None:
        self.job, self.spec = job, MODELS[job.model]
        torch.manual_seed(1 + dist.get_rank())
        self.inputs, self.labels = self.spec.inputs(), self.spec.labels()
        self.rank = dist.get_rank()

    def fresh(self, method: str) -> tuple[DDP, torch.optim.Optimizer, Any]:
        """A model that is equal on all ranks without a broadcast over the thin link, and its wire."""
        torch.manual_seed(0)
        peer = method if method in PEERS else None
        model = wrapped(self.spec.make(), peer)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
        wire = thinwire.attach(model, optimizer, method) if peer is None else None
        return model, optimizer, wire

    def step(self, model: DDP, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        self.spec.loss(model, self.inputs, self.labels).backward()
        optimizer.step()

    def profile(self) -> Profile:
        """What the predictions are made from, measured before any row."""
        model, optimizer, wire = self.fresh("noop")
        net = own_net(TorchNet(model.process_group, torch.device("cpu")))
        known = [thinwire.parse_method(m) for m in dict.fromkeys(self.job.methods) if m not in PEERS]
        found = measure_profile(
            net, dict(model.module.named_parameters()), lambda: self.step(model, optimizer), known, more_hosts=False
        )
        wire.abandon()
        return found

    def row(self, method: str) -> dict[str, Any]:
        model, optimizer, wire = self.fresh(method)
        timer = StepTimer(model)
        settles = wire is not None and wire.method.name not in ("noop", "dense")
        for _ in range(WARMUP + (SETTLING if settles else 0)):
            self._timed_step(timer, model, optimizer)
        longest = self._slowest(timer.seconds[-1:])[0]
        rounds = self.job.rounds
        wanted = min(self.job.steps, max(FEWEST, int(self.job.row_seconds / longest)))
        steps = -(-wanted // rounds)
        dist.barrier()
        timer.clear()
        before, stats = bytes_on_link(), wire.stats if wire is not None else None
        processor = time.process_time()
        for _ in range(steps):
            self._timed_step(timer, model, optimizer)
        processor = time.process_time() - processor
        dist.barrier()
        row = {"method": method, "bytes_per_step": (bytes_on_link() - before) / steps}
        row["seconds"] = self._slowest(timer.seconds)
        row["processor_ms"] = 1e3 * processor / steps
        breakdown = {"forward_backward": timer.median(timer.computed), "wait": timer.median(timer.waited)}
        if wire is not None and stats is not None:
            done = wire.stats
            for name, keys in {
                "compress": ("seconds_compensating", "seconds_compressing"),
                "communicate": ("seconds_communicating",),
            }.items():
                breakdown[name] = 1e3 * sum(getattr(done, key) - getattr(stats, key) for key in keys) / steps
            row["ratio"] = done.ratio
            row["counted_bytes_per_step"] = (done.bytes_sent - stats.bytes_sent) / steps
            wire.abandon()
        row["breakdown_ms"] = {k: breakdown.get(k) for k in ("forward_backward", "compress", "communicate", "wait")}
        timer.remove()
        return row

    def _timed_step(self, timer: StepTimer, model: DDP, optimizer: torch.optim.Optimizer) -> None:
        dist.barrier()
        timer.start()
        optimizer.zero_grad()
        self.spec.loss(model, self.inputs, self.labels).backward()
        timer.backward_done()
        optimizer.step()
        timer.stop()

    @staticmethod
    def _slowest(seconds: list[float]) -> list[float]:
        """The slowest rank's time of every step: without communication ranks do not end together."""
        values = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return list(values.tolist())


class StepTimer:
    """Seconds of a step, until the last gradient was computed, and from then on until backward returned."""

    def __init__(self, model: DDP) -> None:
        self.clear()
        self._handles = [p.register_post_accumulate_grad_hook(self._note) for p in model.parameters()]

    def clear(self) -> None:
        self.seconds: list[float] = []
        self.computed: list[float] = []
        self.waited: list[float] = []

    def start(self) -> None:
        self._started = self._last = time.perf_counter()

    def _note(self, _: Tensor) -> None:
        self._last = time.perf_counter()

    def backward_done(self) -> None:
        self.computed.append(self._last - self._started)
        self.waited.append(time.perf_counter() - self._last)

    def stop(self) -> None:
        self.seconds.append(time.perf_counter() - self._started)

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
    job = Job(**{**given, "methods": tuple(given["methods"])})
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
    for place, method in enumerate(host.job.methods):
        row = host.row(method)
        known = None if method in PEERS else str(thinwire.parse_method(method))
        row["predicted_ms"] = predicted.get("dense") if method == "ddp" else predicted.get(known or "")
        say(host.rank, {**row, "place": place})
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
