"""Runs a script on ranks that have the environment which torchrun gives its workers.

torchrun itself, which would import the libraries anew for every rank, starts the examples (test_framework_examples.py).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import torch.distributed as dist
from paths import ROOT


class Launcher:
    """The ranks of one script; they are forks of a process that has imported what it needs."""

    def __init__(self, script: Path, *modules: str) -> None:
        settings = {
            **os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo", "FOLDER": "",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(script.parent)]),
        }  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("rank_server.py")), str(script), *modules],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=settings, start_new_session=True,
        )  # fmt: skip

    def close(self) -> None:
        """End the server, and ranks that hang with it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def ranks(self, number: int, folder: Path, *arguments: str, **variables: str) -> list[str]:
        """What every rank of the script prints."""
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # torchrun has it, too
        shared = {
            "FOLDER": str(folder), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "GROUP_RANK": "0",
            "WORLD_SIZE": str(number), "LOCAL_WORLD_SIZE": str(number), "TORCHELASTIC_RUN_ID": "none",
            "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_USE_AGENT_STORE": "True", **variables,
        }  # fmt: skip
        each = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(number)]
        return self._run(each, folder, arguments, None)

    def alone(self, program: str, folder: Path) -> str:
        """What a program prints in one process that no launcher started."""
        return self._run([{"FOLDER": str(folder)}], folder, (), program)[0]

    def _run(
        self, each: list[dict[str, str]], folder: Path, arguments: tuple[str, ...], program: str | None
    ) -> list[str]:
        assert self.process.stdin is not None and self.process.stdout is not None
        request = {"folder": str(folder), "ranks": each, "arguments": arguments, "program": program}
        print(json.dumps(request), file=self.process.stdin, flush=True)
        codes = json.loads(self.process.stdout.readline())
        out, err = ([(folder / f"{r}.{kind}").read_text() for r in range(len(each))] for kind in ("out", "err"))
        assert codes == [0] * len(each), "\n".join([str(codes), *(text[-3000:] for text in out + err)])
        return out
