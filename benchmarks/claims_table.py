"""Tables of the papers' claims beside what our runs came to, for docs/results.md.

python benchmarks/claims_table.py keep RUN...    # keep finished runs under benchmarks/results/claims
python benchmarks/claims_table.py table          # print the tables of benchmarks/claimed.py from what is kept
python benchmarks/claims_table.py folders DIR    # run folders again, for `thinwire report`
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))

from claimed import CLAIMS, Claim, Row
from claims import RUNS, method_of
from kept_runs import keep, write_folder

RESULTS = Path(__file__).parent / "results" / "claims"
HEADINGS = (
    "",
    "paper",
    "ours",
    "dense",
    "difference",
    "does it hold?",
    "bytes a step and worker",
    "fewer than dense",
    "runs",
)
NOTHING = "-"


@dataclass(frozen=True)
class Result:
    """One method of one kept run."""

    config: dict[str, Any]
    outcome: dict[str, Any]
    last_epoch_nbytes: float  # a step, in the last epoch: after any warm-up

    @property
    def nbytes_a_step(self) -> float:
        """Sent by a worker, the mean over workers and steps."""
        return float(self.outcome["bytes_sent"]) / max(1, int(self.outcome["steps"]))

    @property
    def seed(self) -> int:
        return int(self.config["seed"])

    @property
    def setting(self) -> dict[str, Any]:
        return {key: self.config.get(key) for key in ("recipe", "epochs", "workers", "settings")}


def find(pattern: str, results: Path) -> list[Result]:
    """The runs of a pattern, one a seed."""
    names, _, method = pattern.partition("::")
    found = []
    for path in sorted(results.glob("*.json")):
        if not fnmatchcase(path.stem, names):
            continue
        run = json.loads(path.read_text())
        outcomes = [row for row in run["summary"]["runs"] if fnmatchcase(row["spec"], method or "*")]
        if len(outcomes) != 1:
            specs = ", ".join(row["spec"] for row in run["summary"]["runs"])
            raise ValueError(f"'{pattern}' must name one method of {path.name}, which has {specs}; add ::METHOD")
        curve = run["metrics"][outcomes[0]["spec"]]["epoch"]
        sent, steps = [0.0, *curve["bytes_sent"]], [0, *curve["step"]]
        found.append(Result(run["config"], outcomes[0], (sent[-1] - sent[-2]) / max(1, steps[-1] - steps[-2])))
    return found


def _number(value: float) -> str:
    return f"{value:.2f}" if abs(value) >= 10 else f"{value:.3f}"


def _nbytes(value: float) -> str:
    for unit in ("B", "kB", "MB"):
        if value < 1000 or unit == "MB":
            return f"{value:.3g} {unit}" if value < 100 else f"{value:.0f} {unit}"
        value /= 1000
    raise AssertionError("MB is the last unit")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _measured(runs: Sequence[Result]) -> str:
    """Mean, half range and number of runs; those that diverged are named, not left out in silence."""
    values = [run.outcome["metric"] for run in runs if run.outcome["metric"] is not None]
    diverged = f"{len(runs) - len(values)} of {len(runs)} diverged" if len(values) < len(runs) else ""
    if not values:
        return diverged or "not run"
    unit = runs[0].config["metric"]["unit"]
    spread = f" ± {(max(values) - min(values)) / 2:.2f}" if len(values) > 1 else ""
    mean = f"{_number(_mean(values))}{spread}{f' {unit}' if unit else ''} ({len(values)})"
    return f"{mean}, {diverged}" if diverged else mean


@dataclass(frozen=True)
class Difference:
    """By how much the mean differs from that of other runs, and each seed from its own where all seeds are there."""

    by: float
    unit: str
    by_seed: tuple[float, ...]
    higher_is_better: bool

    @property
    def lost(self) -> float:
        return -self.by if self.higher_is_better else self.by

    @property
    def most_lost(self) -> float:
        """By the seed that lost most."""
        signs = -1 if self.higher_is_better else 1
        return max((signs * by for by in self.by_seed), default=self.lost)

    def __str__(self) -> str:
        seeds = f" ({', '.join(f'{by:+.2f}' for by in self.by_seed)})" if len(self.by_seed) > 1 else ""
        return f"{self.by:+.2f}{seeds} {self.unit}".rstrip()


def _difference(runs: Sequence[Result], others: Sequence[Result]) -> Difference | None:
    """None where there is nothing to compare."""
    ours, theirs = ([run.outcome["metric"] for run in group] for group in (runs, others))
    if not ours or not theirs or None in ours + theirs:
        return None
    metric = runs[0].config["metric"]
    share = metric["name"] == "perplexity"
    own = {other.seed: other.outcome["metric"] for other in others}
    pairs = [(run.outcome["metric"], own[run.seed]) for run in runs if run.seed in own]
    pairs = pairs if len(pairs) == len(runs) == len(others) else []
    by, *by_seed = (
        100 * (one - other) / other if share else one - other for one, other in [(_mean(ours), _mean(theirs)), *pairs]
    )
    return Difference(by, "%" if share else metric["difference_unit"], tuple(by_seed), metric["higher_is_better"])


_ROUNDING = 1e-9  # 91.73 - 91.43 is not quite 0.3 in binary


def _verdict(row: Row, found: Difference) -> str:
    reason = f"; {row.why}" if row.why else ""
    apart = f"{found.lost:.2f} behind" if found.lost >= 0 else f"{-found.lost:.2f} ahead of"
    beside = f", {apart} `{row.than}`" if row.than else ""
    if row.within is not None:
        limit = row.within + _ROUNDING
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


def _of_the_same_seeds(runs: Sequence[Result], others: list[Result]) -> list[Result]:
    """Those of the others that have the runs' seeds, where all of these are there: luck of a seed is then on both
    sides."""
    seeds = {run.seed for run in runs}
    same = [other for other in others if other.seed in seeds]
    return same if {other.seed for other in same} == seeds else others


def _differs(one: Result, other: Result) -> str:
    return ", ".join(key for key, value in one.setting.items() if value != other.setting[key])


def cells(claim: Claim, row: Row, results: Path) -> list[str]:
    """One line of a claim's table; runs that are not there yet leave their cells empty."""
    runs, dense = find(row.runs, results), find(row.dense or claim.dense, results)
    dense = _of_the_same_seeds(runs, dense)
    if not runs:
        return [row.label, row.paper, "not run", _measured(dense), *[NOTHING] * (len(HEADINGS) - 4)]
    for other in runs:
        if other.setting != runs[0].setting:
            raise ValueError(f"'{row.runs}' mixes runs that differ in {_differs(other, runs[0])}")
    beside = _measured(dense)
    if dense and {run.seed for run in runs} - {run.seed for run in dense}:
        beside += "; not of all seeds"
    if dense and dense[0].setting != runs[0].setting:
        beside += f"; other {_differs(dense[0], runs[0])}"
    whole = _mean([run.nbytes_a_step for run in runs])
    last = _mean([run.last_epoch_nbytes for run in runs])
    sent = _nbytes(whole) if abs(last - whole) <= 0.05 * whole else f"{_nbytes(whole)} ({_nbytes(last)} at the end)"
    compared = None if (row.dense or claim.dense) == row.runs else _difference(runs, dense)
    by = NOTHING if compared is None else str(compared)
    intact = _difference(runs, _of_the_same_seeds(runs, find(row.than, results))) if row.than else compared
    verdict = NOTHING if intact is None else _verdict(row, intact)
    fewer = NOTHING
    if compared is not None and whole:
        # A ring all-reduce moves 2 (N - 1) / N of the gradient over every link, should dense have run with another N.
        ours, theirs = (1 - 1 / int(group[0].setting["workers"]) for group in (runs, dense))
        times = _mean([run.nbytes_a_step for run in dense]) * ours / theirs / whole
        fewer = f"{times:.{0 if times >= 100 else 1}f}x"
    return [row.label, row.paper, _measured(runs), beside, by, verdict, sent, fewer, f"`{row.runs.partition('::')[0]}`"]


def table(claim: Claim, results: Path) -> str:
    lines = [HEADINGS, ("---",) * len(HEADINGS), *(cells(claim, row, results) for row in claim.rows)]
    return f"### {claim.title}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("keep", "table", "folders"))
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
        else:
            print("\n".join(table(claim, given.results) for claim in CLAIMS))
    except ValueError as error:
        sys.exit(f"claims_table: {error}")


if __name__ == "__main__":
    main()
