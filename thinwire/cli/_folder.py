"""The folder of a run. Files are written under another name and then moved: nobody sees half of one."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from thinwire.cli._complaints import Complaint, Failure
from thinwire.cli._environment import environment, versions
from thinwire.cli._job import Job
from thinwire.lab.recipes import RECIPES
from thinwire.lab.recipes.checkpoints import has_checkpoint
from thinwire.lab.recipes.events import Epoch, Event, Outcome, Resumed, Started, Steps

CHECKPOINTS = "checkpoint"
KINDS = {Epoch: "epoch", Steps: "steps"}


class RunFolder:
    """config.json at the start, lines of metrics.jsonl while it trains, summary.json at the end, checkpoints between.

    metrics.jsonl has one JSON object a line, of kind "epoch" or "steps" (see thinwire.lab.recipes.events).
    """

    def __init__(self, job: Job, num_workers: int) -> None:
        assert job.out is not None
        self.path, self.job = Path(job.out), job
        self.metric = dataclasses.asdict(RECIPES[job.recipe].metric)
        self.made = not self.path.exists()
        self.has_metrics = job.resume
        if job.resume:
            self.config: dict[str, Any] = json.loads((self.path / "config.json").read_text(encoding="utf-8"))
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if any(self.path.iterdir()):
                raise Complaint(
                    f"the run folder '{self.path}' is not empty; name another with --out"
                    + (f", or go on with --resume {self.path}." if (self.path / "config.json").exists() else ".")
                )
        except OSError as error:
            why = "it is a file; name a folder" if isinstance(error, FileExistsError) else error.strerror
            raise Complaint(f"the run folder '{self.path}' of --out cannot be used: {why}.") from error
        self.config = {**job.config, "workers": num_workers, "versions": versions(), "metric": self.metric}
        self.config["environment"] = environment([])
        try:
            self._write("config.json", _json(self.config))
        except Failure:
            self.discard()
            raise

    def add(self, event: Event) -> None:
        """Keep what belongs into the folder; other events are not written."""
        if isinstance(event, Started) and not self.job.resume:
            self.config["environment"] |= {"hosts": event.hosts, "device": event.device, "backend": event.backend}
            self.config["recipe_settings"] = event.settings
            self._write("config.json", _json(self.config))
        elif isinstance(event, Resumed):
            self.config.setdefault("resumed", []).append(datetime.now(timezone.utc).isoformat(timespec="seconds"))
            self._write("config.json", _json(self.config))
            self._forget_after(event)
        elif isinstance(event, (Epoch, Steps)):
            self._append({"kind": KINDS[type(event)], **dataclasses.asdict(event)})

    def finish(self, outcomes: Sequence[Outcome]) -> None:
        """Write the summary: a folder that has one holds a finished run."""
        runs = [dataclasses.asdict(outcome) for outcome in outcomes]
        self._write("summary.json", _json({"metric": self.metric, "runs": runs}))

    def discard(self) -> None:
        """Undo a run that ended before it began, so that the next one finds the folder as it was."""
        if not self.has_metrics and not (self.path / CHECKPOINTS).exists():
            (self.path / "config.json").unlink(missing_ok=True)
            if self.made and self.path.is_dir() and not any(self.path.iterdir()):
                self.path.rmdir()

    def can_resume(self) -> bool:
        return has_checkpoint(self.path / CHECKPOINTS)

    def _forget_after(self, resumed: Resumed) -> None:
        """Drop the lines of steps that will be made again, and half a line that a crash left."""
        path = self.path / "metrics.jsonl"
        kept = []
        before = set(self.job.specs[: resumed.index])
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if row["spec"] in before or (row["spec"] == resumed.spec and row["step"] <= resumed.step):
                kept.append(line + "\n")
        self._write("metrics.jsonl", "".join(kept))

    def _append(self, row: Mapping[str, Any]) -> None:
        path = self.path / "metrics.jsonl"
        size = path.stat().st_size if path.exists() else 0
        try:
            with path.open("ab") as file:
                file.write((json.dumps(row) + "\n").encode())
            self.has_metrics = True
        except OSError as error:
            if path.exists():
                os.truncate(path, size)
            raise Failure(f"'{path}' cannot be written: {error.strerror}.") from error

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


def leave_config(job: Job, num_workers: int) -> None:
    """On a host that does not share rank 0's disk, leave what --resume needs to find there."""
    assert job.out is not None
    path = Path(job.out) / "config.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_json({**job.config, "workers": num_workers}), encoding="utf-8")


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"
