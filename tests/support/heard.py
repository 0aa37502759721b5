"""What a rank logs."""

from __future__ import annotations

import logging

import torch.distributed as dist
from workers import Run, Training


class Heard(logging.Handler):
    """Collects the sentences of the thinwire log."""

    def __init__(self) -> None:
        super().__init__()
        self.sentences: list[str] = []
        self.levels: list[int] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.sentences.append(record.getMessage())
        self.levels.append(record.levelno)


def heard(group: dist.ProcessGroup, run: Run, steps: int = 0) -> list[str]:
    """What this rank logs while a run attaches and trains."""
    handler, log = Heard(), logging.getLogger("thinwire")
    log.addHandler(handler)
    try:
        training = Training(group, run)
        for step in range(steps):
            training.step(step)
        assert training.wire is not None
        training.wire.detach()
    finally:
        log.removeHandler(handler)
    return handler.sentences
