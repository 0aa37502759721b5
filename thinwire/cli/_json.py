"""Writing a JSON file so that it is whole or not there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from thinwire.cli._complaints import Complaint, Failure


def checked_json(path: Path | None) -> None:
    """Complain about a file that cannot be written, before the work that would fill it."""
    if path is not None and not path.parent.is_dir():
        raise Complaint(f"--json {path}: the folder {path.parent} does not exist.")
    if path is not None and path.is_dir():
        raise Complaint(f"--json {path}: it is a folder; name a file in it.")


def write_json(path: Path | None, value: Any) -> None:
    """Write the file beside its place first: nobody sees half of it."""
    if path is None:
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise Failure(f"'{path}' cannot be written: {error.strerror}.") from error
    finally:
        partial.unlink(missing_ok=True)
