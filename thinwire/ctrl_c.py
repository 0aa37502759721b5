"""Ctrl-C while the command is still importing: one line and exit code 130, as later, and no traceback.

Importing torch takes seconds, and an exception raised meanwhile could be caught, or become another, inside of whatever
is being imported.
"""

from __future__ import annotations

import os
import signal
from typing import Any

CTRL_C = "stopped by Ctrl-C."
LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torchrun and its like set, and
LOCAL = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")  # what most of them do


def expect_ctrl_c() -> None:
    """From now on Ctrl-C ends the process with one line, where nobody has decided otherwise."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
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


def _end(*_: Any) -> None:
    if not is_silent():  # as later, one rank speaks
        os.write(2, f"thinwire: {CTRL_C}\n".encode())
    os._exit(130)
