"""`thinwire report --watch`: the page is written again whenever a run has written something."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from thinwire.cli._text import room, wrapped

LOOK_S = 1.0  # between two looks at the files
RELOAD_S = 5  # after which the page loads itself again
FILES = ("config.json", "metrics.jsonl", "summary.json")  # of a run folder


def watch_runs(paths: Sequence[Path], make: Callable[[int], None], out: Path) -> None:
    """Call ``make`` when an input has changed, until all runs have ended or Ctrl-C is pressed."""
    seen, waits, written = None, "", False
    try:
        while True:
            young = [path for path in paths if not _has_numbers(path)]
            state = _state(paths)
            if young and (told := f"waiting for numbers in '{young[0]}'; Ctrl-C ends that.") != waits:
                _say(told)
                waits = told
            if not young and state != seen:
                if _ended(paths):
                    break
                make(RELOAD_S)
                if not written:
                    _say(f"Written to {out}; open it in any browser. It is written again while the run goes on, and "
                         f"loads itself every {RELOAD_S} seconds; Ctrl-C ends that.")  # fmt: skip
                seen, written = state, True
            time.sleep(LOOK_S)
    except KeyboardInterrupt:
        if not written:
            raise
        make(0)
        _say(f"Written to {out} as far as the run has come.")
        return
    make(0)
    _say(f"Written to {out}; every run has ended.")


def _say(line: str) -> None:
    print(wrapped(line, room()), flush=True)


def _has_numbers(path: Path) -> bool:
    """Whether a report can be made of it; what is there and is no run is left to the reader to complain about."""
    if not path.exists():
        return False
    if not path.is_dir():
        return True
    if not (path / "config.json").exists():
        return any(path.iterdir())
    return (path / "summary.json").exists() or b"\n" in _beginning(path / "metrics.jsonl")


def _beginning(file: Path) -> bytes:
    """Enough for the first line."""
    try:
        with file.open("rb") as opened:
            return opened.read(1 << 16)
    except OSError:
        return b""


def _ended(paths: Sequence[Path]) -> bool:
    return all((path / "summary.json").exists() for path in paths if path.is_dir())


def _state(paths: Sequence[Path]) -> list[tuple[int, int] | None]:
    """What changes when an input is written to."""
    files = [file for path in paths for file in ([path / name for name in FILES] if path.is_dir() else [path])]
    return [(there.st_mtime_ns, there.st_size) if (there := _stat(file)) else None for file in files]


def _stat(file: Path) -> os.stat_result | None:
    try:
        return file.stat()
    except OSError:
        return None
