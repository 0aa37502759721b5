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
from typing import Any, NoReturn

import thinwire
from thinwire import ctrl_c
from thinwire.cli._complaints import Complaint, Failure, Interrupted, network_sentence
from thinwire.cli._job import Job
from thinwire.cli._session import BadJob, Place, train_all, train_in_threads
from thinwire.errors import ExchangeError
from thinwire.lab.recipes.events import Event, Halted
from thinwire.lab.recipes.loop import Stopped

GRACE_S = 1.0  # after a first failure, how long others may take to tell theirs: the first in time is the cause


@dataclass(frozen=True)
class Trouble:
    """What a worker says before it ends because of an exception."""

    rank: int
    at_s: float
    sentence: str
    details: str
    is_complaint: bool  # the same on every worker, and the user's to mend


def joined_world() -> int | None:
    """The number of processes when a launcher such as torchrun started this one, else None."""
    missing = [name for name in ctrl_c.LAUNCHER if name not in os.environ]
    if "RANK" in missing and "WORLD_SIZE" in missing:
        return None
    if missing:
        there = next(name for name in ctrl_c.LAUNCHER[:2] if name not in missing)
        are = "is" if len(missing) == 1 else "are"
        raise Complaint(
            f"{there} is set, as a launcher does, but {' and '.join(missing)} {are} not; "
            f"start this with torchrun, or unset {there} to start local workers."
        )
    numbers = {}
    for name in ("WORLD_SIZE", "RANK", "MASTER_PORT", *(n for n in ctrl_c.LOCAL if n in os.environ)):
        text = os.environ[name]
        if not text.strip().isdecimal():
            raise Complaint(f"{name} must be a whole number, not '{text}'.")
        numbers[name] = int(text)
    if numbers["RANK"] >= numbers["WORLD_SIZE"]:
        raise Complaint(f"RANK is {numbers['RANK']}, but WORLD_SIZE {numbers['WORLD_SIZE']} has only smaller ranks.")
    return numbers["WORLD_SIZE"]


def local_workers(num_workers: int) -> int:
    """How many of the workers run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", num_workers))


def join(job: Job, on_event: Callable[[Event], None]) -> None:
    """Run the job as one of the processes that a launcher started; rank 0 gets the events."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    place = Place(rank, world, int(os.environ.get("LOCAL_RANK", rank)), local_workers(world))
    wanted: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        wanted.append(number)
        if job.out is None or len(wanted) > 1:  # nothing can be kept, or no more patience
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    try:
        with _handling(signal.SIGTERM, on_signal), _handling(signal.SIGINT, on_signal):
            train_all(job, place, on_event, stop=lambda: bool(wanted), init_method="env://")
    except Stopped as stopped:
        on_event(stopped.halted)
        raise _interrupted(job, stopped.halted) from None
    except KeyboardInterrupt:
        raise Interrupted(f"stopped by Ctrl-C{_unsaved(job)}.") from None
    except (Complaint, SystemExit):
        raise
    except BadJob as error:
        raise Complaint(_sentence(error)) from error
    except Exception as error:
        raise Failure(f"worker {os.environ['RANK']} failed: {_sentence(error)}") from error


def run_threads(job: Job, num_workers: int, on_event: Callable[[Event], None]) -> None:
    """Run the job with workers that are threads of this process."""
    try:
        train_in_threads(job, num_workers, on_event)
    except KeyboardInterrupt:
        raise Interrupted(f"stopped by Ctrl-C{_unsaved(job)}.") from None
    except BadJob as error:
        raise Complaint(_sentence(error)) from error
    except (Complaint, Failure):
        raise
    except Exception as error:
        if os.environ.get("THINWIRE_DEBUG"):
            traceback.print_exc()
        raise Failure(f"a worker failed: {_sentence(error)}") from error


def launch(job: Job, num_workers: int, on_event: Callable[[Event], None], on_stop: Callable[[], None]) -> None:
    """Start the workers, hand on what rank 0 reports, and leave none behind, however this ends.

    The first Ctrl-C lets them finish a step and save a checkpoint, where there is a folder for it (``on_stop`` is
    called); the second does not.
    """
    with _handling(signal.SIGINT, signal.SIG_IGN):  # what is started here inherits it: the parent decides
        context = _context()
    with tempfile.TemporaryDirectory(prefix="thinwire-") as folder, contextlib.ExitStack() as stack:
        supervisor = _Supervisor(job, on_event, on_stop)
        stack.callback(_end_all, supervisor.workers)
        stack.enter_context(_handling(signal.SIGTERM, _exit))
        stack.enter_context(_handling(signal.SIGINT, supervisor.on_ctrl_c))
        try:
            for rank in range(num_workers):
                ours, theirs = context.Pipe()
                worker = context.Process(
                    target=_worker,
                    args=(Place(rank, num_workers, rank, num_workers), Path(folder, "store").as_uri(), job, theirs),
                    name=f"thinwire worker {rank}",
                    daemon=True,
                )
                worker.start()
                theirs.close()
                supervisor.workers.append(worker)
                supervisor.pipes.append(ours)
            supervisor.run()
        except (EOFError, ConnectionError) as error:
            raise Failure("the local workers could not be started.") from error


class _Supervisor:
    """Reads every worker's pipe until all have closed theirs; the first failure ends all of them."""

    def __init__(self, job: Job, on_event: Callable[[Event], None], on_stop: Callable[[], None]) -> None:
        self.job, self.on_event, self.on_stop = job, on_event, on_stop
        self.workers: list[BaseProcess] = []
        self.pipes: list[Connection] = []
        self.troubles: list[Trouble] = []
        self.dead: list[int] = []  # ended without a word: killed
        self.halted: Halted | None = None
        self.num_ctrl_c = 0
        self.deadline_s: float | None = None
        self.alarm, self._ring = multiprocessing.Pipe(duplex=False)  # rings when Ctrl-C was pressed

    def on_ctrl_c(self, number: int, frame: FrameType | None) -> None:
        self._ring.send_bytes(b"!")  # and not an exception, which could hit a line of the run folder in the middle

    def run(self) -> None:
        ranks = {pipe: rank for rank, pipe in enumerate(self.pipes)}
        while ranks:
            left_s = None if self.deadline_s is None else self.deadline_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                break
            for pipe in wait([*ranks, self.alarm], left_s):
                assert isinstance(pipe, Connection)
                if pipe is self.alarm:
                    self.alarm.recv_bytes()
                    self._stop()
                elif pipe in ranks and not self._read(pipe, ranks[pipe]):
                    del ranks[pipe]
        if self.halted is not None and not self.dead and not self.troubles:
            raise _interrupted(self.job, self.halted)
        if self.dead or self.troubles:
            self._fail()

    def _stop(self) -> None:
        self.num_ctrl_c += 1
        if self.job.out is None or self.num_ctrl_c > 1:
            _end_all(self.workers)
            ended = f"all {len(self.workers)} workers have" if len(self.workers) > 1 else "the worker has"
            raise Interrupted(f"stopped by Ctrl-C; {ended} ended{_unsaved(self.job)}.")
        self.on_stop()
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send("stop")

    def _hurry(self) -> None:
        self.deadline_s = self.deadline_s or time.monotonic() + GRACE_S

    def _read(self, pipe: Connection, rank: int) -> bool:
        """Take one message; False when there will be no more."""
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            self.workers[rank].join()
            if self.workers[rank].exitcode != 0 and all(trouble.rank != rank for trouble in self.troubles):
                self.dead.append(rank)
                self._hurry()
            return False
        if isinstance(message, Trouble):
            self.troubles.append(message)
            self._hurry()
        elif not self.troubles:
            if isinstance(message, Halted):
                self.halted = message
            self.on_event(message)
        return True

    def _fail(self) -> NoReturn:
        _end_all(self.workers)
        others = "; the others were stopped" if len(self.workers) > 1 else ""
        if self.dead:
            raise Failure(f"worker {self.dead[0]} {_ending(self.workers[self.dead[0]].exitcode)}{others}.")
        first = min(self.troubles, key=lambda trouble: trouble.at_s)
        if os.environ.get("THINWIRE_DEBUG"):
            print(first.details, file=sys.stderr)
        if first.is_complaint:
            raise Complaint(first.sentence)
        raise Failure(f"worker {first.rank} failed{others}: {first.sentence}")


def _unsaved(job: Job) -> str:
    return "" if job.out is not None else "; nothing was saved (no --out)"


def _interrupted(job: Job, halted: Halted) -> Interrupted:
    return Interrupted(f"stopped at step {halted.step} of {halted.num_steps} of {halted.spec}; {job.how_to_go_on}")


def _worker(place: Place, store: str, job: Job, pipe: Connection) -> None:
    """The life of a local worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal group; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if (loopback := _loopback()) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    try:
        train_all(
            job, place, pipe.send, stop=lambda: job.out is not None and pipe.poll(),
            init_method=store, rank=place.rank, world_size=place.world,
        )  # fmt: skip
    except Stopped as stopped:
        if place.rank == 0:
            pipe.send(stopped.halted)
    except BaseException as error:
        with contextlib.suppress(OSError):
            trouble = Trouble(
                place.rank, time.time(), _sentence(error), traceback.format_exc(), isinstance(error, BadJob)
            )
            pipe.send(trouble)
        # Leave without destructors: those of a broken process group can wait for the peers.
        sys.stderr.flush()
        os._exit(1)


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
    """One sentence for an exception; those of the network say what a user can look at."""
    text = " ".join(str(error).split())
    # One that knows its step names rank, step and stage already, which is more than can be said here.
    sentence = text if isinstance(error, ExchangeError) and error.step >= 0 else network_sentence(text)
    if sentence is None:
        named = f"{type(error).__name__}: {text}".removesuffix(": ")
        sentence = text if isinstance(error, ValueError) and text else named
    return sentence if sentence.endswith((".", "?")) else f"{sentence}."
