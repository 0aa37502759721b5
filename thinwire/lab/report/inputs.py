"""Reads what a report is made from; whatever does not fit is answered with a ValueError of one sentence."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thinwire.lab.emulation import Links

# forward_backward + wait + other is the step. compress + communicate is the exchange: a part of it runs beside the
# backward pass, and only what the step waited for it is in the step.
STEP, EXCHANGE = ("forward_backward", "wait", "other"), ("compress", "communicate")
PHASES = (*STEP, *EXCHANGE)
EPOCH_NUMBERS = ("step", "seconds", "bytes_sent", "loss", "metric", "samples_per_s", "ratio")
STEP_NUMBERS = ("step", "seconds", "bytes_sent", "loss")
OUTCOME_NUMBERS = ("metric", "loss", "steps", "seconds", "samples_per_s", "bytes_sent", "ratio", "link_ratio")

TAKEN = (
    "a report is made from run folders (thinwire train --out DIR) and from files of thinwire advise --json and "
    "thinwire bench cluster --json"
)

Numbers = dict[str, float | None]  # None: not there, or not finite (a loss that diverged)


@dataclass
class Run:
    """A folder that `thinwire train --out` wrote; everything by method spec."""

    name: str
    config: dict[str, Any]
    epochs: dict[str, list[Numbers]] = field(default_factory=dict)
    steps: dict[str, list[Numbers]] = field(default_factory=dict)  # with "<phase>_s" where the line has a breakdown
    outcomes: dict[str, Numbers] = field(default_factory=dict)  # of methods that came to their end
    finished: bool = False  # summary.json is there

    @property
    def specs(self) -> list[str]:
        """All methods the run was asked for or has numbers of, in the order of the command line."""
        return list(dict.fromkeys([*self.config.get("specs", []), *self.epochs, *self.steps, *self.outcomes]))


@dataclass(frozen=True)
class SavedAdvice:
    """What `thinwire advise --json` wrote."""

    name: str
    facts: dict[str, Any]
    predictions: list[dict[str, Any]]  # method, hosts, step_ms, bytes_per_step


@dataclass(frozen=True)
class Measurements:
    """What `thinwire bench cluster --json` wrote."""

    name: str
    rows: list[dict[str, Any]]


Input = Run | SavedAdvice | Measurements


def read(path: Path) -> Input:
    """A run folder, or a JSON file of the adviser or of `bench cluster`."""
    try:
        if path.is_dir():
            return _read_run(path)
        if not path.exists():
            raise ValueError(f"'{path}' does not exist; {TAKEN}")
        try:
            value = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"'{path}' is not JSON; {TAKEN}") from error
    except OSError as error:
        raise ValueError(f"'{path}' cannot be read: {error.strerror}") from error
    if isinstance(value, dict) and value.get("kind") == "advice":
        rows = [_prediction(row, f"'{path}'") for row in _list(value.get("predictions"), f"predictions in '{path}'")]
        return SavedAdvice(path.name, {k: v for k, v in value.items() if k != "predictions"}, rows)
    if (
        isinstance(value, list)
        and value
        and all(isinstance(row, dict) and row.get("kind") == "cluster" for row in value)
    ):
        return Measurements(path.name, [_measurement(row, f"row {i} of '{path}'") for i, row in enumerate(value, 1)])
    raise ValueError(
        f"'{path}' holds neither advice (thinwire advise --json) nor measurements (thinwire bench cluster --json)"
    )


def _read_run(path: Path) -> Run:
    if not (path / "config.json").is_file():
        inside = sorted(child.name for child in path.iterdir() if (child / "config.json").is_file())
        hint = f", but holds some: name them, such as {path / inside[0]}" if inside else ""
        empty = "is empty" if not any(path.iterdir()) else "is not a run folder (it has no config.json)"
        raise ValueError(f"'{path}' {empty}{hint or '; thinwire train --out DIR writes one'}")
    config = _dict(_json(path / "config.json"), f"'{path / 'config.json'}'")
    if not all(isinstance(spec, str) for spec in _list(config.get("specs", []), f"specs in '{path / 'config.json'}'")):
        raise ValueError(f"specs in '{path / 'config.json'}' must be method strings")
    for key in ("environment", "metric", "versions"):
        _dict(config.get(key) or {}, f"{key} in '{path / 'config.json'}'")
    if config.get("cluster") is not None:
        try:
            Links.read(config["cluster"])
        except ValueError as error:
            raise ValueError(f"cluster in '{path / 'config.json'}': {error}") from error
    run = Run(path.resolve().name if path.name in ("", "..") else path.name, config)
    _read_metrics(path / "metrics.jsonl", run)
    if (path / "summary.json").exists():
        where = f"'{path / 'summary.json'}'"
        summary = _dict(_json(path / "summary.json"), where)
        for row in _list(summary.get("runs"), f"runs in {where}"):
            row = _dict(row, f"a run in {where}")
            run.outcomes[_spec(row, where)] = _numbers(row, OUTCOME_NUMBERS, where) | _phases(row, where)
        run.finished = True
    if not (run.epochs or run.steps or run.outcomes):
        raise ValueError(f"'{path}' has no numbers yet: metrics.jsonl is missing or empty")
    return run


def _read_metrics(path: Path, run: Run) -> None:
    """Lines as they came; where a resumed run repeats steps, what was written last counts."""
    if not path.exists():
        return
    text = path.read_bytes().decode("utf-8", errors="replace")
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"line {number} of '{path}'"
        try:
            row = json.loads(line)
        except ValueError as error:
            if number == len(lines):  # torn: the run is writing it right now, or was killed while it did
                break
            raise ValueError(f"{where} is not JSON") from error
        row = _dict(row, where)
        kind = _spec(row, where, "kind")
        if kind not in ("epoch", "steps"):
            raise ValueError(f"kind in {where} must be epoch or steps, not {kind!r}")
        names = EPOCH_NUMBERS if kind == "epoch" else STEP_NUMBERS
        point = _numbers(row, names, where) | _phases(row, where)
        step = point["step"]
        if step is None:
            raise ValueError(f"{where} has no step")
        rows = (run.epochs if kind == "epoch" else run.steps).setdefault(_spec(row, where), [])
        while rows and (rows[-1]["step"] or 0) >= step:
            rows.pop()
        rows.append(point)


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"'{path}' is not JSON: {str(error).splitlines()[0]}") from error


def _dict(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be a JSON object, not {_kind(value)}")
    return value


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{where} must be a JSON list, not {_kind(value)}")
    return value


def _spec(row: Mapping[str, Any], where: str, key: str = "spec") -> str:
    if not isinstance(row.get(key), str):
        raise ValueError(f"{key} in {where} must be a string, not {_kind(row.get(key))}")
    return str(row[key])


def _numbers(row: Mapping[str, Any], keys: tuple[str, ...], where: str) -> Numbers:
    found: Numbers = {}
    for key in keys:
        value = row.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise ValueError(f"{key} in {where} must be a number, not {_kind(value)}")
        found[key] = float(value) if value is not None and abs(value) < 1e300 and math.isfinite(value) else None
    return found


def _phases(row: Mapping[str, Any], where: str, suffix: str = "_s", key: str = "breakdown") -> Numbers:
    given = _dict(row.get(key) or {}, f"{key} in {where}")
    numbers = _numbers(given, tuple(phase + suffix for phase in PHASES), f"the {key} in {where}")
    return {name: value for name, value in numbers.items() if value is not None}


def _prediction(row: Any, where: str) -> dict[str, Any]:
    row = _dict(row, f"a prediction in {where}")
    numbers = _numbers(row, ("hosts", "step_ms", "bytes_per_step"), f"a prediction in {where}")
    return {"method": _spec(row, f"a prediction in {where}", "method"), **numbers}


def _measurement(row: dict[str, Any], where: str) -> dict[str, Any]:
    names = ("hosts", "step_ms_p20", "step_ms_p50", "step_ms_p80", "samples_per_s", "share_of_noop", "bytes_per_step")
    return {
        "method": _spec(row, where, "method"),
        **_numbers(row, (*names, "predicted_ms"), where),
        **{key: str(row.get(key) or "") for key in ("model", "rate", "commit", "hardware", "date")},
        "breakdown_ms": _phases(row, where, "", "breakdown_ms"),
    }


def _kind(value: Any) -> str:
    names = {
        type(None): "nothing",
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "text",
        list: "a list",
    }
    return names.get(type(value), "an object")
