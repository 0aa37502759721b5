"""Refusing a GradScaler that the loop uses and thinwire was not given."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch

STEPS = 3  # optimizer steps that are looked at: a loop that has a scaler uses it at every one
STEP = torch.amp.GradScaler.step.__code__
SENTENCE = (
    "the loop uses a GradScaler that thinwire does not know: what is kept from step to step would be in units of a "
    "scale that changes; give it to thinwire.attach(..., scaler=scaler)"
)


class ScalerCheck:
    """Raises a ValueError before an optimizer step that a GradScaler makes; only looks at the first steps."""

    def __init__(self) -> None:
        self._steps: dict[int, int] = {}  # by the optimizer's id

    def before_step(self, optimizer: object, *_: Any) -> None:
        steps = self._steps.get(id(optimizer), 0)
        if steps >= STEPS:
            return
        if _scales():  # refused, so it is not one of the steps that were looked at
            self._steps.clear()
            raise ValueError(SENTENCE)
        self._steps[id(optimizer)] = steps + 1


def _scales() -> bool:
    """Whether a GradScaler that is enabled called this."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is STEP:
            return bool(frame.f_locals["self"].is_enabled())
        frame = frame.f_back
    return False
