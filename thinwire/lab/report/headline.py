"""The first thing that a reader of the page sees: one sentence about one method against dense, and three numbers."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]
TIMES, MINUS = "\u00d7", "\u2212"


def headline(section: Row) -> Row:
    """{"sentence", "numbers": [{"value", "label"}]} of a section that gather() made; {} where nothing can be said."""
    duels = [duel for one in section["series"] if (duel := _duel(one, section)) is not None]
    if duels:
        return _of_duel(max(duels, key=lambda duel: duel["rank"]), section)
    with_metric = [one for one in section["series"] if one["row"].get("metric") is not None]
    return _of_one(with_metric[0], section) if len(with_metric) == 1 else {}


def factor(ratio: float) -> str:
    """A ratio with two digits, or three below 2: 1.13, 2.6, 21."""
    return f"{ratio:,.0f}{TIMES}" if ratio >= 10 else f"{ratio:.2g}{TIMES}" if ratio >= 2 else f"{ratio:.3g}{TIMES}"


def against(ratio: float, more: str, less: str, same: str) -> tuple[str, str]:
    """A ratio to dense, and in words: 2.6 is 2.6 times ``more``, 0.884 is 1.13 times ``less``, 1 is ``same``."""
    if f"{ratio:.3g}" == "1":
        return factor(1), f"{same} as dense"
    return (factor(ratio), f"{more} than dense") if ratio > 1 else (factor(1 / ratio), f"{less} than dense")


def _duel(one: Row, section: Row) -> Row | None:
    """What it took a method and dense of the same setting to reach the value that both have reached."""
    dense = [other for other in section["series"] if other["spec"] == "dense" and other["setting"] == one["setting"]]
    if len(dense) != 1 or dense[0] is one or not one["row"].get("bytes_sent"):
        return None
    sign = 1 if section["metric"]["higher_is_better"] else -1
    best, theirs = _best(one, sign), _best(dense[0], sign)
    if best is None or theirs is None:
        return None
    last = dense[0]["row"].get("metric") if dense[0]["finished"] else None
    goal = theirs if last is None else min(theirs, sign * last)  # of some runs the curve may be missing
    target = min(goal, best)
    places = [_reached(s, sign, target) for s in (one, dense[0])]
    fewer = _ratio(one, dense[0], places, "bytes")
    if fewer is None:
        return None
    sooner = None if not _timed(one, section) else _ratio(one, dense[0], places, "seconds")
    return {
        "one": one, "dense": dense[0], "target": sign * target, "fewer": fewer, "sooner": sooner,
        "rank": (target - goal, sooner or 0.0, fewer),
    }  # fmt: skip


def _best(one: Row, sign: int) -> float | None:
    return max((sign * value for value in one["epochs"].get("metric", []) if value is not None), default=None)


def _timed(one: Row, section: Row) -> bool:
    """Whether its seconds may be compared with those of dense."""
    return one["setting"] not in section["uneven"] and "as threads" not in one["setting"]


def _reached(one: Row, sign: int, target: float) -> int:
    """The first epoch at or beyond the value."""
    return next(i for i, v in enumerate(one["epochs"]["metric"]) if v is not None and sign * v >= target)


def _ratio(one: Row, dense: Row, places: list[int], column: str) -> float | None:
    own, other = one["epochs"][column][places[0]], dense["epochs"][column][places[1]]
    return other / own if own and other else None


def _of_duel(duel: Row, section: Row) -> Row:
    one, dense, metric = duel["one"], duel["dense"], section["metric"]
    value = value_of(metric, duel["target"])
    many, less = against(duel["fewer"], "fewer bytes", "more bytes", "as many bytes")
    numbers = [{"value": many, "label": less}]
    ended = one["finished"] and dense["finished"] and one["row"]["to_dense"] is not None
    worse = -one["row"]["to_dense"] * (1 if metric["higher_is_better"] else -1) if ended else 0.0
    unit = f" {metric['difference_unit']}" if metric["difference_unit"] else ""
    if duel["sooner"] is not None:
        fast, sooner = against(duel["sooner"], "sooner", "later", "as soon")
        numbers.insert(0, {"value": fast, "label": sooner})
        middle = f"{_times(fast)}{sooner}, with {_times(many)}{less.removesuffix(' than dense')}"
    else:
        if ended:
            difference = f"{one['row']['to_dense']:+.2f}".replace("-", MINUS)
            numbers.insert(0, {"value": f"{difference}{unit}", "label": f"{metric['name']} to dense at the end"})
        middle = f"with {_times(many)}{less}"
    numbers.append({"value": _short(metric, duel["target"]), "label": f"{metric['name']}, reached by both"})
    tail = f"; it ended {worse:.2f}{unit} worse than dense" if round(worse, 2) > 0 else ""
    so_far = "" if ended else "So far: "
    return {"sentence": f"{so_far}{one['method']} reached {value} {middle}{tail}.", "numbers": numbers}


def _times(value: str) -> str:
    """ "2.6x " before its word; nothing where both are alike."""
    return "" if value == factor(1) else f"{value} "


def _of_one(one: Row, section: Row) -> Row:
    """A method alone: what it came to."""
    row, metric = one["row"], section["metric"]
    numbers = [{"value": _short(metric, row["metric"]), "label": metric["name"]}]
    words = f"{one['method']} {'ended at' if one['finished'] else 'has come to'} {value_of(metric, row['metric'])}"
    if row.get("seconds"):
        took = f"{row['seconds'] / 60:.3g} min" if row["seconds"] >= 120 else f"{row['seconds']:.3g} s"
        numbers.append({"value": took, "label": "training time"})
        words += f" after {took}"
    if (row.get("ratio") or 1) > 1.005:
        numbers.append({"value": factor(row["ratio"]), "label": "fewer bytes than dense fp32"})
        words += f", with {factor(row['ratio'])} fewer bytes than dense fp32"
    elif row.get("bytes_sent"):
        sent = f"{row['bytes_sent'] / 1e6:,.3g} MB"
        numbers.append({"value": sent, "label": "sent by a worker"})
        words += f", and a worker sent {sent}"
    return {"sentence": f"{words}.", "numbers": numbers}


def value_of(metric: Row, value: float) -> str:
    """ "97 % accuracy", "2.33 bits per character", "perplexity 101"."""
    if metric["unit"] or " per " in metric["name"]:
        return f"{_short(metric, value)} {metric['name']}"
    return f"{metric['name']} {_short(metric, value)}"


def _short(metric: Row, value: float) -> str:
    return f"{value:.4g} {metric['unit']}".rstrip()
