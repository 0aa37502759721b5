"""Seconds on a GPU's own clock: what the host sees of a kernel is only its launch."""

from __future__ import annotations

import torch

FOLD_AT = 64  # unfinished spans are kept; when there are many, the finished ones among them are added up


def mark(device: torch.device) -> torch.cuda.Event:
    """An event on the current stream of the device that says when the stream came to it."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


class DeviceSpans:
    """The sum of spans between two events of one device. Adding one never waits; reading waits for their ends."""

    def __init__(self) -> None:
        self._total_s = 0.0
        self._open: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def add(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> None:
        self._open.append((begin, end))
        if len(self._open) >= FOLD_AT:
            unfinished = []
            for one in self._open:
                if one[1].query():
                    self._fold(*one)
                else:
                    unfinished.append(one)
            self._open = unfinished

    def _fold(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> None:
        self._total_s += max(0.0, begin.elapsed_time(end)) / 1e3

    @property
    def seconds(self) -> float:
        spans, self._open = self._open, []
        for begin, end in spans:
            end.synchronize()
            self._fold(begin, end)
        return self._total_s
