"""Many random training loops, with plain DDP and with thinwire; what differs, made as small as it gets.

python tests/contract/loops/loops.py --loops 5000 --seed 0
python tests/contract/loops/loops.py --seed 17 --loops 1 --all-methods --show
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parents[1], HERE.parents[1] / "support", HERE.parents[2]):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import loop_runner  # noqa: E402
from cluster import Cluster, ClusterError  # noqa: E402
from loop_judge import Verdict, judge  # noqa: E402
from loop_programs import Loop, draw_loop, families_of, text_of  # noqa: E402
from loop_shrinking import shrunk  # noqa: E402

BATCH = 12  # loops in a call of the cluster


@dataclass
class Row:
    """A loop with one method."""

    loop: Loop
    family: str
    verdict: Verdict
    trace: str = ""
    seconds: float = 0.0  # of a processor, all ranks, plain DDP's among those of the first method

    @property
    def differs(self) -> bool:
        return self.verdict.kind == "differs"


@dataclass
class Table:
    rows: list[Row] = field(default_factory=list)

    @property
    def differences(self) -> list[Row]:
        return [row for row in self.rows if row.differs]

    def lines(self) -> list[str]:
        kinds = ("equal", "told", "refused by both", "refused by plain DDP alone", "differs")
        families = sorted({row.family for row in self.rows})
        lines = [f"| method | runs | {' | '.join(kinds)} |", "|---|---|" + "---|" * len(kinds)]
        for family in [*families, ""]:
            own = [row for row in self.rows if not family or row.family == family]
            count = Counter(row.verdict.kind for row in own)
            lines.append(f"| {family or 'all'} | {len(own)} | {' | '.join(str(count[kind]) for kind in kinds)} |")
        for kind in kinds[1:-1]:
            why = Counter(row.verdict.why for row in self.rows if row.verdict.kind == kind)
            lines += ["", f"| {kind} | runs |", "|---|---|"] if why else []
            lines += [f"| {text} | {count} |" for text, count in why.most_common()]
        return lines


def jobs_of(loops: list[Loop], every: bool) -> list[tuple[Loop, list[str]]]:
    return [(loop, families_of(loop, every)) for loop in loops]


def run_jobs(cluster: Cluster, jobs: list[tuple[Loop, list[str]]]) -> list[Row]:
    """All jobs, those of as many ranks in one call each; where a call fails, its loops one by one."""
    rows = []
    for ranks in sorted({loop.ranks for loop, _ in jobs}):
        own = [job for job in jobs if job[0].ranks == ranks]
        for at in range(0, len(own), BATCH):
            rows += _run_batch(cluster, ranks, own[at : at + BATCH])
    return rows


def _run_batch(cluster: Cluster, ranks: int, jobs: list[tuple[Loop, list[str]]]) -> list[Row]:
    try:
        results = cluster.run(loop_runner.run_all, ranks, jobs, timeout_s=20 + 8 * len(jobs))
    except ClusterError as error:
        if len(jobs) > 1:
            return [row for job in jobs for row in _run_batch(cluster, ranks, [job])]
        loop, families = jobs[0]
        if len(families) > 1:
            return [row for family in families for row in _run_batch(cluster, ranks, [(loop, [family])])]
        return [Row(loop, families[0], Verdict("differs", "it hung, or a rank failed alone"), str(error))]
    rows = []
    for place, (loop, families) in enumerate(jobs):
        plain, *others = zip(*(result[place] for result in results), strict=True)
        for family, wired in zip(families, others, strict=True):
            trace = next((one.trace for one in wired if one.trace), "")
            spent = sum(one.seconds for one in (*wired, *(plain if family == families[0] else ())))
            rows.append(Row(loop, family, judge(loop, plain, wired), trace, spent))
    return rows


def smaller(cluster: Cluster, row: Row) -> Loop:
    """The smallest loop that still differs with this method."""

    def fails(loop: Loop) -> bool:
        verdict = run_jobs(cluster, [(loop, [row.family])])[0].verdict
        return verdict.kind == "differs" and _sort_of(verdict.why) == _sort_of(row.verdict.why)

    return shrunk(row.loop, fails)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--loops", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first loop; the others follow")
    parser.add_argument("--all-methods", action="store_true", help="instead of four of them in turns")
    parser.add_argument("--show", action="store_true", help="print every loop")
    parser.add_argument("--shrink", type=int, default=5, help="differences to make smaller")
    parser.add_argument("--method", help="only this one")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no further loops behind them")
    given = parser.parse_args()
    cluster, table, begin_s = Cluster(3), Table(), time.perf_counter()
    try:
        for at in range(0, given.loops, 8 * BATCH):
            if time.perf_counter() - begin_s > 60 * given.minutes:
                break
            count = min(8 * BATCH, given.loops - at)
            loops = [draw_loop(given.seed + at + place) for place in range(count)]
            jobs = [(loop, [given.method]) for loop in loops] if given.method else jobs_of(loops, given.all_methods)
            for loop in loops if given.show else []:
                print(text_of(loop, given.method or "dgc"), end="\n\n")
            rows = run_jobs(cluster, jobs)
            table.rows += rows
            for row in rows:
                if row.differs:
                    print(f"seed {row.loop.seed} {row.family}: {row.verdict.why}", flush=True)
            took_s = time.perf_counter() - begin_s
            print(f"# {at + count} loops, {len(table.rows)} runs, {took_s:.0f} s", file=sys.stderr, flush=True)
        for row in _one_per_kind(table.differences)[: given.shrink]:
            print(f"\n{row.family}: {row.verdict.why}\n{text_of(smaller(cluster, row), row.family)}\n{row.trace}")
    finally:
        cluster.stop()
    spent_s = sum(row.seconds for row in table.rows)
    loops = len({row.loop.seed for row in table.rows})
    beside = f"{len(table.rows)} runs beside plain DDP's"
    print(f"\n{loops} loops from seed {given.seed}, {beside}, {spent_s:.0f} s of a core\n")
    print("\n".join(table.lines()))
    return bool(table.differences)


def _one_per_kind(rows: list[Row]) -> list[Row]:
    kinds: dict[str, Row] = {}
    for row in rows:
        kinds.setdefault(_sort_of(row.verdict.why), row)
    return list(kinds.values())


def _sort_of(why: str) -> str:
    """A difference without its numbers and names."""
    return re.sub(r"\[.*?\]|[-+.\de]*\d|of \S+:|\(.*?\)", "", why)[:60]


if __name__ == "__main__":
    code: Any = main()
    sys.stdout.flush()
    os._exit(code)
