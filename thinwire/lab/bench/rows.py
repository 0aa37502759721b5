"""Timing, and the row that every measurement becomes."""

from __future__ import annotations

import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Row:
    """One measurement: milliseconds at three percentiles, against the memory floor and against plain torch in this run.

    ``setting`` is the method with all of its options, empty where there is none. ``floor_ms`` is the time that the
    fewest possible bytes take at the copy speed of the same run.
    """

    name: str
    kernels: str
    setting: str
    device: str
    numel: int
    p20_ms: float
    p50_ms: float
    p80_ms: float
    floor_ms: float | None
    x_floor: float | None
    x_torch: float | None
    threads: int
    commit: str
    hardware: str
    date: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def percentiles(seconds: list[float]) -> tuple[float, float, float]:
    """p20, p50 and p80 in milliseconds."""
    ordered = sorted(seconds)
    return tuple(1e3 * ordered[min(len(ordered) - 1, int(len(ordered) * p))] for p in (0.2, 0.5, 0.8))  # type: ignore[return-value]


def measure(work: Callable[[int], object], device: torch.device, repeats: int, warmup: int = 3) -> list[float]:
    """Time work(i) ``repeats`` times after ``warmup`` untimed calls; on a GPU the device is waited for."""
    seconds = []
    for i in range(warmup + repeats):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        work(i)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if i >= warmup:
            seconds.append(time.perf_counter() - start)
    return seconds


def hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = lines[0].split(":", 1)[1].strip() if lines else model
    threads = torch.get_num_threads()
    return f"{model}, {threads} thread{'' if threads == 1 else 's'}"


def commit() -> str:
    """The checkout's commit, with a plus sign when files differ from it; the version where there is no checkout."""
    folder = Path(__file__).resolve().parent
    try:
        run = subprocess.run(
            ["git", "describe", "--always", "--dirty=+"], cwd=folder, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return run.stdout.strip() or "unknown"


def today() -> str:
    return datetime.now(timezone.utc).date().isoformat()
