"""Counts and seconds of a run, over interruptions."""

from __future__ import annotations

import dataclasses
import time

import torch

from thinwire.lab.recipes.events import Breakdown
from thinwire.stats import Stats
from thinwire.transport.device_time import DeviceSpans, mark


@dataclasses.dataclass(frozen=True)
class Tally:
    """Sums since the start of a run, on this rank."""

    steps: int = 0
    samples: int = 0
    seconds: float = 0.0
    to_backward_s: float = 0.0  # from the start of the forward pass to the end of backward(), with what it waited for
    compress_s: float = 0.0
    communicate_s: float = 0.0
    wait_s: float = 0.0
    frame_bytes: int = 0
    dense_bytes: int = 0
    bytes_sent: int = 0

    def _combine(self, other: Tally, sign: int) -> Tally:
        mine, theirs = dataclasses.astuple(self), dataclasses.astuple(other)
        return Tally(*(a + sign * b for a, b in zip(mine, theirs, strict=True)))

    def __add__(self, other: Tally) -> Tally:
        return self._combine(other, 1)

    def __sub__(self, other: Tally) -> Tally:
        return self._combine(other, -1)

    @property
    def ratio(self) -> float | None:
        return self.dense_bytes / self.frame_bytes if self.frame_bytes else None

    def link_ratio(self, world: int) -> float | None:
        dense = 2 * (world - 1) / world * self.dense_bytes
        return dense / self.bytes_sent if self.bytes_sent else None

    @property
    def breakdown(self) -> Breakdown:
        """Seconds a step."""
        steps = max(1, self.steps)
        return Breakdown(
            forward_backward_s=max(0.0, self.to_backward_s - self.wait_s) / steps,
            compress_s=self.compress_s / steps,
            communicate_s=self.communicate_s / steps,
            wait_s=self.wait_s / steps,
            other_s=max(0.0, self.seconds - self.to_backward_s) / steps,
        )


class TrainingClock:
    """Times a run: all of it while it is running, and the way from `forward` to `backward_done` of every step.

    On a GPU the latter is measured by events on its stream, so that no step waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._seconds = self._to_backward_s = self._since_s = self._forward_s = 0.0
        self._spans = DeviceSpans() if device.type == "cuda" else None
        self._begin: torch.cuda.Event | None = None
        self._running = False

    def start(self) -> None:
        self._since_s, self._running = time.perf_counter(), True

    def stop(self) -> None:
        """Evaluation, checkpoints: not counted until the next start."""
        self._seconds, self._running = self.seconds, False

    @property
    def seconds(self) -> float:
        return self._seconds + (time.perf_counter() - self._since_s if self._running else 0.0)

    @property
    def to_backward_s(self) -> float:
        return self._to_backward_s if self._spans is None else self._spans.seconds

    def forward(self) -> None:
        if self._spans is None:
            self._forward_s = time.perf_counter()
        else:
            self._begin = mark(self.device)

    def backward_done(self) -> None:
        if self._spans is None:
            self._to_backward_s += time.perf_counter() - self._forward_s
        else:
            assert self._begin is not None
            self._spans.add(self._begin, mark(self.device))


def tally(clock: TrainingClock, stats: Stats, steps: int, samples: int) -> Tally:
    """What a clock and a wire counted in this process."""
    return Tally(
        steps=steps,
        samples=samples,
        seconds=clock.seconds,
        to_backward_s=clock.to_backward_s,
        compress_s=stats.seconds_compensating + stats.seconds_compressing,
        communicate_s=stats.seconds_communicating,
        wait_s=stats.seconds_waiting,
        frame_bytes=stats.frame_bytes,
        dense_bytes=stats.dense_bytes,
        bytes_sent=stats.bytes_sent,
    )
