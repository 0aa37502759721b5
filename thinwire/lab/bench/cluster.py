"""Step times of real models on emulated hosts, measured and predicted, every method in one group of processes.

Each host is a network namespace with one process, and both ends of its link are shaped. All methods' models are in
memory at once (in batches, where memory is short) and take turns step by step, with a step of `noop`, which sends
nothing, before and after each: a change of the machine's speed meets a step and those that it is compared with alike
(thinwire.lab.bench.turns). Predictions are made anew at the beginning of each round. The rows that are not ours are in
thinwire.lab.bench.peers. "METHOD@none" and "METHOD@all" force how buckets are merged (thinwire.edges.bucket_fusion).
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import thinwire
from thinwire.advisor import advice
from thinwire.advisor.cost.steps import fuses
from thinwire.edges import bucket_fusion as merging
from thinwire.lab import emulation
from thinwire.lab.bench.cluster_worker import MARK, BenchJob, split_merging
from thinwire.lab.bench.models import MODELS
from thinwire.lab.bench.peers import PEERS
from thinwire.lab.bench.rows import commit, hardware, percentiles, today

ALWAYS = ("noop", "dense", "dense:dtype=bf16", "powersgd-1")

VECTORS = 6  # of the model's size that a method holds: parameters, gradients, DDP's buckets, momentum and its own state
MEMORY_SHARE = 0.7  # of what is free: the rest is for activations, and for the processes themselves
TCP = emulation.CUBIC  # of all hosts, and so said in every row

ClusterRow = dict[str, Any]


class HostFailed(RuntimeError):
    """A host's process ended with an error; the sentence says which, with what it said last."""


def benched() -> tuple[str, ...]:
    """What is compared unless somebody asks for other methods: defaults, and papers' own settings."""
    ranked = sorted(thinwire.METHODS.values(), key=lambda kind: (kind.advised.rank, kind.name))
    return tuple(spec for kind in ranked for spec in ((kind.name,) if kind.benched is None else kind.benched))


def all_methods(wanted: Sequence[str]) -> tuple[str, ...]:
    """The rows of a run: noop first, the baselines, and what is wanted."""
    return tuple(dict.fromkeys([*ALWAYS, *wanted]))


def check_method(method: str) -> None:
    """A ValueError for a method that neither thinwire nor this benchmark knows."""
    spec, how = split_merging(method)
    if how not in merging.CHOICES:
        raise ValueError(f"'{method}': behind the @ must stand one of {', '.join(merging.CHOICES)}")
    if spec in PEERS:
        if "@" in method:
            raise ValueError(f"'{method}': only methods of thinwire are merged; leave @{how} out")
        return
    found = thinwire.parse_method(spec)
    rule = found.outer_rule
    if rule is not None and (rule.start or rule.qsr or rule.most_apart):
        raise ValueError(f"'{method}': whole rounds of one length are measured; leave start, qsr and most_apart out")
    if "@" in method and not merged_by_measurement(found):
        raise ValueError(f"'{method}': what travels together is fixed for this method; leave @{how} out")


def merged_by_measurement(method: thinwire.Method) -> bool:
    """Whether thinwire.edges.bucket_fusion chooses which buckets of this method travel together."""
    return fuses(method)


def at_once(model: str, hosts: int) -> int:
    """How many methods beside noop fit into this machine's free memory, all hosts together."""
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = MEMORY_SHARE * 1024 * int(meminfo["MemAvailable"].split()[0])
    with torch.device("meta"):
        numel = sum(parameter.numel() for parameter in MODELS[model].make().parameters())
    return max(1, int(free / (hosts * 4 * VECTORS * numel)) - 1)


def measure_cluster(
    hosts: int,
    rate: str,
    job: BenchJob,
    on_row: Callable[[str], None] = lambda what: None,
    distance: emulation.Distance = emulation.NOTHING,
) -> tuple[list[ClusterRow], list[ClusterRow]]:
    """Run one combination; return its rows, and what each round's predictions were made from."""
    job = dataclasses.replace(job, at_once=at_once(job.model, hosts))
    command = [sys.executable, "-m", "thinwire.lab.bench.cluster_worker", json.dumps(dataclasses.asdict(job))]
    parts: list[ClusterRow] = []
    profiles: list[ClusterRow] = []
    lines: list[str] = []

    def keep(host: int, line: str) -> None:
        if not line.startswith(MARK):
            lines.append(f"host {host}: {line}")
            return
        said = json.loads(line[len(MARK) :])
        if "settled" in said:
            on_row(f"{said['settled']} is ready")
        elif "profile" in said:
            profiles.append(said["profile"])
            on_row("measured the machine")
        else:
            parts.append(said)
            on_row(f"measured {said['method']}")

    package = str(Path(thinwire.__file__).parent.parent)
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))
    far: dict[str, Any] = dataclasses.asdict(distance)
    with emulation.Cluster(
        hosts, rate, latency_ms=distance.latency_ms, jitter_ms=distance.jitter_ms, loss=distance.loss, tcp=TCP
    ) as cluster:
        if distance:
            link = cluster.check_link()
            on_row(link.text if link.far_off is None else f"{link.text}; {link.far_off}")
            far["ping_ms"] = link.ping_ms
        result = cluster.run(command, env={"OMP_NUM_THREADS": "1", "PYTHONPATH": path}, on_line=keep)
    if result.exit_code or len(parts) != job.rounds * sum(len(batch) for batch in job.batches()):
        said = next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "nothing")
        raise HostFailed(f"host {result.failed_rank or 0} ended with exit code {result.exit_code} ({said.strip()})")
    rows = [merged([part for part in parts if part["method"] == method]) for method in job.methods]
    return [{**finished(row, hosts, rate, job), **far} for row in rows], profiles


def merged(parts: Sequence[ClusterRow]) -> ClusterRow:
    """One row of a method's rounds: all its steps, the mean a step of what was counted, the median prediction."""
    weights = [len(part["seconds"]) for part in parts]

    def mean(values: Sequence[float | None]) -> float | None:
        known = [(value, weight) for value, weight in zip(values, weights, strict=True) if value is not None]
        return sum(value * weight for value, weight in known) / sum(weight for _, weight in known) if known else None

    row = {"method": parts[0]["method"], "every": parts[0].get("every", 1)}
    for key in ("seconds", "shares"):
        row[key] = [number for part in parts for number in part[key]]
    for key in ("bytes_per_step", "counted_bytes_per_step", "processor_ms"):
        row[key] = mean([part.get(key) for part in parts])
    row["ratio"] = parts[-1].get("ratio")
    row["breakdown_ms"] = {k: mean([part["breakdown_ms"][k] for part in parts]) for k in parts[0]["breakdown_ms"]}
    predictions = [part["predicted_ms"] for part in parts if part["predicted_ms"] is not None]
    row["predicted_ms"] = statistics.median(predictions) if predictions else None
    return row


def machine() -> str:
    """The processor, and that all hosts share it."""
    model = hardware(torch.device("cpu")).rpartition(",")[0]
    return f"{model}, {len(os.sched_getaffinity(0))} cores for all hosts, 1 thread per host"


def finished(row: ClusterRow, hosts: int, rate: str, job: BenchJob) -> ClusterRow:
    """The row as it is written: percentiles of its steps' times, and of their shares of the no-communication speed."""
    p20, p50, p80 = percentiles(row["seconds"])
    share20, share50, share80 = (1e-3 * share for share in percentiles(row["shares"]))
    return {
        "kind": "cluster",
        "method": row["method"],
        "hosts": hosts,
        "rate": rate,
        "tcp": TCP,
        "model": job.model,
        "steps": len(row["seconds"]) * row["every"],
        "every": row["every"],
        "rounds": job.rounds,
        "step_ms_p20": p20,
        "step_ms_p50": p50,
        "step_ms_p80": p80,
        "samples_per_s": 1e3 * hosts * MODELS[job.model].samples / p50,
        "share_of_noop": share50,
        "share_of_noop_p20": share20,
        "share_of_noop_p80": share80,
        "bytes_per_step": row["bytes_per_step"],
        "counted_bytes_per_step": row["counted_bytes_per_step"],
        "ratio": row["ratio"],
        "processor_ms": row["processor_ms"],
        "breakdown_ms": row["breakdown_ms"],
        "predicted_ms": row["predicted_ms"],
        "commit": commit(),
        "hardware": machine(),
        "date": today(),
    }


def accuracy(rows: Sequence[ClusterRow]) -> str:
    """One sentence about one combination's predictions: how far off, and what following them would have cost."""
    judged = [row for row in rows if row["predicted_ms"] and row["method"] not in ("noop", *PEERS)]
    if not judged:
        return "no predictions"
    off = {row["method"]: abs(row["predicted_ms"] / row["step_ms_p50"] - 1) for row in judged}
    worst = max(off, key=lambda method: off[method])
    best = min(judged, key=lambda row: row["step_ms_p50"])
    order = {method: place for place, method in enumerate(advice.compared(True))}
    judged.sort(key=lambda row: order.get(row["method"], len(order)))
    advised = judged[advice.as_fast([row["predicted_ms"] for row in judged])]
    loss = advised["step_ms_p50"] / best["step_ms_p50"] - 1
    return (
        f"predictions are {100 * statistics.mean(off.values()):.0f} % off on average, at worst "
        f"{100 * off[worst]:.0f} % ({worst}); advised {advised['method']}, measured best {best['method']}"
        + (f", {100 * loss:.0f} % faster" if advised is not best else "")
    )
