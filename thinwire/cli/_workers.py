"""Worker processes: started here on this machine, or joined when torchrun or the like started them."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

import thinwire
from thinwire.cli._complaints import Complaint, Failure, Interrupted
from thinwire.cli._job import Job
from thinwire.recipes import RECIPES
from thinwire.recipes.loop import Event, train

GRACE_S = 1.0  # after a first failure, how long others may take to tell theirs: the first in time is the cause


@dataclass(frozen=True)
class Trouble:
    """What a worker says before it ends because of an exception."""

    rank: int
    at_s: float
    sentence: str
    details: str


def joined_world() -> int | None:
    """The number of processes when a launcher such as torchrun started this one, else None."""
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if not all(name in os.environ for name in needed):
        return None
    return int(os.environ["WORLD_SIZE"])


def join(job: Job, on_event: Callable[[Event], None]) -> None:
    """Run the job as one of the processes that a launcher started; rank 0 gets the events."""
    try:
        with _handling(signal.SIGTERM, _exit):
            _train_all(job, on_event, init_method="env://")
    except KeyboardInterrupt:
        raise Interrupted("stopped by Ctrl-C.") from None
    except (Complaint, SystemExit):
        raise
    except Exception as error:
        raise Failure(f"worker {os.environ['RANK']} failed: {_sentence(error)}") from error


def launch(job: Job, num_workers: int, on_event: Callable[[Event], None]) -> None:
    """Start the workers, hand on what rank 0 reports, and leave none behind, however this ends."""
    with _handling(signal.SIGINT, signal.SIG_IGN):  # what is started here inherits it: the parent decides
        context = _context()
    with tempfile.TemporaryDirectory(prefix="thinwire-") as folder, contextlib.ExitStack() as stack:
        workers: list[BaseProcess] = []
        pipes: list[Connection] = []
        stack.callback(_end_all, workers)
        try:
            with _handling(signal.SIGTERM, _exit):
                for rank in range(num_workers):
                    ours, theirs = context.Pipe(duplex=False)
                    worker = context.Process(
                        target=_worker,
                        args=(rank, num_workers, Path(folder, "store").as_uri(), job, theirs),
                        name=f"thinwire worker {rank}",
                        daemon=True,
                    )
                    worker.start()
                    theirs.close()
                    workers.append(worker)
                    pipes.append(ours)
                _supervise(workers, pipes, on_event)
        except KeyboardInterrupt:
            _end_all(workers)
            raise Interrupted(f"stopped by Ctrl-C; all {num_workers} workers have ended.") from None
        except (EOFError, ConnectionError) as error:
            raise Failure("the local workers could not be started.") from error


def _supervise(workers: list[BaseProcess], pipes: list[Connection], on_event: Callable[[Event], None]) -> None:
    """Read every pipe until all workers have closed theirs; the first failure ends all of them."""
    ranks = {pipe: rank for rank, pipe in enumerate(pipes)}
    troubles: list[Trouble] = []
    dead: list[int] = []  # ended without a word: killed
    deadline_s: float | None = None
    while ranks:
        left_s = None if deadline_s is None else deadline_s - time.monotonic()
        if left_s is not None and left_s <= 0:
            break
        for pipe in wait(list(ranks), left_s):
            assert isinstance(pipe, Connection)
            rank = ranks[pipe]
            try:
                message = pipe.recv()
            except (EOFError, OSError):
                del ranks[pipe]
                workers[rank].join()
                if workers[rank].exitcode != 0 and all(trouble.rank != rank for trouble in troubles):
                    dead.append(rank)
                    deadline_s = deadline_s or time.monotonic() + GRACE_S
                continue
            if isinstance(message, Trouble):
                troubles.append(message)
                deadline_s = deadline_s or time.monotonic() + GRACE_S
            elif not troubles:
                on_event(message)
    if not dead and not troubles:
        return
    _end_all(workers)
    others = "; the others were stopped" if len(workers) > 1 else ""
    if dead:
        raise Failure(f"worker {dead[0]} {_ending(workers[dead[0]].exitcode)}{others}.")
    first = min(troubles, key=lambda trouble: trouble.at_s)
    if os.environ.get("THINWIRE_DEBUG"):
        print(first.details, file=sys.stderr)
    raise Failure(f"worker {first.rank} failed{others}: {first.sentence}")


def _worker(rank: int, world: int, store: str, job: Job, pipe: Connection) -> None:
    """The life of a local worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal group; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if (loopback := _loopback()) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    try:
        _train_all(job, pipe.send, init_method=store, rank=rank, world_size=world)
    except BaseException as error:
        with contextlib.suppress(OSError):
            pipe.send(Trouble(rank, time.time(), _sentence(error), traceback.format_exc()))
        # Leave without destructors: those of a broken process group can wait for the peers.
        sys.stderr.flush()
        os._exit(1)


def _train_all(job: Job, report: Callable[[Event], None], **rendezvous: Any) -> None:
    """Every method of the job, one after the other, in this process and its group."""
    torch.set_num_threads(1)  # workers share the cores
    dist.init_process_group("gloo", **rendezvous)
    try:
        recipe = RECIPES[job.recipe]()
        for spec in job.specs:
            train(recipe, spec, epochs=job.epochs, seed=job.seed, report=report)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _context() -> Any:
    """A way to start processes that never forks this one, whose threads must not be copied.

    With a fork server, torch and what the constructor of DDP imports (`torch._dynamo`, a second) are imported
    once instead of once per worker.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "torch._dynamo"])
    # The server puts its working directory in front of the module path: let it find the package that this process
    # uses, and not another one that lies where the user stands. Workers go back to the user's directory by themselves.
    before = Path.cwd()
    os.chdir(Path(thinwire.__file__).parent.parent)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        os.chdir(before)
    return context


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _end_all(workers: list[BaseProcess]) -> None:
    for worker in workers:
        if worker.is_alive():
            worker.terminate()
    deadline_s = time.monotonic() + 2
    for worker in workers:
        worker.join(max(0.0, deadline_s - time.monotonic()))
        if worker.is_alive():
            worker.kill()
            worker.join()


def _exit(number: int, frame: FrameType | None) -> None:
    """A signal handler that unwinds the stack, so that workers are ended and the terminal is restored."""
    sys.exit(128 + number)


@contextlib.contextmanager
def _handling(number: signal.Signals, handler: Any) -> Iterator[None]:
    """Another handler for a signal, for the time of the block."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def _loopback() -> str | None:
    """The loopback interface: all that local workers need, whatever this host's name resolves to."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), None)


def _ending(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"was ended by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}"


def _sentence(error: BaseException) -> str:
    text = " ".join(str(error).split())
    sentence = text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}".removesuffix(": ")
    return sentence if sentence.endswith(".") else f"{sentence}."
