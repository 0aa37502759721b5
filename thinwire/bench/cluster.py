"""Step times of real models on emulated hosts, measured and predicted, every method in one group of processes.

Each host is a network namespace with one process, and both ends of its link are shaped. Methods take turns within one
group, in several rounds, `noop` (no communication) first and last in each: a change of the machine's speed meets all
methods, and shows. Predictions are made anew at the beginning of each round. thinwire.bench.peers has the rows that are
not ours.
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
from thinwire import advice, emulation
from thinwire.bench.cluster_worker import MARK, Job
from thinwire.bench.models import MODELS
from thinwire.bench.paper_settings import PAPER_DGC, PAPER_GTOPK
from thinwire.bench.peers import PEERS
from thinwire.bench.rows import commit, hardware, percentiles, today

ALWAYS = ("noop", "dense", "dense:dtype=bf16", "powersgd-1")
# The defaults, and the papers' own settings.
METHODS = ("dgc", PAPER_DGC, "gtopk", PAPER_GTOPK, "terngrad", "blocksign")

Row = dict[str, Any]


class HostFailed(RuntimeError):
    """A host's process ended with an error; the sentence says which, with what it said last."""


def all_methods(wanted: Sequence[str]) -> tuple[str, ...]:
    """The rows of a run: noop first and last, the baselines, and what is wanted."""
    return (*dict.fromkeys([*ALWAYS, *wanted]), "noop")


def check_method(method: str) -> None:
    """A ValueError for a method that neither thinwire nor this benchmark knows."""
    if method not in PEERS:
        thinwire.parse_method(method)


def measure_cluster(
    hosts: int, rate: str, job: Job, on_row: Callable[[str], None] = lambda method: None
) -> tuple[list[Row], list[Row]]:
    """Run one combination; return its rows, and what each round's predictions were made from."""
    command = [sys.executable, "-m", "thinwire.bench.cluster_worker", json.dumps(dataclasses.asdict(job))]
    found: list[Row] = []
    lines: list[str] = []

    def keep(host: int, line: str) -> None:
        if line.startswith(MARK):
            found.append(json.loads(line[len(MARK) :]))
            on_row("the machine" if "profile" in found[-1] else found[-1]["method"])
        else:
            lines.append(f"host {host}: {line}")

    package = str(Path(thinwire.__file__).parent.parent)
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))
    with emulation.Cluster(hosts, rate) as cluster:
        result = cluster.run(command, env={"OMP_NUM_THREADS": "1", "PYTHONPATH": path}, on_line=keep)
    parts = [row for row in found if "profile" not in row]
    if result.exit_code or len(parts) != job.rounds * len(job.methods):
        said = next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "nothing")
        raise HostFailed(f"host {result.failed_rank or 0} ended with exit code {result.exit_code} ({said.strip()})")
    rows = [merged([part for part in parts if part["place"] == place]) for place in range(len(job.methods))]
    return [finished(row, hosts, rate, job, rows) for row in rows], [
        row["profile"] for row in found if "profile" in row
    ]


def merged(parts: Sequence[Row]) -> Row:
    """One row of a method's rounds: all its steps, the mean a step of what was counted, the median prediction."""
    weights = [len(part["seconds"]) for part in parts]

    def mean(values: Sequence[float | None]) -> float | None:
        known = [(value, weight) for value, weight in zip(values, weights, strict=True) if value is not None]
        return sum(value * weight for value, weight in known) / sum(weight for _, weight in known) if known else None

    row = {"method": parts[0]["method"], "seconds": [second for part in parts for second in part["seconds"]]}
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
    return f"{model}, {len(os.sched_getaffinity(0))} cores for all hosts, 1 thread a host"


def finished(row: Row, hosts: int, rate: str, job: Job, rows: Sequence[Row]) -> Row:
    """The row as it is written: percentiles, and the share of the no-communication speed, from all noop steps."""
    free = percentiles([s for other in rows if other["method"] == "noop" for s in other["seconds"]])[1]
    p20, p50, p80 = percentiles(row["seconds"])
    return {
        "kind": "cluster",
        "method": row["method"],
        "hosts": hosts,
        "rate": rate,
        "model": job.model,
        "steps": len(row["seconds"]),
        "rounds": job.rounds,
        "step_ms_p20": p20,
        "step_ms_p50": p50,
        "step_ms_p80": p80,
        "samples_per_s": 1e3 * hosts * MODELS[job.model].samples / p50,
        "share_of_noop": free / p50,
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


def accuracy(rows: Sequence[Row]) -> str:
    """One sentence about one combination's predictions: how far off, and what following them would have cost."""
    judged = [row for row in rows if row["predicted_ms"] and row["method"] not in ("noop", *PEERS)]
    if not judged:
        return "no predictions"
    off = {row["method"]: abs(row["predicted_ms"] / row["step_ms_p50"] - 1) for row in judged}
    worst = max(off, key=lambda method: off[method])
    best = min(judged, key=lambda row: row["step_ms_p50"])
    gentle = {method: place for place, method in enumerate(advice.METHODS)}
    judged.sort(key=lambda row: gentle.get(row["method"], len(gentle)))
    advised = judged[advice.as_fast([row["predicted_ms"] for row in judged])]
    loss = advised["step_ms_p50"] / best["step_ms_p50"] - 1
    return (
        f"predictions are {100 * statistics.mean(off.values()):.0f} % off on average, at worst "
        f"{100 * off[worst]:.0f} % ({worst}); advised {advised['method']}, measured best {best['method']}"
        + (f", {100 * loss:.0f} % faster" if advised is not best else "")
    )
