"""Launches that are the same at every step are recorded once and replayed as one CUDA graph.

A dozen small kernels cost the host more time to launch one by one than the device needs to run them.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

log = logging.getLogger("thinwire")

Result = TypeVar("Result")

_KEPT = 128  # recordings a recorder holds: more than DDP has buckets
_SEEN_BEFORE_RECORDING = 2  # the first time compiles kernels, and what comes only once is not worth a recording
_one_at_a_time = threading.Lock()  # a process can make one recording at a time


@dataclass
class _Entry(Generic[Result]):
    seen: int = 0
    graph: torch.cuda.CUDAGraph | None = None
    result: Result | None = None
    kept: object = None  # what the graph reads and nobody else holds


@contextmanager
def _no_collection() -> Iterator[None]:
    """A recording that is collected as garbage would break the one that is being made."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class Recorder(Generic[Result]):
    """Runs launches; from the third time under the same key on it replays them.

    ``key`` must name everything that a launch takes from the host: addresses and numbers. So memory that the caller
    passes in again at every step need not be held here; ``keep`` is for the rest, tables that only a cache holds. A
    replay writes its result to the same memory every time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._entries: OrderedDict[Hashable, _Entry[Result]] = OrderedDict()
        self._stream: torch.cuda.Stream | None = None
        # While a recording is made torch lets no other thread draw random numbers on the device: see docs/decisions.md.
        self._works = os.environ.get("THINWIRE_GRAPHS", "1") != "0"

    def run(self, key: Hashable, launch: Callable[[], Result], keep: object = None) -> tuple[Result, bool]:
        """Return what ``launch`` returned, and whether that is memory which the next replay overwrites."""
        if self._device.type != "cuda" or not self._works or torch.cuda.is_current_stream_capturing():
            return launch(), False
        entry = self._entries.setdefault(key, _Entry())
        self._entries.move_to_end(key)
        if len(self._entries) > _KEPT:
            self._entries.popitem(last=False)
        if entry.graph is None:
            entry.seen += 1
            if entry.seen <= _SEEN_BEFORE_RECORDING or not self._record(entry, launch, keep):
                return launch(), False
        assert entry.graph is not None and entry.result is not None
        entry.graph.replay()
        return entry.result, True

    def _record(self, entry: _Entry[Result], launch: Callable[[], Result], keep: object) -> bool:
        """Record without running; where that cannot be done, launches stay launches."""
        with _one_at_a_time, _no_collection():
            if self._stream is None:
                self._stream = torch.cuda.Stream(self._device)
            graph = torch.cuda.CUDAGraph()
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            try:
                with torch.cuda.stream(self._stream):
                    # Other threads go on using the device: only this one is recorded.
                    graph.capture_begin(capture_error_mode="thread_local")
                    try:
                        result = launch()
                    finally:
                        graph.capture_end()
            except RuntimeError as error:
                self._works = False
                log.warning("thinwire: kernels are launched one by one, because a CUDA graph was refused: %s", error)
                return False
        entry.graph, entry.result, entry.kept = graph, result, keep
        return True
