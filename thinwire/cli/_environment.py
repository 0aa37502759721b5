"""Where a run ran: what a number is worth without it, nobody knows."""

from __future__ import annotations

import os
import platform
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import thinwire
from thinwire.lab.bench.rows import commit


def environment(hosts: list[str]) -> dict[str, Any]:
    """Hardware of this machine, commit, date, and the hosts that took part."""
    return {
        "hardware": {"cpu": cpu_name(), "cores": num_cores(), "gpus": gpu_names(), "os": os_name()},
        "commit": commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "hosts": hosts,
    }


def versions() -> dict[str, str]:
    return {"thinwire": thinwire.__version__, "torch": torch.__version__, "python": platform.python_version()}


def num_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def gpu_names() -> list[str]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.cuda.get_device_name(index) for index in range(count)]


def os_name() -> str:
    return f"{platform.system()} {platform.release()} {platform.machine()}"
