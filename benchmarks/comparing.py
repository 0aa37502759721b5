"""Kept runs beside dense runs of the same setting: by how much they differ, over all seeds and of each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "claims"
ROUNDING = 1e-9  # 91.73 - 91.43 is not quite 0.3 in binary


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

    def differs(self, other: Result) -> str:
        """The names of the settings in which two runs differ."""
        return ", ".join(key for key, value in self.setting.items() if value != other.setting[key])


def find(pattern: str, results: Path) -> list[Result]:
    """The runs of a pattern, one a seed; "::" and a pattern of the method's string where they hold several methods."""
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
    for other in found:
        if other.setting != found[0].setting:
            raise ValueError(f"'{pattern}' mixes runs that differ in {other.differs(found[0])}")
    return found


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """The lines of a table; the first row is its heading."""
    heading, *others = rows
    return "".join(f"| {' | '.join(row)} |\n" for row in (heading, ["---"] * len(heading), *others))


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def number(value: float) -> str:
    return f"{value:.2f}" if abs(value) >= 10 else f"{value:.3f}"


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


def difference(runs: Sequence[Result], others: Sequence[Result]) -> Difference | None:
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
        100 * (one - other) / other if share else one - other for one, other in [(mean(ours), mean(theirs)), *pairs]
    )
    return Difference(by, "%" if share else metric["difference_unit"], tuple(by_seed), metric["higher_is_better"])


def of_the_same_seeds(runs: Sequence[Result], others: list[Result]) -> list[Result]:
    """Those of the others that have the runs' seeds, where all of these are there: luck of a seed is then on both
    sides."""
    seeds = {run.seed for run in runs}
    same = [other for other in others if other.seed in seeds]
    return same if {other.seed for other in same} == seeds else others


def times_fewer(runs: Sequence[Result], dense: Sequence[Result]) -> float:
    """Dense's bytes over the runs', on a worker's link and over the whole training."""
    # A ring all-reduce moves 2 (N - 1) / N of the gradient over every link, should dense have run with another N.
    ours, theirs = (1 - 1 / int(group[0].setting["workers"]) for group in (runs, dense))
    sent, dense_sent = (mean([run.nbytes_a_step for run in group]) for group in (runs, dense))
    return dense_sent * ours / theirs / sent
