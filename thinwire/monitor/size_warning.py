"""Telling a training whose method sends more than dense training would: a small model, or many ranks."""

from __future__ import annotations

import logging

from thinwire.methods import Dense, Method
from thinwire.methods.running_method import RunningMethod
from thinwire.stats import Stats

log = logging.getLogger("thinwire")

STEPS = 3  # that are counted, once a warm-up is over
END = 1 << 60  # a step at which every warm-up is over
SENTENCE = (
    "thinwire: %s sends %.3g times as much as dense training would here: the model is too small for it, or there are "
    'too many ranks; use "dense", wire.switch("dense") from now on'
)


class SizeWarning:
    """Compares the bytes of a few steps with those of a dense ring all-reduce, once for a method."""

    def __init__(self) -> None:
        self._method: Method | None = None
        self._from: Stats | None = None
        self._told = False

    def counts(self, running: RunningMethod, step: int) -> bool:
        """Whether this step is one to count."""
        if self._method is not running.method:
            self._method, self._from, self._told = running.method, None, False
        if self._told or isinstance(running.method, Dense):
            return False
        return running.density(step) == running.density(END)

    def after_exchange(self, method: Method, now: Stats) -> None:
        """Called between two steps."""
        if self._from is None:
            self._from = now
        if now.steps - self._from.steps < STEPS:
            return
        self._told = True
        ring = 2 * (now.world_size - 1) / now.world_size * (now.dense_bytes - self._from.dense_bytes)
        sent = now.bytes_sent - self._from.bytes_sent
        if sent > ring > 0:
            log.warning(SENTENCE, method, sent / ring)
