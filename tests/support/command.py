"""`thinwire` as a user runs it: real processes, real output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from paths import ROOT

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TERMINAL = ("COLUMNS", "THINWIRE_COLUMNS")


def environment(**variables: str) -> dict[str, str]:
    """This process's, without what a launcher or a terminal put there."""
    kept = {name: value for name, value in os.environ.items() if name not in (*LAUNCHER, *TERMINAL)}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}


def command(*arguments: str, timeout: float = 120, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a module with its arguments to the end."""
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        capture_output=True, text=True, timeout=timeout, env=environment(**variables),
    )  # fmt: skip


def started(
    *arguments: str, program: tuple[str, ...] = ("-m", "thinwire"), cwd: Path | None = None
) -> subprocess.Popen[str]:
    """`thinwire` with these arguments, in a session of its own: wait for it with ``until`` and ``done``."""
    return subprocess.Popen(
        [sys.executable, *program, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment(), cwd=cwd, start_new_session=True,
    )  # fmt: skip


def done(process: subprocess.Popen[str], exit_code: int = 0) -> tuple[str, str]:
    out, err = process.communicate(timeout=150)
    assert process.returncode == exit_code, (out, err)
    return out, err


def until(process: subprocess.Popen[str], words: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if words in line:
            return
    raise AssertionError(f"ended without {words!r}: {process.communicate()}")


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def run_of(folder: Path, spec: str) -> dict[str, Any]:
    """What a run folder says in the end of one of its methods."""
    runs = json.loads((folder / "summary.json").read_text())["runs"]
    return next(run for run in runs if run["spec"] == spec)
