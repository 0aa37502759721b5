"""Warnings that name the line of the user's own script: hooks are called from deep inside torch."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from types import FrameType

import torch

_NOT_THE_USERS = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))


def warn_user(sentence: str) -> None:
    """A RuntimeWarning at the nearest caller outside of torch and thinwire; at the nearest at all where there is none.

    (In the backward pass, which torch runs in a thread of its own on a GPU, there is none. Under `thinwire train` the
    loop is thinwire's own, and what has called that is named.)
    """
    level, frame = _of_user(sys._getframe(1).f_back)  # what a hook's own function was called by
    warnings.warn(sentence, RuntimeWarning, stacklevel=2 if frame is None else level)


def line_of_user() -> tuple[str, int]:
    """The file and line that ``warn_user`` would name, for a warning that comes later."""
    hook = sys._getframe(1)
    frame = _of_user(hook.f_back)[1] or hook
    return frame.f_code.co_filename, frame.f_lineno


def _of_user(frame: FrameType | None) -> tuple[int, FrameType | None]:
    """The nearest frame that is neither torch's nor thinwire's, and its stack level for a warning."""
    level = 3
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        level, frame = level + 1, frame.f_back
    return level, frame
