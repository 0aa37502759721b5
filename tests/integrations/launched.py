"""Runs a script of this folder under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from paths import ROOT

HERE = Path(__file__).parent


def settings_for(folder: Path, **more: str) -> dict[str, str]:
    return {
        **os.environ, "FOUND": str(folder / "found.json"), "FOLDER": str(folder), "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)]), "GLOO_SOCKET_IFNAME": "lo",
        **more,
    }  # fmt: skip


def alone(program: str, folder: Path, **more: str) -> str:
    """What a program prints in one process that no launcher started."""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=settings_for(folder, **more), capture_output=True, text=True,
        timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


def launched(script: str, ranks: int, folder: Path) -> list[dict[str, Any]]:
    """What every rank of a script found."""
    found = folder / "found.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    done = subprocess.run(
        [*command, str(HERE / script)],
        cwd=folder,
        env=settings_for(folder),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    ranks_found: list[dict[str, Any]] = json.loads(found.read_text())
    return ranks_found
