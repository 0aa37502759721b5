"""From checked inputs to what the page shows: one dictionary of plain numbers and strings."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from typing import Any

from thinwire.lab.comparable import why_not_comparable
from thinwire.lab.emulation import Links
from thinwire.lab.report.headline import headline
from thinwire.lab.report.inputs import PHASES, Input, Measurements, Numbers, Run, SavedAdvice
from thinwire.lab.report.scaling import scaling_charts

MAX_POINTS = 1000  # of a curve; longer ones are averaged in equal pieces, and the page says so


def gather(inputs: Sequence[Input]) -> dict[str, Any]:
    """Sections (a recipe each), scaling charts, methods in the order of the legend, and sources."""
    runs = [item for item in inputs if isinstance(item, Run)]
    advice = [item for item in inputs if isinstance(item, SavedAdvice)]
    measured = [item for item in inputs if isinstance(item, Measurements)]
    recipes = dict.fromkeys(str(run.config.get("recipe", "training")) for run in runs)
    sections = [
        _section(name, [r for r in runs if str(r.config.get("recipe", "training")) == name]) for name in recipes
    ]
    scaling = scaling_charts(advice, measured)
    labels = [series["method"] for section in sections for series in section["series"]]
    labels += [row["method"] for chart in scaling for row in (*chart["predicted"], *chart["measured"])]
    return {
        "sections": sections,
        "scaling": scaling,
        "methods": list(dict.fromkeys(labels)),
        "sources": [_run_source(run) for run in runs]
        + [_file_source(item.name, "thinwire advise", [item.facts]) for item in advice]
        + [_file_source(item.name, "thinwire bench cluster", item.rows) for item in measured],
    }


def _section(recipe: str, runs: list[Run]) -> dict[str, Any]:
    """One recipe: every method once. Runs that differ in the seed alone are averaged, all others stay apart."""
    members: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        for spec in run.specs:
            if spec in run.epochs or spec in run.steps or spec in run.outcomes:
                members.setdefault((spec, _setting(run)), []).append(run)
    settings = dict.fromkeys(setting for _, setting in members)
    series = []
    for (spec, setting), same in members.items():
        label = spec if len(settings) == 1 else f"{spec} ({setting})"
        seeds = [run.config.get("seed") for run in same]
        if len(set(map(str, seeds))) == len(seeds):
            series.append(_series(label, spec, setting, same))
        else:  # the same seed twice: something else differs (the network, the machine), so no mean is taken
            series += [_series(f"{label} [{name}]", spec, setting, [run]) for name, run in _named(same)]
    _compare_with_dense(series)
    metric: dict[str, Any] = next((run.config["metric"] for run in runs if run.config.get("metric")), {})
    section = {
        "recipe": recipe,
        "setting": next(iter(settings)) if len(settings) == 1 else "",
        "uneven": {setting: sentence for setting in settings if (sentence := _uneven(series, setting))},
        "metric": {
            "name": str(metric.get("name") or "metric"),
            **{key: str(metric.get(key) or "") for key in ("unit", "difference_unit")},
            "higher_is_better": bool(metric.get("higher_is_better", True)),
        },
        "series": series,
    }
    return {**section, "headline": headline(section)}


def _uneven(series: list[dict[str, Any]], setting: str) -> str:
    """Why the seconds of this setting's methods do not compare, where they do not."""
    same = [one for one in series if one["setting"] == setting and "as threads" not in setting]
    compute_s, compress_s = (
        {one["method"]: one["breakdown_ms"].get(part, 0.0) / 1e3 for one in same}
        for part in ("forward_backward", "compress")
    )
    return why_not_comparable(compute_s, compress_s)


def _named(runs: list[Run]) -> Iterable[tuple[str, Run]]:
    """Names that differ: a folder that comes twice gets a number."""
    names = [run.name for run in runs]
    for i, run in enumerate(runs):
        yield run.name if names.count(run.name) == 1 else f"{run.name} {names[: i + 1].count(run.name)}", run


def _setting(run: Run) -> str:
    """What must be equal for a mean over seeds to make sense, as words."""
    config = run.config
    words = [_count(config[key], word) for key, word in (("epochs", "epoch"), ("workers", "worker")) if key in config]
    if config.get("in_process"):
        words.append("as threads")  # whose seconds are not those of real workers
    words += filter(None, (_words(config.get(key)) for key in ("device", "settings")))
    cluster = _cluster(config)
    return ", ".join([*words, *([f"links of {cluster.rates}"] if cluster else [])])


def _cluster(config: dict[str, Any]) -> Links | None:
    """The emulated network that a run ran on, where it did and says so."""
    return Links.read(config["cluster"]) if config.get("cluster") else None


def _count(number: Any, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _series(label: str, spec: str, setting: str, runs: list[Run]) -> dict[str, Any]:
    ended = [run.outcomes.get(spec) or _last(run, spec) for run in runs]
    row = {key: _mean([outcome.get(key) for outcome in ended]) for key in ended[0] if not key.endswith("_s")}
    row["samples_per_s"] = _mean([outcome.get("samples_per_s") for outcome in ended])
    metrics = [metric for outcome in ended if (metric := outcome.get("metric")) is not None]
    steps, pieces = _thinned(_curve([run.steps.get(spec, []) for run in runs], ("loss",)))
    return {
        "method": label,
        "spec": spec,
        "setting": setting,
        "seeds": [str(run.config.get("seed")) for run in runs],
        "finished": all(spec in run.outcomes for run in runs),
        "row": {**row, "metric_low": min(metrics, default=None), "metric_high": max(metrics, default=None)},
        "epochs": _curve([run.epochs.get(spec, []) for run in runs], ("metric", "loss")),
        "steps": steps,
        "averaged": pieces,  # log lines that one point of "steps" stands for
        "breakdown_ms": _breakdown(runs, spec),
    }


def _last(run: Run, spec: str) -> Numbers:
    """What is known of a method that did not come to its end."""
    epochs, steps = run.epochs.get(spec), run.steps.get(spec)
    line = epochs[-1] if epochs else (steps or [{}])[-1]
    names = ("metric", "loss", "seconds", "samples_per_s", "bytes_sent", "ratio")
    return {**{name: line.get(name) for name in names}, "steps": line.get("step"), "link_ratio": None}


def _mean(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there and len(there) == len(values) else None


def _curve(lines_of_runs: list[list[Numbers]], names: tuple[str, ...]) -> dict[str, list[float | None]]:
    """Columns over the steps that every run has reached: the mean, and lowest and highest for several runs.

    A run without any line is left out; the others go on.
    """
    by_step = [{line["step"]: line for line in lines} for lines in lines_of_runs if lines]
    if not by_step:
        return {}
    common = [step for step in by_step[0] if all(step in other for other in by_step[1:])]
    together = [[lines[step] for lines in by_step] for step in common]
    columns: dict[str, list[float | None]] = {"step": list(common)}
    for column, key in (("seconds", "seconds"), ("bytes", "bytes_sent"), *((name, name) for name in names)):
        columns[column] = [_mean([line.get(key) for line in lines]) for lines in together]
    for name in names if len(by_step) > 1 else ():
        for suffix, pick in (("low", min), ("high", max)):
            values = [[v for line in lines if (v := line.get(name)) is not None] for lines in together]
            columns[f"{name}_{suffix}"] = [pick(several, default=None) for several in values]
    return columns


def _thinned(columns: dict[str, list[float | None]]) -> tuple[dict[str, list[float | None]], int]:
    """At most MAX_POINTS points, and how many lines each stands for. x is the last of a piece, y its mean."""
    length = len(columns.get("step", []))
    size = -(-length // MAX_POINTS) or 1
    if size == 1:
        return columns, 1
    pieces = [slice(start, start + size) for start in range(0, length, size)]
    thin: dict[str, list[float | None]] = {}
    for name, column in columns.items():
        if name in ("step", "seconds", "bytes"):
            thin[name] = [column[piece][-1] for piece in pieces]
        else:
            thin[name] = [_mean([v for v in column[piece] if v is not None] or [None]) for piece in pieces]
    return thin, size


def _breakdown(runs: list[Run], spec: str) -> dict[str, float]:
    """Milliseconds a step by phase: the mean over all steps that the log covers, then over runs."""
    of_runs: list[dict[str, float]] = []
    for run in runs:
        sums, covered, before = dict.fromkeys(PHASES, 0.0), 0.0, 0.0
        for line in run.steps.get(spec, []):
            steps = (line["step"] or 0.0) - before  # a line holds means since the one before it
            before = line["step"] or 0.0
            if any(f"{phase}_s" in line for phase in PHASES):
                covered += steps
                for phase in PHASES:
                    sums[phase] += (line.get(f"{phase}_s") or 0.0) * steps
        if covered:
            of_runs.append({phase: 1000 * total / covered for phase, total in sums.items()})
        elif any(f"{phase}_s" in run.outcomes.get(spec, {}) for phase in PHASES):
            of_runs.append({phase: 1000 * (run.outcomes[spec].get(f"{phase}_s") or 0.0) for phase in PHASES})
    return {phase: sum(one[phase] for one in of_runs) / len(of_runs) for phase in PHASES} if of_runs else {}


def _compare_with_dense(series: list[dict[str, Any]]) -> None:
    """The difference to dense of the same setting; nothing where there is no such run, or several.

    Where one of both is not at its end, at the last step that has a metric of both, which is then named.
    """
    for one in series:
        row = one["row"]
        row["to_dense"] = row["to_dense_step"] = None
        dense = [other for other in series if other["spec"] == "dense" and other["setting"] == one["setting"]]
        if len(dense) != 1 or dense[0] is one:
            continue
        if one["finished"] and dense[0]["finished"]:
            both = [item["row"].get("metric") for item in (one, dense[0])]
        else:
            curves = [
                dict(zip(c.get("step", []), c.get("metric", []), strict=True))
                for c in (one["epochs"], dense[0]["epochs"])
            ]
            common = [step for step, metric in curves[0].items() if None not in (metric, curves[1].get(step))]
            both = [curve[common[-1]] for curve in curves] if common else [None]
            row["to_dense_step"] = common[-1] if common else None
        if None not in both:
            row["to_dense"] = both[0] - both[1]


def _run_source(run: Run) -> dict[str, Any]:
    config = run.config
    cluster = _cluster(config)
    emulated = {"emulated": f"{_count(cluster.hosts, 'host')}, {cluster.rates}"} if cluster else {}
    facts = {**(config.get("environment") or {}), "seed": config.get("seed"), **(config.get("versions") or {})}
    missing = [spec for spec in run.specs if spec not in run.outcomes]
    status = "finished" if run.finished and not missing else "still running, or was interrupted"
    return {
        "name": run.name,
        "what": "run folder",
        "status": status,
        "missing": missing if run.outcomes else [],
        **_command(config),
        **_origin({**emulated, **facts}),
    }


def _command(config: dict[str, Any]) -> dict[str, Any]:
    """The command, put together from what config.json holds."""
    specs = config.get("specs", [])
    cluster = _cluster(config)
    words = [*cluster.command, "--"] if cluster else []
    words += ["thinwire", "train", "--recipe", str(config.get("recipe", "?"))]
    words += ["--method", specs[0]] if specs else []
    words += ["--compare", ",".join(specs[1:])] if specs[1:] else []
    for key in ("workers", "epochs", "seed", "device", "data"):
        words += [f"--{key}", str(config[key])] if config.get(key) is not None else []
    settings = config.get("settings")
    words += ["--set", ",".join(map(str, settings))] if settings and isinstance(settings, list) else []
    words += ["--in-process"] if config.get("in_process") else []
    return {"command": shlex.join(words), "command_note": "put together from config.json"}


def _origin(facts: dict[str, Any]) -> dict[str, Any]:
    """commit, hardware and date by name; whatever else is known, as pairs."""
    words = {key: _words(value) for key, value in facts.items()}
    named = {key: words.pop(key, "") for key in ("commit", "hardware", "date")}
    named["date"] = re.sub(r"(\d)T(\d\d:\d\d):\d\d\+00:00", r"\1 \2 UTC", named["date"])
    return {**named, "facts": {key: value for key, value in words.items() if value}}


def _words(value: Any, name: str = "") -> str:
    """A fact as people write it: {"cpu": "EPYC", "cores": 2, "gpus": []} becomes "EPYC, 2 cores"."""
    if isinstance(value, dict):
        return ", ".join(filter(None, (_words(inner, key) for key, inner in value.items())))
    if isinstance(value, list):
        return ", ".join(filter(None, map(_words, value)))
    if value is None or value == "":
        return ""
    return f"{value} {name}" if name and isinstance(value, (int, float)) else str(value)


def _file_source(name: str, command: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A JSON file's origin; where its rows differ, all values are named."""
    facts = {
        key: list(dict.fromkeys(str(row[key]) for row in rows if row.get(key)))
        for key in ("commit", "hardware", "date")
    }
    return {
        "name": name,
        "what": "measured" if command.endswith("cluster") else "predicted",
        "status": "",
        "missing": [],
        "command": command,
        **_origin(facts),
    }
