"""The command `thinwire`: one file a verb.

Importing this is light: the verbs, and torch with them, are imported when a command line is run.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
import traceback
from collections.abc import Sequence

from thinwire import ctrl_c
from thinwire.cli._text import room, wrapped

LAB = ("typer", "rich")  # what every verb needs and the library does not


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; mistakes are answered with one sentence."""
    missing = [package for package in LAB if importlib.util.find_spec(package) is None]
    if missing:
        return complain(f"the command needs {' and '.join(missing)}: pip install 'thinwire[lab]'.", 2)
    from thinwire.cli import _verbs  # torch: seconds

    ctrl_c.started()
    return _verbs.run(arguments)


def complain(sentence: str, exit_code: int) -> int:
    """Say on stderr why the command ends."""
    # Under torchrun every rank finds the same mistake: rank 0 says so, and the others wait a little with ending,
    # because torchrun stops all that are left when the first one ends. A failure (1) can be that of one rank alone.
    if ctrl_c.is_silent() and exit_code != 1:
        time.sleep(1)
        return exit_code
    print(wrapped(f"thinwire: {sentence}", room(sys.stderr)), file=sys.stderr, flush=True)
    if os.environ.get("THINWIRE_DEBUG") and sys.exc_info()[0] is not None:
        traceback.print_exc()
    return exit_code


def main() -> None:
    """The entry point of the installed command."""
    try:
        ctrl_c.expect_ctrl_c()
        exit_code = run(sys.argv[1:])
    except KeyboardInterrupt:  # right before or after the command
        exit_code = complain(ctrl_c.CTRL_C, 130)
    sys.exit(exit_code)
