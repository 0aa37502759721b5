"""Launches that are the same at every step are recorded once and replayed as one CUDA graph.

A dozen small kernels cost the host more time to launch one by one than the device needs to run them.
"""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

Result = TypeVar("Result")

_KEPT = 16  # recordings a recorder holds; DDP's buckets stay where they are, so few are needed
_SEEN_BEFORE_RECORDING = 2  # the first time compiles kernels, and what comes only once is not worth a recording


@dataclass
class _Entry(Generic[Result]):
    seen: int = 0
    graph: torch.cuda.CUDAGraph | None = None
    result: Result | None = None
    launch: Callable[[], Result] | None = None  # holds the tensors that the graph reads and writes


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

    ``key`` must name everything that a launch takes from the host: addresses and numbers. A replay writes its result to
    the same memory every time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._entries: OrderedDict[Hashable, _Entry[Result]] = OrderedDict()

    def run(self, key: Hashable, launch: Callable[[], Result]) -> tuple[Result, bool]:
        """Return what ``launch`` returned, and whether that is memory which the next replay overwrites."""
        if self._device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return launch(), False
        entry = self._entries.setdefault(key, _Entry())
        self._entries.move_to_end(key)
        if entry.graph is None:
            entry.seen += 1
            if entry.seen <= _SEEN_BEFORE_RECORDING:
                if len(self._entries) > _KEPT:
                    self._entries.popitem(last=False)
                return launch(), False
            entry.graph, entry.launch = torch.cuda.CUDAGraph(), launch
            # Other threads go on using the device: only this one is recorded.
            with _no_collection(), torch.cuda.graph(entry.graph, capture_error_mode="thread_local"):
                entry.result = launch()
        entry.graph.replay()
        assert entry.result is not None
        return entry.result, True
