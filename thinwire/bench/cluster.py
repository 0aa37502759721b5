"""Step times of real models on emulated hosts, measured and predicted, every method in one group of processes.

Each host is a network namespace with one process, and both ends of its link are shaped. Methods take turns within one
group, `noop` (no communication) first and last, so that a change of the machine's load shows. thinwire.bench.peers has
the rows that are not ours.
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
from thinwire import emulation
from thinwire.bench.cluster_worker import MARK, Job
from thinwire.bench.models import MODELS
from thinwire.bench.peers import PEERS
from thinwire.bench.rows import commit, hardware, percentiles, today

ALWAYS = ("noop", "dense", "dense:dtype=bf16", "powersgd-1")
METHODS = ("dgc", "gtopk", "terngrad", "blocksign")

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
) -> tuple[list[Row], Row | None]:
    """Run one combination; return its rows, and what the predictions were made from."""
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
    rows = [row for row in found if "profile" not in row]
    if result.exit_code or len(rows) != len(job.methods):
        said = next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "nothing")
        raise HostFailed(f"host {result.failed_rank or 0} ended with exit code {result.exit_code} ({said.strip()})")
    profile = next((row["profile"] for row in found if "profile" in row), None)
    return [finished(row, hosts, rate, job, rows) for row in rows], profile


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
        "step_ms_p20": p20,
        "step_ms_p50": p50,
        "step_ms_p80": p80,
        "samples_per_s": 1e3 * hosts * MODELS[job.model].samples / p50,
        "share_of_noop": free / p50,
        "bytes_per_step": row["bytes_per_step"],
        "counted_bytes_per_step": row.get("counted_bytes_per_step"),
        "ratio": row.get("ratio"),
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
    advised = min(judged, key=lambda row: row["predicted_ms"])
    loss = advised["step_ms_p50"] / best["step_ms_p50"] - 1
    return (
        f"predictions are {100 * statistics.mean(off.values()):.0f} % off on average, at worst "
        f"{100 * off[worst]:.0f} % ({worst}); predicted best {advised['method']}, measured best {best['method']}"
        + (f", {100 * loss:.0f} % faster" if advised is not best else "")
    )
