"""Tables of the papers' claims beside what our runs came to, for docs/results.md and docs/accuracy.md.

python benchmarks/claims_table.py keep RUN...    # keep finished runs under benchmarks/results/claims
python benchmarks/claims_table.py table          # print the tables of benchmarks/claimed.py from what is kept
python benchmarks/claims_table.py rates          # print what each learning rate came to with dense and with local steps
python benchmarks/claims_table.py accuracy       # print docs/accuracy.md's table, of benchmarks/accuracy_page.py
python benchmarks/claims_table.py folders DIR    # run folders again, for `thinwire report`
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

from accuracy_page import accuracy_table
from claimed import CLAIMS, Claim, Row
from claims import RUNS, method_of
from comparing import (
    RESULTS,
    ROUNDING,
    Difference,
    Result,
    difference,
    find,
    markdown,
    mean,
    number,
    of_the_same_seeds,
    times_fewer,
)
from kept_runs import keep, write_folder

HEADINGS = (
    "",
    "paper",
    "ours",
    "dense",
    "difference",
    "does it hold?",
    "bytes per step and worker",
    "fewer than dense",
    "runs",
)
NOTHING = "-"


def _nbytes(value: float) -> str:
    for unit in ("B", "kB", "MB"):
        if value < 1000 or unit == "MB":
            return f"{value:.3g} {unit}" if value < 100 else f"{value:.0f} {unit}"
        value /= 1000
    raise AssertionError("MB is the last unit")


def _measured(runs: Sequence[Result]) -> str:
    """Mean, half range and number of runs; those that diverged are named, not left out in silence."""
    values = [run.outcome["metric"] for run in runs if run.outcome["metric"] is not None]
    diverged = f"{len(runs) - len(values)} of {len(runs)} diverged" if len(values) < len(runs) else ""
    if not values:
        return diverged or "not run"
    unit = runs[0].config["metric"]["unit"]
    spread = f" ± {(max(values) - min(values)) / 2:.2f}" if len(values) > 1 else ""
    measured = f"{number(mean(values))}{spread}{f' {unit}' if unit else ''} ({len(values)})"
    return f"{measured}, {diverged}" if diverged else measured


def _verdict(row: Row, found: Difference) -> str:
    reason = f"; {row.why}" if row.why else ""
    apart = f"{found.lost:.2f} behind" if found.lost >= 0 else f"{-found.lost:.2f} ahead of"
    beside = f", {apart} `{row.than}`" if row.than else ""
    if row.within is not None:
        limit = row.within + ROUNDING
        if found.lost > limit:
            return f"does not hold here: at most {row.within:g} was asked{beside}{reason}"
        return f"yes{beside}" if found.most_lost <= limit else f"on average{beside}; not on every seed"
    if row.behind is not None:
        if found.lost > row.behind:
            return f"yes{beside or ', it is worse'}{reason}"
        if found.lost > 0:
            return f"not decided{beside or f', {found.lost:.2f} behind'}: {row.behind:g} may be noise{reason}"
        return f"does not hold here{beside or ', it is not worse'}{reason}"
    return NOTHING


def cells(claim: Claim, row: Row, results: Path) -> list[str]:
    """One line of a claim's table, of runs that are there."""
    runs, against = find(row.runs, results), row.dense or claim.dense
    dense = of_the_same_seeds(runs, find(against, results))
    beside = _measured(dense)
    if dense and {run.seed for run in runs} - {run.seed for run in dense}:
        beside += "; not of all seeds"
    if dense and dense[0].setting != runs[0].setting:
        beside += f"; other {dense[0].differs(runs[0])}"
    whole = mean([run.nbytes_a_step for run in runs])
    last = mean([run.last_epoch_nbytes for run in runs])
    sent = _nbytes(whole) if abs(last - whole) <= 0.05 * whole else f"{_nbytes(whole)} ({_nbytes(last)} at the end)"
    compared = None if against == row.runs else difference(runs, dense)
    by = NOTHING if compared is None else str(compared)
    intact = difference(runs, of_the_same_seeds(runs, find(row.than, results))) if row.than else compared
    verdict = NOTHING if intact is None else _verdict(row, intact)
    fewer = NOTHING
    if compared is not None and whole:
        times = times_fewer(runs, dense)
        fewer = f"{times:.{0 if times >= 100 else 1}f}x"
    return [row.label, row.paper, _measured(runs), beside, by, verdict, sent, fewer, f"`{row.runs.partition('::')[0]}`"]


def table(claim: Claim, results: Path) -> str:
    """A claim's title and rows; below them the names of those that were not run."""
    there = [row for row in claim.rows if find(row.runs, results)]
    lines = markdown([HEADINGS, *(cells(claim, row, results) for row in there)])
    rows = f"### {claim.title}\n\n{lines}"
    absent = "; ".join(f"`{row.runs}`" for row in claim.rows if row not in there)
    return f"{rows}\nNot run to the end yet: {absent}.\n" if absent else rows


RATED = re.compile(r"ls-(?P<recipe>[^-]+)-(?P<way>.+)-(?P<lr>[0-9.]+)-s0")


def rates(results: Path) -> str:
    """What dense training and local steps came to with each learning rate, seed 0: which one a comparison may use."""
    found: dict[tuple[str, str], dict[float, float]] = {}
    for path in results.glob("ls-*-s0.json"):
        match = RATED.fullmatch(path.stem)
        assert match is not None, path.stem
        (run,) = find(path.stem, results)
        found.setdefault((match["recipe"], match["way"]), {})[float(match["lr"])] = run.outcome["metric"]
    lines = []
    for recipe in sorted({recipe for recipe, _ in found}):
        ways = {way: rows for (of, way), rows in sorted(found.items()) if of == recipe and len(rows) > 1}
        columns = sorted({lr for rows in ways.values() for lr in rows})
        rows = [[f"`ls-{recipe}-{way}-*`", *(_rated(by.get(lr)) for lr in columns)] for way, by in ways.items()]
        lines.append(markdown([[f"{recipe}: learning rate", *map(str, columns)], *rows]))
    return "\n".join(lines)


def _rated(metric: float | None) -> str:
    return NOTHING if metric is None else f"{metric:.2f}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("keep", "table", "rates", "accuracy", "folders"))
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    if given.what == "folders" and len(given.paths) != 1:
        parser.error("folders takes the one folder to write to")
    try:
        if given.what == "keep":
            for folder in given.paths:
                print(keep(folder, given.results))
        elif given.what == "folders":
            for path in sorted(given.results.glob("*.json")):
                print(write_folder(path, *given.paths, method_of(path.stem) if path.stem in RUNS else None))
        elif given.what == "rates":
            print(rates(given.results), end="")
        elif given.what == "accuracy":
            print(accuracy_table(given.results), end="")
        else:
            print("\n".join(table(claim, given.results) for claim in CLAIMS), end="")
    except ValueError as error:
        sys.exit(f"claims_table: {error}")


if __name__ == "__main__":
    main()
