"""The page's charts as files for papers: SVG, PDF and PNG, drawn by matplotlib where that is installed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from thinwire.lab.report.inputs import EXCHANGE, STEP

# The page's light colours, dashes and markers, in the same order (report.css and report.js).
COLOURS = ("#0072b2", "#d55e00", "#00845f", "#a6449a", "#a87500", "#2893cf", "#882255", "#6a6f1a")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.8)), (0, (5, 2, 1.5, 2)), (0, (9, 2)), (0, (3, 1, 1, 1, 1, 1)))
MARKERS = "o^Dvs"
PHASE_COLOURS = {
    "forward_backward": "#9aa3af",
    "wait": "#0067a8",
    "other": "#dcd6cc",
    "compress": "#d98f00",
    "communicate": "#86bfe6",
}
SIZE = (4.2, 3.0)  # inches: a column and a half
LABEL_SIZE, LABEL_WIDTH = 7.5, 20  # of a method beside its bar: points, characters a line
LEGEND_WIDTH = 62  # characters a line: wider ones would run out of the picture
LEGEND_ROWS, LEGEND_LINE = 3, 0.15  # what SIZE has room for, and inches for each row more
X_AXES = {"step": "steps", "seconds": "seconds", "bytes": "MB sent by a worker"}


def write(data: dict[str, Any], folder: Path) -> int:
    """Every chart as <name>.svg, .pdf and .png in `folder`; how many charts. ImportError without matplotlib."""
    import matplotlib
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "thinwire",  # the same data make the same file
        "pdf.fonttype": 42,
        "font.size": 9,
        "legend.fontsize": 7.5,
        "axes.grid": True,
    }
    settings |= {"grid.color": "#eceff3", "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False}
    count = 0
    with matplotlib.rc_context(settings):
        for name, draw in _charts(data):
            figure = Figure(figsize=SIZE, layout="constrained")
            draw(figure.add_subplot())
            for kind, undated in (("svg", {"Date": None}), ("pdf", {"CreationDate": None}), ("png", None)):
                figure.savefig(folder / f"{name}.{kind}", dpi=300, metadata=undated)
            count += 1
    return count


def _charts(data: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    styles = _styles(data["methods"])
    for number, section in enumerate(data["sections"], 1):
        name = _file_name(section["recipe"]) + (f"-{number}" if len(data["sections"]) > 1 else "")
        for value in ("metric", "loss"):
            for x in X_AXES:
                yield f"{name}-{value}-{x}", lambda axes, s=section, v=value, x=x: _curves(axes, s, v, x, styles)
        timed = {one["method"]: one["breakdown_ms"] for one in section["series"] if one["breakdown_ms"]}
        if timed:
            yield f"{name}-breakdown", lambda axes, t=timed: _breakdown(axes, t)
        ratios = {one["method"]: one["row"]["ratio"] for one in section["series"] if one["row"].get("ratio")}
        if ratios:
            yield f"{name}-ratio", lambda axes, r=ratios: _ratios(axes, r, styles)
    for number, chart in enumerate(data["scaling"], 1):
        yield f"scaling-{number}", lambda axes, c=chart: _scaling(axes, c, styles)


def _file_name(recipe: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", recipe.lower()).strip("-") or "recipe"


def _styles(methods: list[str]) -> dict[str, dict[str, Any]]:
    styles: dict[str, dict[str, Any]] = {}
    numbered = 0
    for method in methods:
        if method == "dense":
            styles[method] = {"color": "#3d444f", "linestyle": (0, (3, 2)), "marker": "s"}
        elif re.split("[: ]", method)[0] == "noop":
            styles[method] = {"color": "#8a93a0", "linestyle": ":", "marker": "o"}
        else:
            dash = DASHES[(numbered + numbered // len(COLOURS)) % len(DASHES)]
            colour = COLOURS[numbered % len(COLOURS)]
            styles[method] = {"color": colour, "linestyle": dash, "marker": MARKERS[numbered % len(MARKERS)]}
            numbered += 1
    return styles


def _curves(axes: Any, section: dict[str, Any], value: str, x: str, styles: dict[str, dict[str, Any]]) -> None:
    """As on the page; the loss is drawn as it was logged, without smoothing."""
    metric, last = section["metric"], []
    for one in section["series"]:
        fine = value == "loss" and len(one["steps"].get("step", [])) > 1
        columns = one["steps"] if fine else one["epochs"]
        if not columns:
            continue
        xs = _floats(columns[x], 1e-6 if x == "bytes" else 1.0)
        last += [v for v in xs[-1:] if v > 0]
        style = {**styles[one["method"]], **({"marker": ""} if fine or len(xs) > 40 else {"markersize": 3.5})}
        axes.plot(xs, _floats(columns[value]), label=one["method"], linewidth=1 if fine else 1.5, **style)
        if f"{value}_low" in columns:
            band = _floats(columns[f"{value}_low"]), _floats(columns[f"{value}_high"])
            axes.fill_between(xs, *band, color=style["color"], alpha=0.16, linewidth=0)
    if x == "bytes" and last and max(last) / min(last) > 8:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(_as_number)
    unit = f" ({metric['unit']})" if metric["unit"] else ""
    axes.set(xlabel=X_AXES[x], ylabel=f"{metric['name']}{unit}" if value == "metric" else "training loss")
    _legend(axes)


def _broken(method: str, width: int = LABEL_WIDTH) -> str:
    """A method's string in lines of about ``width`` characters, broken behind its commas and its colon."""
    lines = [""]
    for piece in re.findall(r"[^,:]+[,:]?", method):
        if lines[-1] and len(lines[-1]) + len(piece) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(lines)


def _floats(column: list[float | None], factor: float = 1.0) -> list[float]:
    return [float("nan") if number is None else number * factor for number in column]


def _breakdown(axes: Any, timed: dict[str, dict[str, float]]) -> None:
    """The step as a bar, and under it the exchange, a part of which runs beside the backward pass."""
    for phases, height, below in ((STEP, 0.4, 0.0), (EXCHANGE, 0.15, 0.32)):
        left = [0.0] * len(timed)
        places = [row + below for row in range(len(timed))]
        for phase in phases:
            widths = [parts[phase] for parts in timed.values()]
            name = phase.replace("_", " + ")
            axes.barh(places, widths, left=left, color=PHASE_COLOURS[phase], height=height, label=name)
            left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(timed)), [_broken(method) for method in timed], fontsize=LABEL_SIZE)
    axes.invert_yaxis()
    axes.set(xlabel="time of a step (ms)")
    _legend(axes)


def _ratios(axes: Any, ratios: dict[str, float], styles: dict[str, dict[str, Any]]) -> None:
    for row, (method, ratio) in enumerate(ratios.items()):
        axes.plot([1, ratio], [row, row], color=styles[method]["color"])
        axes.plot([ratio], [row], color=styles[method]["color"], marker=styles[method]["marker"])
    axes.set_yticks(range(len(ratios)), [_broken(method) for method in ratios], fontsize=LABEL_SIZE)
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="times fewer bytes")
    axes.xaxis.set_major_formatter(_as_number)


def _scaling(axes: Any, chart: dict[str, Any], styles: dict[str, dict[str, Any]]) -> None:
    for one in chart["predicted"]:
        axes.plot(one["hosts"], one["step_ms"], label=one["method"], **{**styles[one["method"]], "marker": ""})
    known = {one["method"] for one in chart["predicted"]}
    for row in chart["measured"]:
        low, middle, high = (row[f"step_ms_{p}"] for p in ("p20", "p50", "p80"))
        if middle is None or row["hosts"] is None:
            continue
        error = None if low is None or high is None else [[max(0, middle - low)], [max(0, high - middle)]]
        style = styles[row["method"]]
        label = None if row["method"] in known else row["method"]
        known.add(row["method"])
        axes.errorbar(
            [row["hosts"]], [middle], yerr=error, fmt=style["marker"], color=style["color"], markersize=4, label=label
        )
    axes.set_xscale("log", base=2)
    axes.set(yscale="log", xlabel="hosts", ylabel="time of a step (ms)", title=chart["title"])
    axes.xaxis.set_major_formatter(_as_number)
    _legend(axes)


def _as_number(value: float, _: int) -> str:
    """10 instead of a power of ten."""
    return f"{value:g}"


def _legend(axes: Any) -> None:
    """Above the axes, where it hides nothing."""
    handles, names = axes.get_legend_handles_labels()
    if names:
        columns = 1 if max(map(len, names)) > 32 else 2
        lines = [_broken(name, LEGEND_WIDTH) for name in names]
        rows = sum(1 + line.count("\n") for line in lines) / columns
        axes.figure.set_figheight(SIZE[1] + LEGEND_LINE * max(0.0, rows - LEGEND_ROWS))
        axes.figure.legend(handles, lines, frameon=False, loc="outside upper left", ncols=columns)
