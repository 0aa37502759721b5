"""Cables pulled on emulated hosts, and hosts that are slow; see faults.py cuts and faults.py slow."""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from thinwire.lab import emulation

HOSTS, STEPS, PAUSE_S = 3, 200, 0.05
SHORT_TIMEOUT_S, LONGEST_CUT_S = 20.0, 3.0  # TCP sends again after pauses that double: twice the cut may pass
LONG_TIMEOUT_S = 8.0
FAILED = 7  # exit code of a worker that ends with an ExchangeError
RUN_TIMEOUT_S = 240.0


def worker(spec: str, timeout_s: float, pause_s: float, steps: int, width: int = 200, lag_s: float = 0.0) -> None:
    """One host: train, and tell how it ended."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    dist.barrier()
    group = dist.new_group(timeout=timedelta(seconds=timeout_s))
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(20, width), nn.Tanh(), nn.Linear(width, 10)), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    wire = thinwire.attach(model, optimizer, spec)
    generator = torch.Generator().manual_seed(dist.get_rank())
    print("TRAINING", flush=True)
    for step in range(steps):
        start_s = time.monotonic()
        optimizer.zero_grad()
        try:
            model(torch.randn(4, 20, generator=generator)).square().mean().backward()
        except thinwire.ExchangeError as error:
            told = {"peers": error.peers, "step": error.step, "stage": error.stage, "sentence": str(error)}
            print("FAILED " + json.dumps({**told, "waited_s": round(time.monotonic() - start_s, 2)}), flush=True)
            sys.exit(FAILED)
        optimizer.step()
        if step % 5 == 0:
            print("STEP", step, flush=True)
        time.sleep(pause_s + (lag_s if dist.get_rank() == HOSTS - 1 else 0.0))
    stats = wire.stats
    print("SLOWEST " + json.dumps([stats.slowest_rank, stats.slow_because, stats.waited_s]), flush=True)
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    print("ENDED " + hashlib.sha256(flat.numpy().tobytes()).hexdigest(), flush=True)
    dist.barrier()


class Scissors(threading.Thread):
    """Pulls one host's cable at random moments of a training; ``lengths_s`` of None is until everybody ended."""

    def __init__(self, cluster: emulation.Cluster, lengths_s: list[float | None], dice: random.Random) -> None:
        super().__init__(daemon=True)
        self.network, self.lengths_s, self.dice = cluster.network, lengths_s, dice
        self.cuts: list[dict[str, Any]] = []
        self.lines: list[list[str]] = [[] for _ in range(HOSTS)]
        self.ended = threading.Event()

    def on_line(self, host: int, line: str) -> None:
        self.lines[host].append(line)

    def _steps(self) -> int:
        return sum(line.startswith("STEP") for line in self.lines[0])

    def _wait(self, condition: Any) -> None:
        while not condition() and not self.ended.is_set():
            time.sleep(0.02)

    def run(self) -> None:
        self._wait(lambda: all("TRAINING" in lines for lines in self.lines))
        for length_s in self.lengths_s:
            before = self._steps()
            self._wait(lambda before=before: self._steps() > before)  # it goes on
            if self.ended.wait(self.dice.uniform(0, 0.5)) or any(line.startswith("ENDED") for line in self.lines[0]):
                return
            host = self.dice.randrange(HOSTS)
            self.network.plug(host, False)
            self.cuts.append({"host": host, "seconds": length_s})
            self.ended.wait(length_s)
            self.network.plug(host, True)


def train(spec: str, lengths_s: list[float | None], timeout_s: float, dice: random.Random) -> dict[str, Any]:
    """Train once with these cuts; return what happened on all hosts."""
    pause_s = PAUSE_S if lengths_s else 0.0
    command = _command(spec=spec, timeout_s=timeout_s, pause_s=pause_s, steps=STEPS)
    with emulation.Cluster(HOSTS, "100mbit", grace_s=60) as cluster:
        scissors = Scissors(cluster, lengths_s, dice)
        scissors.start()
        try:
            env = {"OMP_NUM_THREADS": "1"}
            result = cluster.run(command, env=env, on_line=scissors.on_line, timeout_s=RUN_TIMEOUT_S)
        finally:
            scissors.ended.set()
            scissors.join()
    lines = [line for host in scissors.lines for line in host]
    return {
        "cuts": scissors.cuts,
        "exit_codes": [host.exit_code for host in result.hosts],
        "digests": sorted({line.split()[1] for line in lines if line.startswith("ENDED")}),
        "failures": [
            {"host": host, **json.loads(line.removeprefix("FAILED "))}
            for host, own in enumerate(scissors.lines)
            for line in own
            if line.startswith("FAILED ")
        ],
        "output": "" if result.exit_code in (0, FAILED) else "\n".join(host.output[-2000:] for host in result.hosts),
    }


def _command(**options: Any) -> list[str]:
    return [sys.executable, __file__, json.dumps(options)]


def run_slow(methods: list[str]) -> list[dict[str, Any]]:
    """One host with a slow link, one that computes slowly, and none: whom do the statistics name?"""
    rows = []
    for spec in methods:
        for kind, faults, lag_s in (
            ("none", [], 0.0),
            ("link of host 1 at 5mbit", [emulation.Slow(1, emulation.parse_rate("5mbit"))], 0.0),
            ("host 2 takes 0.2 s longer for a step", [], 0.2),
        ):
            command = _command(spec=spec, timeout_s=300, pause_s=0, steps=60, width=10_000, lag_s=lag_s)
            with emulation.Cluster(HOSTS, "100mbit") as cluster:
                result = cluster.run(command, env={"OMP_NUM_THREADS": "1"}, faults=faults, timeout_s=RUN_TIMEOUT_S)
            lines = [line for host in result.hosts for line in host.output.splitlines() if line.startswith("SLOWEST ")]
            told = [json.loads(line.removeprefix("SLOWEST ")) for line in lines]
            rows.append({"fault": f"slow: {kind}", "method": spec, "exit_code": result.exit_code, "told": told})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def run_cuts(cuts: int, methods: list[str], seed: int) -> list[dict[str, Any]]:
    """A quarter of the cuts is longer than the timeout and ends the run; the others are spread over few runs."""
    why = emulation.why_not()
    if why:
        sys.exit(f"no emulated hosts here: {why}")
    dice, rows = random.Random(seed), []
    too_long = cuts // 4
    for place in range(too_long):
        rows.append(cut_too_long(methods[place % len(methods)], dice))
        print(json.dumps(rows[-1]), flush=True)
    left, place = cuts - too_long, 0
    while left > 0:
        rows.append(cut_shortly(methods[place % len(methods)], min(5, left), dice))
        print(json.dumps(rows[-1]), flush=True)
        left -= rows[-1]["tried"]
        place += 1
    return rows


def cut_shortly(spec: str, count: int, dice: random.Random) -> dict[str, Any]:
    reference = train(spec, [], SHORT_TIMEOUT_S, dice)
    ran = train(spec, [dice.uniform(0.2, LONGEST_CUT_S) for _ in range(count)], SHORT_TIMEOUT_S, dice)
    equal = not any(ran["exit_codes"]) and ran["digests"] == reference["digests"] and len(ran["digests"]) == 1
    return {
        "fault": "link cut, shorter than the timeout",
        "method": spec,
        "tried": len(ran["cuts"]),
        "bit_equal": equal,
        **ran,
    }


def cut_too_long(spec: str, dice: random.Random) -> dict[str, Any]:
    ran = train(spec, [None], LONG_TIMEOUT_S, dice)
    (cut,) = ran["cuts"]
    others = [failure for failure in ran["failures"] if failure["host"] != cut["host"]]
    return {
        "fault": "link cut, longer than the timeout",
        "method": spec,
        "tried": 1,
        "timeout_s": LONG_TIMEOUT_S,
        "all_ended_with_the_error": ran["exit_codes"] == [FAILED] * HOSTS and len(ran["failures"]) == HOSTS,
        "named_by_all_others": all(cut["host"] in failure["peers"] for failure in others),
        "longest_wait_s": max((failure["waited_s"] for failure in ran["failures"]), default=None),
        **ran,
    }


if __name__ == "__main__":
    worker(**json.loads(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # what follows is not what is measured here
