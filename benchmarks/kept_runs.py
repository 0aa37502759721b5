"""Runs of `thinwire train` in one small file each: what tables and pictures of results are made from.

A kept run is NAME.json with the run folder's config and summary, and the columns of its epoch lines and of at most 100
of its step lines, numbers to six digits; breakdowns of single steps, checkpoints and the names of folder and hosts are
left out.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

MOST_STEPS = 100
COLUMNS = {
    "epoch": ("epoch", "step", "loss", "metric", "lr", "seconds", "samples_per_s", "bytes_sent", "ratio"),
    "steps": ("epoch", "step", "loss", "seconds", "bytes_sent"),
}


def _short(value: Any) -> Any:
    """Numbers to six digits; what is not finite becomes null."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _short(inner) for key, inner in value.items()}
    return [_short(inner) for inner in value] if isinstance(value, list) else value


def keep(folder: Path, results: Path) -> Path:
    """Keep one finished run; a ValueError says what a folder lacks."""
    for name in ("config.json", "summary.json", "metrics.jsonl"):
        if not (folder / name).is_file():
            raise ValueError(f"'{folder}' is not a finished run: it has no {name}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    metrics: dict[str, dict[str, dict[str, list[Any]]]] = {}
    for spec in dict.fromkeys(line["spec"] for line in lines):
        metrics[spec] = {}
        for kind, columns in COLUMNS.items():
            rows = [line for line in lines if line["spec"] == spec and line["kind"] == kind]
            if kind == "steps":
                rows = rows[:: max(1, -(-len(rows) // MOST_STEPS))]
            metrics[spec][kind] = {column: [row.get(column) for row in rows] for column in columns}
    kept = {name: json.loads((folder / f"{name}.json").read_text()) for name in ("config", "summary")}
    if kept["config"].get("data") is not None:
        kept["config"]["data"] = "DIR"  # where the data lay says nothing to anybody else
    kept["config"].get("environment", {}).pop("hosts", None)
    results.mkdir(parents=True, exist_ok=True)
    path = results / f"{folder.resolve().name}.json"
    path.write_text(json.dumps(_short({**kept, "metrics": metrics}), separators=(",", ":")) + "\n")
    return path


def write_folder(kept: Path, parent: Path, method: str | None = None) -> Path:
    """Undo ``keep`` as far as it goes; a run of one method can be given the string that means the same today."""
    text, folder = kept.read_text(), parent / kept.stem
    if method is not None:
        (spec,) = json.loads(text)["config"]["specs"]
        text = text.replace(json.dumps(spec), json.dumps(method))
    run = json.loads(text)
    folder.mkdir(parents=True)
    for name in ("config", "summary"):
        (folder / f"{name}.json").write_text(json.dumps(run[name], indent=2) + "\n")
    lines = []
    for spec, kinds in run["metrics"].items():
        for kind, columns in kinds.items():
            rows = zip(*columns.values(), strict=True)
            lines += [{"kind": kind, "spec": spec, **dict(zip(columns, row, strict=True))} for row in rows]
    lines.sort(key=lambda line: (list(run["metrics"]).index(line["spec"]), line["step"]))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder
