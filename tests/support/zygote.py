"""Processes that may die, for tests of faults: a script that imports torch once and forks ranks on demand.

Each line of its input is {"case": name, "ranks": n, "timeout_s": s, ...}; the other keys go to the case. Every rank is
a fork that runs the case and then ends as an interpreter does, with atexit, finalization and its exit code. The answer
is one line: [{"exit_code": c, "seconds": s, "out": text, "err": text}, ...] in rank order; exit code None: it hung and
was killed.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch._dynamo  # what the constructor of DDP imports
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire


def _prepare(rank: int, ranks: int, store: str, method: str, timeout_s: float = 6.0) -> tuple[Any, Any, Any]:
    torch.set_num_threads(1)
    limit = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=limit)
    torch.manual_seed(0)
    layers = torch.nn.Linear(20, 100), torch.nn.Tanh(), torch.nn.Linear(100, 50)
    model = DDP(torch.nn.Sequential(*layers), bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return model, optimizer, thinwire.attach(model, optimizer, method)


def _step(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.ones(4, 20)).square().mean().backward()
    optimizer.step()


def lose(rank: int, ranks: int, store: str, method: str, victim: int, how: str) -> None:
    """One rank is lost at step 4; the others tell how their backward pass ended, and which threads are left."""
    model, optimizer, wire = _prepare(rank, ranks, store, method)
    try:
        for step in range(10):
            if step == 4 and rank == victim:
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if how == "hang":
                    time.sleep(12)  # twice the timeout
                if how == "fail":
                    wire.reducer.exchange = _fail  # an error of its own in the middle of an exchange
            _step(model, optimizer)
    except (thinwire.ExchangeError, OSError) as error:
        told = {"type": type(error).__name__, "sentence": str(error), **vars(error)}
        assert wire.detach() == {}
        left = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
        print(json.dumps({**told, "threads": left}))
        raise


def _fail(*_: Any, **__: Any) -> None:
    raise OSError("for this test")


def leave(rank: int, ranks: int, store: str, actions: list[str]) -> None:
    """Train three steps, then do these things and end."""
    model, optimizer, wire = _prepare(rank, ranks, store, "dgc")
    for _ in range(3):
        _step(model, optimizer)
    for action in actions:
        if action == "detach":
            wire.detach()
        elif action == "destroy":
            dist.destroy_process_group()
        elif action == "raise":
            raise ValueError("an error of the user's")
        elif action == "exit":
            sys.exit(3)
        elif action == "forget":
            del model, optimizer, wire
        elif action == "backward":  # leaves with an exchange under way, for which the other ranks do not come
            model.module[0].weight.register_hook(lambda gradient: sys.exit(3))
            model(torch.ones(4, 20)).square().mean().backward()


def apart(rank: int, ranks: int, store: str) -> None:
    """Rank 0 alone enters averaged(), as in `if rank == 0: evaluate()`; the others go on training."""
    model, optimizer, wire = _prepare(rank, ranks, store, "dropping:local=partial,sync_every=500")
    for _ in range(3):
        _step(model, optimizer)
    try:
        if rank == 0:
            with wire.averaged():
                pass
        _step(model, optimizer)
    except thinwire.ExchangeError as error:
        print(json.dumps({"sentence": str(error), "peers": error.peers}))


def _rank(rank: int, request: dict[str, Any], store: str, folder: str) -> None:
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{folder}/{rank}.{name}", os.O_CREAT | os.O_WRONLY), number)
    arguments = {key: value for key, value in request.items() if key not in ("case", "timeout_s")}
    CASES[request["case"]](rank=rank, store=store, **arguments)


CASES = {"lose": lose, "leave": leave, "apart": apart}


def _wait(pids: list[int], timeout_s: float) -> list[tuple[int | None, float]]:
    start_s, ended = time.monotonic(), dict[int, tuple[int | None, float]]()
    while len(ended) < len(pids):
        late = time.monotonic() - start_s > timeout_s
        for pid in pids:
            if pid in ended:
                continue
            if late:
                os.kill(pid, signal.SIGKILL)
            done, status = os.waitpid(pid, 0 if late else os.WNOHANG)
            if done:
                code = None if late else os.waitstatus_to_exitcode(status)
                ended[pid] = code, round(time.monotonic() - start_s, 2)
        time.sleep(0.01)
    return [ended[pid] for pid in pids]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    gc.collect()
    gc.freeze()  # forks that end need not look through, and so copy, all of torch
    for line in sys.stdin:
        request = json.loads(line)
        folder, pids = tempfile.mkdtemp(prefix="zygote-"), []
        for rank in range(request["ranks"]):
            pid = os.fork()
            if not pid:
                sys.stdin.close()
                answers.close()
                return _rank(rank, request, f"file://{folder}/store", folder)
            pids.append(pid)
        ends = _wait(pids, request["timeout_s"])
        texts = [{name: Path(folder, f"{r}.{name}").read_text() for name in ("out", "err")} for r in range(len(pids))]
        shutil.rmtree(folder)
        rows = [{"exit_code": code, "seconds": s, **text} for (code, s), text in zip(ends, texts, strict=True)]
        print(json.dumps(rows), file=answers, flush=True)


if __name__ == "__main__":
    main()
