"""One ordered thread of exchanges, and the buckets that it completes."""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import NonFiniteError
from thinwire.transport.device_time import DeviceSpans, mark

log = logging.getLogger("thinwire")


@dataclass
class Bucket:
    """One DDP bucket of one backward pass: gradients in, means out, in place."""

    parameters: list[Tensor]
    gradients: list[Tensor]  # (numel,) each, views of the buffer
    buffer: Tensor
    future: torch.futures.Future[Tensor]
    is_last: bool  # of its pass
    ready: Any = None  # a CUDA event after which the gradients are there
    handed_s: float = field(default_factory=time.perf_counter)  # when backward handed it over
    is_first: bool = False
    ordinals: list[int] = field(default_factory=list)  # the parameters' places in the model
    in_backward: bool = False  # an error is then raised by backward() itself, and the future has a result all the same
    error: Exception | None = None

    def complete(self, error: Exception | None = None) -> None:
        self.error = error
        if self.future.done():
            return
        if error is None or self.in_backward:
            self.future.set_result(self.buffer)
        else:
            self.future.set_exception(error)  # type: ignore[arg-type]  # torch's own annotation is wrong


class Worker:
    """Does exchanges in the order they were given, so that collectives have the same order on every rank.

    ``submit`` hands them to one thread, which starts with the first; ``run`` does one in the caller's. On a GPU the
    thread's jobs run on a stream of their own, behind the gradients' event. The interpreter does not wait for the
    thread when it ends: a job can wait for a rank that is gone, for as long as the process group's timeout.
    """

    def __init__(self, device: torch.device, on_error: Callable[[Exception], None] = lambda error: None) -> None:
        self._on_error = on_error  # told of every error of this rank's own
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._end: Any = None
        self._device = device if device.type == "cuda" else None
        self._stream: torch.cuda.Stream | None = None
        self._broken: Exception | None = None
        self._waited_s = 0.0
        self._waited, self._busy = DeviceSpans(), DeviceSpans()

    def run(self, work: Callable[[], None]) -> None:
        """Do it now, in the caller's thread, behind all earlier jobs."""
        self.wait()
        if self._broken is not None:  # the ranks are out of step: every further exchange would hang or mix up
            raise self._broken
        begins, start = [mark(self._device)] if self._device is not None else [], time.perf_counter()
        try:
            work()
        except Exception as error:
            self._on_error(error)
            self._broken = error
            raise
        self._waited_s += time.perf_counter() - start
        for begin in begins:
            end = mark(begin.device)
            self._busy.add(begin, end)
            self._waited.add(begin, end)

    def submit(self, buckets: list[Bucket], work: Callable[[list[Bucket]], None]) -> None:
        """Run work(buckets) behind all earlier jobs and complete the buckets' futures, with its error if it fails."""
        if self._thread is None:
            self._start()
        self._jobs.put(partial(self._run, buckets, work))

    def _start(self) -> None:
        thread = threading.Thread(target=_do_all, args=(self._jobs,), name="thinwire", daemon=True)
        thread.start()
        self._end = weakref.finalize(self, _end, self._jobs, thread, 1.0)  # also when the interpreter ends
        self._thread = thread
        self._stream = torch.cuda.Stream(self._device) if self._device is not None else None

    def _run(self, buckets: list[Bucket], work: Callable[[list[Bucket]], None]) -> None:
        try:
            if self._broken is not None:  # the ranks are out of step: every further exchange would hang or mix up
                raise self._broken
            if self._stream is None:
                work(buckets)
            else:
                with torch.cuda.stream(self._stream):
                    for bucket in buckets:
                        self._stream.wait_event(bucket.ready)
                        bucket.buffer.record_stream(self._stream)
                    begin = mark(self._stream.device)
                    work(buckets)
                    end = mark(self._stream.device)
                    self._busy.add(begin, end)
                    for bucket in filter(lambda bucket: bucket.is_last, buckets):
                        self._waited.add(bucket.ready, end)
                    for bucket in buckets:
                        bucket.complete()
                return
        except Exception as error:
            log.debug("thinwire: an exchange failed", exc_info=True)
            if error is not self._broken:
                self._on_error(error)
            self._broken = error
            for bucket in buckets:
                bucket.complete(error)
            return
        for bucket in buckets:
            if bucket.is_last:
                self._waited_s += time.perf_counter() - bucket.handed_s
            bucket.complete()

    @property
    def waited_s(self) -> float:
        """Seconds from the last gradient of each backward pass to the end of its exchanges; waits for the GPU."""
        return self._waited_s if self._device is None else self._waited.seconds

    @property
    def busy_s(self) -> float | None:
        """Seconds of all jobs on the GPU's clock, from the moment their gradients were there; None on the host."""
        return None if self._device is None else self._busy.seconds

    @property
    def broken(self) -> bool:
        """Whether an exchange failed, after which the ranks may be out of step."""
        return self._broken is not None

    @property
    def out_of_step(self) -> bool:
        """Whether another exchange could wait for ever; a gradient that is not finite stops all ranks at one place."""
        return self._broken is not None and not isinstance(self._broken, NonFiniteError)

    def wait(self) -> None:
        """Return when all jobs so far are done."""
        if self._thread is None:
            return
        done = threading.Event()
        self._jobs.put(done.set)
        while not done.wait(1.0) and self._thread.is_alive():  # another thread may have stopped the worker meanwhile
            pass

    def stop(self) -> None:
        """Return when all jobs so far are done and the thread has ended."""
        if self._thread is not None:
            self._end.detach()
            _end(self._jobs, self._thread, None)


def _do_all(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # it knows the wire, which must not live until the next one


def _end(jobs: queue.SimpleQueue[Callable[[], None] | None], thread: threading.Thread, wait_s: float | None) -> None:
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join(wait_s)
