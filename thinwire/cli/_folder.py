"""The folder of a run. Files are written under another name and then moved: nobody sees half of one."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import thinwire
from thinwire.cli._complaints import Complaint, Failure
from thinwire.recipes.loop import Epoch, Event, Outcome


class RunFolder:
    """config.json at the start, a line of metrics.jsonl per epoch and method, summary.json at the end."""

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        self.path = path
        self.lines: list[str] = []
        try:
            path.mkdir(parents=True, exist_ok=True)
            if any(path.iterdir()):
                raise Complaint(f"the run folder '{path}' is not empty; name another with --out.")
        except OSError as error:
            raise Complaint(f"the run folder '{path}' cannot be used: {error.strerror}.") from error
        versions = {
            "thinwire": thinwire.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        self._write("config.json", _json({**config, "versions": versions}))

    def add(self, event: Event) -> None:
        """Keep an epoch's numbers; other events are not written."""
        if isinstance(event, Epoch):
            self.lines.append(json.dumps(dataclasses.asdict(event)) + "\n")
            self._write("metrics.jsonl", "".join(self.lines))

    def finish(self, outcomes: Sequence[Outcome]) -> None:
        """Write the summary: a folder that has one holds a finished run."""
        self._write("summary.json", _json({"runs": [dataclasses.asdict(outcome) for outcome in outcomes]}))

    def _write(self, name: str, text: str) -> None:
        partial = self.path / f".{name}.partial"
        try:
            with partial.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self.path / name)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise Failure(f"'{self.path / name}' cannot be written: {error.strerror}.") from error


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"
