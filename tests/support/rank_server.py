"""Ranks of one script, without importing its libraries for each of them: forks of this process.

    python rank_server.py script.py [module ...]

It imports the script, and the modules that the script imports late. Each line of its input is {"folder": path,
"ranks": [environment of rank 0, ...], "arguments": the script's, "program": text or null}. Every rank is a fork in that
folder, with its environment, that runs the script (or the program) as a fresh interpreter would, and ends as one does.
The answer is one line, the exit codes in rank order; what a rank printed is in the folder's files <rank>.out and
<rank>.err.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import sys
from pathlib import Path


def run(script: Path, arguments: list[str], program: str | None) -> None:
    sys.argv = [str(script), *arguments]
    if program is None:
        runpy.run_path(str(script), run_name="__main__")
    else:
        exec(compile(program, "program", "exec"), {"__name__": "__main__"})


def exit_codes(pids: list[int]) -> list[int]:
    """Where a rank fails the others are ended, which may wait for it."""
    codes: dict[int, int] = {}
    while len(codes) < len(pids):
        pid, status = os.wait()
        codes[pid] = os.waitstatus_to_exitcode(status)
        if codes[pid]:
            for other in set(pids) - set(codes):
                os.kill(other, signal.SIGKILL)
    return [codes[pid] for pid in pids]


def main() -> None:
    script = Path(sys.argv[1])
    sys.path[0] = str(script.parent)
    for name in (script.stem, "torch._dynamo", *sys.argv[2:]):  # what the constructor of DDP imports
        importlib.import_module(name)
    del sys.modules[script.stem]  # each rank reads its own folder's name
    answers = os.fdopen(os.dup(1), "w")
    gc.collect()
    gc.freeze()  # forks need not look through, and so copy, the libraries
    for line in sys.stdin:
        request = json.loads(line)
        pids = []
        for rank, environment in enumerate(request["ranks"]):
            pid = os.fork()
            if not pid:
                sys.stdin.close()
                answers.close()
                os.chdir(request["folder"])
                os.environ.update(environment)
                for number, kind in ((1, "out"), (2, "err")):
                    os.dup2(os.open(f"{rank}.{kind}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC), number)
                return run(script, request["arguments"], request["program"])
            pids.append(pid)
        print(json.dumps(exit_codes(pids)), file=answers, flush=True)


if __name__ == "__main__":
    main()
