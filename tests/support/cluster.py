"""Five real Gloo processes, started once, to which tests send functions.

    results = cluster.run("test_something:work", 3, "argument")    # work(group, "argument") on ranks 0, 1, 2

The function is named "module:function" (or given itself, if it lives at module level) and is imported by each
process, whose sys.path is this one's; it is called as fn(group, *args) with a process group of exactly n ranks, and
the values it returns come back in rank order. Arguments and results are pickled. An exception on a rank ends the test
with every rank's traceback. A call that takes longer than its timeout ends the processes; the next call starts new
ones.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

SIZE = 5
CALL_TIMEOUT_S = 120.0
COLLECTIVE_TIMEOUT_S = 60.0
START_TIMEOUT_S = 120.0
MOST_THREADS = 100  # of a process: every group that a test leaves behind has threads that poll
GRACE_S = 10.0  # for the other ranks after the first exception: they may wait for the failed one for ever


class ClusterError(Exception):
    """A call failed on a rank or did not end in time. texts: what each rank had to say, in rank order."""

    def __init__(self, sentence: str, texts: list[str]) -> None:
        self.texts = texts
        super().__init__("\n".join([sentence, *(f"--- rank {r}: {text}" for r, text in enumerate(texts))]))


@dataclass(frozen=True)
class Raised:
    """An exception on a rank: the name of its type, its message, and the traceback as text."""

    type: str
    message: str
    traceback: str = ""


class Cluster:
    """The pool. It starts no process before the first run()."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(
        self,
        fn: str | Callable[..., Any],
        n: int,
        *args: Any,
        expect_errors: bool = False,
        last: bool = False,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> list[Any]:
        """Call fn(group, *args) on the first n ranks, and return the n results.

        last: on the last n ranks instead, whose group ranks differ from their global ones. expect_errors: a
        rank that raised gives Raised(type, message) in place of its result, and no ClusterError is raised.
        """
        if not 1 <= n <= self.size:
            raise ValueError(f"n must be between 1 and {self.size}, not {n}")
        name = fn if isinstance(fn, str) else f"{fn.__module__}:{fn.__qualname__}"
        if not self._processes:
            self._start()
        answers = self._call(name, n, last, args, timeout_s)
        failed = [a for a in answers if not isinstance(a, list)]
        if not failed:
            if max(a[1] for a in answers) > MOST_THREADS:
                self.stop()
            return [a[0] for a in answers]
        if None in answers:
            self.stop()
            limits = f"{timeout_s:g} s, or {GRACE_S:g} s after a failure elsewhere"
            why = f"{name} on {n} ranks: not every rank answered in time ({limits})"
            raise ClusterError(why, [_text(a) for a in answers])
        if not expect_errors:
            self.stop()  # collectives may be half done: nothing that follows could trust these groups
            raise ClusterError(f"{name} failed on {len(failed)} of {n} ranks", [_text(a) for a in answers])
        self._check(n, last)
        return [a[0] if isinstance(a, list) else a for a in answers]

    def stop(self) -> None:
        """End the processes (politely first); a later run() starts new ones."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        deadline = time.monotonic() + 2
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        # A fork server imports what all processes need once: torch, what the constructor of DDP imports, thinwire.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch._dynamo", "pytest", "thinwire.advisor.auto", "thinwire.attach"])
        self._folder = tempfile.TemporaryDirectory(prefix="cluster-")
        store = f"file://{self._folder.name}/store"
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.size, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        answers = self._gather(range(self.size), START_TIMEOUT_S)
        if not all(isinstance(a, list) for a in answers):
            self.stop()
            raise ClusterError("the processes could not start", [_text(a) for a in answers])

    def _call(self, name: str, n: int, last: bool, args: tuple[Any, ...], timeout_s: float) -> list[Any]:
        ranks = range(self.size - n, self.size) if last else range(n)
        for rank in ranks:
            with contextlib.suppress(OSError):  # a dead process shows as a missing answer
                self._pipes[rank].send((name, n, last, args))
        return self._gather(ranks, timeout_s)

    def _gather(self, ranks: range, timeout_s: float) -> list[Any]:
        """One answer a rank: [result], Raised, or None where none came."""
        waiting = {self._pipes[rank]: rank for rank in ranks}
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        while waiting and (left := deadline - time.monotonic()) > 0:
            ready = wait(list(waiting), left)
            for pipe in [p for p in waiting if p in ready]:
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, OSError):
                    answers[rank] = Raised("Died", "the process ended without an answer")
                if isinstance(answers[rank], Raised):
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return [answers.get(rank) for rank in ranks]

    def _check(self, n: int, last: bool) -> None:
        """After expected errors: is the group still in step? If not, the next call gets new processes."""
        answers = self._call("cluster:_token", n, last, (), GRACE_S)
        if [a[:1] if isinstance(a, list) else a for a in answers] != [[n * (n + 1) // 2]] * n:
            self.stop()


def _text(answer: Any) -> str:
    if answer is None:
        return "no answer"
    return f"{answer.message}\n{answer.traceback}" if isinstance(answer, Raised) else "returned"


def _token(group: Any) -> int:
    import torch
    import torch.distributed as dist

    value = torch.tensor([dist.get_rank(group) + 1])
    dist.all_reduce(value, group=group)
    return int(value)


def group_of_same_ranks(group: Any, timeout_s: float) -> Any:
    """A new group of the group's ranks with a timeout of its own; a collective call.

    torch names it by how many groups a rank knows, and waits until the timeout where its ranks know unequal numbers,
    as they do when earlier calls had other ranks: those who know fewer make groups of one first.
    """
    import torch
    import torch.distributed as dist

    from thinwire.torch_private import num_groups

    known = torch.tensor([num_groups()])
    most = known.clone()
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    options = {"timeout": timedelta(seconds=timeout_s), "use_local_synchronization": True}
    for _ in range(int(most - known)):
        dist.new_group([dist.get_rank()], **options)
    dist.barrier(group)  # so that the ranks meet within the new group's timeout
    return dist.new_group(dist.get_process_group_ranks(group), **options)


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 0


def _serve(rank: int, size: int, store: str, pipe: Connection) -> None:
    """The life of one process: join, then answer calls until None comes or the parent goes away."""
    if sys.platform == "linux":  # all processes are here: no host name has to resolve
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        limit = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=limit)
        groups = {}
        for n in range(1, size + 1):
            for last in (False, True):
                ranks = list(range(size - n, size) if last else range(n))
                groups[n, last] = dist.new_group(ranks, timeout=limit)
        gc.collect()
        gc.freeze()  # so that the collection after each call looks at the call's own objects only
        pipe.send([None])
    except Exception as error:
        pipe.send(Raised(type(error).__name__, str(error), traceback.format_exc()))
        return
    while True:
        try:
            call = pipe.recv()
        except EOFError:
            call = None
        if call is None:
            break
        name, n, last, args = call
        try:
            module, function = name.split(":")
            torch.manual_seed(0)
            result = getattr(importlib.import_module(module), function)(groups[n, last], *args)
            answer: Any = [result, _num_threads()]
            del result
        except Exception as error:
            answer = Raised(type(error).__name__, str(error), traceback.format_exc())
        try:
            pipe.send(answer)
        except Exception as error:  # a result that cannot be pickled
            pipe.send(Raised(type(error).__name__, str(error), traceback.format_exc()))
        del answer
        gc.collect()
    os._exit(0)  # groups are not torn down one by one: a peer may already be gone
