"""Step time against the number of hosts: what the adviser predicts, with measured points on it."""

from __future__ import annotations

import math
from typing import Any, TypeGuard

from thinwire.lab.emulation import parse_rate
from thinwire.lab.report.inputs import PHASES, Measurements, SavedAdvice

SAME_RATE = 1.5  # a measured bandwidth lies below the link's rate (headers, one stream), but not this far
SAME_PREDICTION = 1.25  # rows that carry a prediction further from the advice than this are of another model


def scaling_charts(advice: list[SavedAdvice], measured: list[Measurements]) -> list[dict[str, Any]]:
    """A chart for each advice, and one for each (model, rate) that was measured and belongs to no advice."""
    charts = [_chart_of(item) for item in advice]
    settings: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for item in measured:
        for row in item.rows:
            settings.setdefault((row["model"], row["rate"]), []).append({**row, "source": item.name})
    for (model, rate), rows in settings.items():
        fitting = [chart for chart, item in zip(charts, advice, strict=False) if _belongs(rows, model, rate, item)]
        chart = fitting[0] if len(fitting) == 1 and not fitting[0]["measured"] else None
        if chart is None:
            chart = {"title": "", "facts": {}, "recommended": "", "reason": "", "predicted": _own_predictions(rows)}
            chart["sources"] = []
            charts.append(chart)
        chart["measured"] = [_point(row) for row in rows]
        chart["title"] = ", ".join(word for word in (model, rate) if word) or chart["title"]
        chart["sources"] = list(dict.fromkeys([*chart["sources"], *(row["source"] for row in rows)]))
    return charts


def _chart_of(item: SavedAdvice) -> dict[str, Any]:
    facts = item.facts
    words = [str(facts[key]) for key in ("model", "rate") if isinstance(facts.get(key), str) and facts[key]]
    if not words and _is_number(facts.get("params")):
        words = [f"{facts['params'] / 1e6:.3g} M parameters"]
    return {
        "title": ", ".join(words) or item.name,
        "facts": {
            k: facts[k] for k in ("params", "compute_ms", "alpha_s", "beta_s_per_byte") if _is_number(facts.get(k))
        },
        "recommended": str(facts.get("recommended") or ""),
        "reason": str(facts.get("reason") or ""),
        "predicted": _curves([(row["method"], row["hosts"], row["step_ms"]) for row in item.predictions]),
        "measured": [],
        "sources": [item.name],
    }


def _belongs(rows: list[dict[str, Any]], model: str, rate: str, item: SavedAdvice) -> bool:
    """The advice is about what was measured: no fact that both name differs."""
    facts = item.facts
    if isinstance(facts.get("model"), str) and facts["model"] and model and facts["model"] != model:
        return False
    named, fitted = bits_per_second(rate), facts.get("beta_s_per_byte")
    if named and _is_number(fitted) and fitted > 0 and not 1 / SAME_RATE < 8 / fitted / named < SAME_RATE:
        return False
    predicted = {(row["method"], row["hosts"]): row["step_ms"] for row in item.predictions}
    for row in rows:
        theirs, ours = row["predicted_ms"], predicted.get((row["method"], row["hosts"]))
        if theirs and ours and not 1 / SAME_PREDICTION < theirs / ours < SAME_PREDICTION:
            return False
    return True


def bits_per_second(rate: str) -> float | None:
    """1gbit -> 1e9; None for what is not a rate."""
    try:
        return float(parse_rate(rate))
    except ValueError:
        return None


def _own_predictions(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return _curves([(row["method"], row["hosts"], row["predicted_ms"]) for row in rows])


def _curves(points: list[tuple[str, float | None, float | None]]) -> list[dict[str, Any]]:
    curves: dict[str, dict[float, float]] = {}
    for method, hosts, milliseconds in points:
        if hosts and milliseconds:
            curves.setdefault(method, {})[hosts] = milliseconds
    return [
        {"method": method, "hosts": sorted(curve), "step_ms": [curve[hosts] for hosts in sorted(curve)]}
        for method, curve in curves.items()
    ]


def _point(row: dict[str, Any]) -> dict[str, Any]:
    point = {key: row[key] for key in row if key.startswith("step_ms")}
    given = row["breakdown_ms"]
    breakdown = {phase: given.get(phase, 0.0) for phase in PHASES} if given else {}
    names = ("method", "hosts", "samples_per_s", "share_of_noop", "bytes_per_step", "predicted_ms")
    return {**{name: row[name] for name in names}, **point, "breakdown_ms": breakdown}


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
