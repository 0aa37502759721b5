"""The same steps on the emulated cluster with two trees of this repository, in turns: is one of them slower?

    git worktree add ../before COMMIT && (cd ../before && python setup.py build_ext --inplace)
    python benchmarks/two_commits.py ../before . --json benchmarks/results/house-cluster.json

Every turn runs `thinwire bench cluster` once with each tree; which of them begins changes from turn to turn. A step's
share is of the free network's speed, which the same turn measured with `noop`; a tree's row has the median of its
turns, and the lowest and highest of them, which are the noise that a difference has to leave behind.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

Row = dict[str, Any]
METHODS = "dgc,dgc:density=0.001;scope=tensor,gtopk,blocksign,terngrad"  # ; stands for the commas of options
# The command, without the rows of dense, bf16 and PowerSGD, which take most of its time and are not compared here.
ONLY_NAMED = """
import importlib, importlib.util, sys
from thinwire.cli import main
place = "thinwire.lab" if importlib.util.find_spec("thinwire.lab") else "thinwire"  # after the move, and before
importlib.import_module(f"{place}.bench.cluster").ALWAYS = ("noop",)
sys.exit(main())
"""


def bench(tree: Path, arguments: list[str]) -> list[Row]:
    """The rows that one tree's own `bench cluster` wrote."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-c", ONLY_NAMED, "bench", "cluster", *arguments, "--json", file.name]
        subprocess.run(command, check=True, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, capture_output=True)
        rows: list[Row] = json.loads(Path(file.name).read_text())
    return [row for row in rows if row.get("kind") == "cluster"]


def summarized(turns: list[Row]) -> Row:
    """What one method did with one tree over all turns."""
    row = {key: turns[0][key] for key in ("method", "hosts", "rate", "model", "commit", "hardware", "date")}
    for key in ("share_of_noop", "step_ms_p50", "processor_ms", "bytes_per_step"):
        values = [turn[key] for turn in turns if turn[key] is not None]
        if values:
            row[key] = statistics.median(values)
            row[f"{key}_lowest"], row[f"{key}_highest"] = min(values), max(values)
    return {**row, "turns": len(turns)}


def table(rows: dict[str, list[Row]]) -> str:
    """One line per rate and method: both shares with their ranges, and the processor time of a step."""
    lines = ["| rate | method | share before | share after | processor before | after |", "|---|---|---|---|---|---|"]
    for before, after in zip(rows["before"], rows["after"], strict=True):
        cells = [before["rate"], f"`{before['method']}`"]
        for row in (before, after):
            lowest, highest = row["share_of_noop_lowest"], row["share_of_noop_highest"]
            cells.append(f"{row['share_of_noop']:.3f} ({lowest:.3f} to {highest:.3f})")
        for row in (before, after):
            cells.append(f"{row['processor_ms']:.1f} ms" if "processor_ms" in row else "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--hosts", default="4")
    parser.add_argument("--rate", default="100mbit,1gbit")
    parser.add_argument("--model", default="vgg16")
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--row-seconds", default="15", help="of a method in a turn, at most")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    methods = given.methods.replace(";", ",")
    arguments = ["--hosts", given.hosts, "--rate", given.rate, "--model", given.model, "--methods", methods]
    arguments += ["--no-predict", "--rounds", "1", "--row-seconds", given.row_seconds]
    trees = {"before": given.before.resolve(), "after": given.after.resolve()}
    turns: dict[str, dict[tuple[str, str], list[Row]]] = {name: defaultdict(list) for name in trees}
    for turn in range(given.turns):
        for name in sorted(trees, reverse=turn % 2 == 0):
            for row in bench(trees[name], arguments):
                turns[name][row["rate"], row["method"]].append(row)
            print(f"turn {turn + 1} of {given.turns}: {name} is measured", file=sys.stderr, flush=True)
    rows = {name: [summarized(turns[name][key]) for key in turns["before"]] for name in trees}
    print(table(rows))
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
