"""Warnings that name the line of the user's own script: hooks are called from deep inside torch."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import torch

_NOT_THE_USERS = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))


def warn_user(sentence: str) -> None:
    """A RuntimeWarning at the nearest caller outside of torch and thinwire; at the nearest at all where there is none.

    (In the backward pass, which torch runs in a thread of its own on a GPU, there is none. Under `thinwire train` the
    loop is thinwire's own, and what has called that is named.)
    """
    level, frame = 2, sys._getframe(1).f_back  # what a hook's own function was called by
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        level, frame = level + 1, frame.f_back
    warnings.warn(sentence, RuntimeWarning, stacklevel=2 if frame is None else level + 1)
