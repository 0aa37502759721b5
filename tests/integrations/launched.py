"""Runs a script of this folder on ranks that have the environment which torchrun gives its workers.

torchrun itself, which would import the libraries anew for every rank, starts the examples of the same frameworks
(test_framework_examples.py).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from paths import ROOT

HERE = Path(__file__).parent


class Launcher:
    """The ranks of one script; they are forks of a process that has imported what it needs."""

    def __init__(self, script: str) -> None:
        settings = {
            **os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)]),
        }  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "rank_server.py"), script], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env=settings, start_new_session=True,
        )  # fmt: skip

    def stop(self) -> None:
        """End the server, and ranks that hang with it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def ranks(self, number: int, folder: Path) -> list[dict[str, Any]]:
        """What every rank of the script found."""
        found = folder / "found.json"
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # torchrun has it, too
        shared = {
            "FOUND": str(found), "FOLDER": str(folder), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
            "WORLD_SIZE": str(number), "LOCAL_WORLD_SIZE": str(number), "GROUP_RANK": "0",
            "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_USE_AGENT_STORE": "True",
        }  # fmt: skip
        self._run([{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(number)], folder, None)
        ranks_found: list[dict[str, Any]] = json.loads(found.read_text())
        return ranks_found

    def alone(self, program: str, folder: Path) -> str:
        """What a program prints in one process that no launcher started."""
        self._run([{"FOUND": str(folder / "found.json"), "FOLDER": str(folder)}], folder, program)
        return (folder / "0.out").read_text()

    def _run(self, environments: list[dict[str, str]], folder: Path, program: str | None) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        request = {"folder": str(folder), "ranks": environments, "program": program}
        print(json.dumps(request), file=self.process.stdin, flush=True)
        codes = json.loads(self.process.stdout.readline())
        texts = [
            (folder / f"{rank}.{kind}").read_text()[-3000:] for rank in range(len(codes)) for kind in ("out", "err")
        ]
        assert codes == [0] * len(environments), "\n".join([str(codes), *texts])
