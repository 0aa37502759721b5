"""Ctrl-C while the command is still importing: one line and exit code 130, as later, and no traceback.

Importing torch takes seconds. What is run by ``python -m thinwire`` is imported after the package, and what the
installed script imports is inside of it, so the package itself has to see to it, first of all.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

CTRL_C = "stopped by Ctrl-C."
LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torchrun and its like set, and
LOCAL = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")  # what most of them do


def expect_ctrl_c() -> None:
    """From now on Ctrl-C ends the process with one line, where this is the command and nobody has decided otherwise."""
    if _is_command(sys.orig_argv) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def started() -> None:
    """From now on Ctrl-C is a KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def is_silent() -> bool:
    """Whether a launcher started this process beside a rank 0, which says the same.

    Where the launcher's variables are not all there and right, nobody else may be: then this process speaks.
    """
    if any(name not in os.environ for name in LAUNCHER):
        return False
    numbers = [os.environ[name].strip() for name in (*LAUNCHER, *LOCAL) if name in os.environ and name != "MASTER_ADDR"]
    rank, world = numbers[:2]
    return all(number.isdecimal() for number in numbers) and 0 < int(rank) < int(world)


def _is_command(command_line: list[str]) -> bool:
    """Whether this interpreter runs the script ``thinwire`` or ``-m thinwire``."""
    words = iter(command_line[1:])
    for word in words:
        if word in ("-X", "-W"):
            next(words, None)
        elif word in ("-m", "-c") or not word.startswith("-"):
            return next(words, None) == "thinwire" if word == "-m" else Path(word).stem == "thinwire"
    return False


def _end(*_: Any) -> None:
    # An exception could be caught, or become another, inside of whatever is being imported. As later, one rank speaks.
    if not is_silent():
        os.write(2, f"thinwire: {CTRL_C}\n".encode())
    os._exit(130)
