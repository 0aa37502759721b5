"""How long VGG-16 takes to an accuracy on thin links: curves of the claims times step times of the emulated cluster.

    python benchmarks/time_to_accuracy.py [--accuracy 89] [--seed 0] [--slow-rise]

The curves are those of benchmarks/results/claims (accuracy by step, 128 images per worker), the step times those of
benchmarks/results/cluster.json (4 hosts, 16 images per host): nothing was trained on the links for this table. What a
warm-up sends beyond the bytes of a later step is added as time on the link. bf16 and PowerSGD are given both their own
curves, where there are, and dense's, as if they lost nothing.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import thinwire

RESULTS = Path(__file__).parent / "results"
BITS_PER_S = {"1gbit": 1e9, "100mbit": 1e8}
# (row, curve without its seed, is the curve its own)
METHODS = (
    ("dense", "vgg-dense", True),
    ("dense:dtype=bf16", "vgg-dense", False),
    ("dense:dtype=bf16", "vgg-bf16", True),
    ("powersgd-1", "vgg-dense", False),
    ("powersgd-1", "vgg-powersgd", True),
    ("powersgd-4", "vgg-dense", False),
    ("powersgd-4", "vgg-powersgd-4", True),
    ("dgc", "vgg-0.02", True),
    ("dgc:density=0.006", "vgg-balanced", True),
    ("gtopk", "vgg-gtopk-0.03", True),
    (thinwire.DGC.paper, "vgg-dgc", True),
    (thinwire.GTopK.paper, "vgg-gtopk", True),
)
# The same with a learning rate that rises for four epochs and not for 83 steps.
SLOW_RISE = {
    "vgg-dense": "vgg-warm-dense",
    "vgg-0.02": "vgg-warm-0.02",
    "vgg-balanced": "vgg-warm",
}


def curve(name: str) -> dict[str, list[float]]:
    """The epoch lines of a kept run, by column."""
    (metrics,) = json.loads((RESULTS / "claims" / f"{name}.json").read_text())["metrics"].values()
    found: dict[str, list[float]] = metrics["epoch"]
    return found


def reached(columns: dict[str, list[float]], quality: float, lower: bool = False) -> int | None:
    """The first epoch line (from 0) whose metric is at least, or at most, the quality."""
    good = [metric <= quality if lower else metric >= quality for metric in columns["metric"]]
    return good.index(True) if any(good) else None


def seconds_at(place: int, columns: dict[str, list[float]], row: dict[str, Any], warms_up: bool) -> float:
    """Seconds until an epoch line (from 0), on the link of a row of the cluster."""
    steps, sent = columns["step"], columns["bytes_sent"]
    extra_nbytes = 0.0
    if warms_up and place > 0:
        last = (sent[-1] - sent[-2]) / (steps[-1] - steps[-2])  # a step's bytes behind the warm-up
        extra_nbytes = max(0.0, sent[place] - last * steps[place])
    return steps[place] * row["step_ms_p50"] / 1000 + 8 * extra_nbytes / BITS_PER_S[row["rate"]]


def seconds_to(accuracy: float, name: str, row: dict[str, Any], warms_up: bool) -> tuple[int, float] | None:
    """Steps and seconds until a curve first reaches an accuracy, on the link of a row of the cluster."""
    columns = curve(name)
    place = reached(columns, accuracy)
    return None if place is None else (int(columns["step"][place]), seconds_at(place, columns, row, warms_up))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accuracy", type=float, default=89.0, help="in percent")
    parser.add_argument("--seed", type=int, default=0, help="of the curves; methods without a curve are left out")
    parser.add_argument("--slow-rise", action="store_true", help="curves of a learning rate that rises for four epochs")
    parser.add_argument("--cluster", type=Path, default=RESULTS / "cluster.json")
    options = parser.parse_args()
    rows = [row for row in json.loads(options.cluster.read_text()) if row["hosts"] == 4]
    print(f"| to {options.accuracy:g} % | steps | {' | '.join(f'{rate}, minutes' for rate in BITS_PER_S)} |")
    print("|---|---|" + "---|" * len(BITS_PER_S))
    for method, runs, own in METHODS:
        name = f"{SLOW_RISE.get(runs, 'none') if options.slow_rise else runs}-s{options.seed}"
        if not (RESULTS / "claims" / f"{name}.json").exists() or method not in {row["method"] for row in rows}:
            continue
        cells, steps = [], "-"
        for rate in BITS_PER_S:
            row = next(row for row in rows if row["method"] == method and row["rate"] == rate)
            found = seconds_to(options.accuracy, name, row, own and method != "dense")
            cells.append("not reached" if found is None else f"{found[1] / 60:.1f}")
            steps = f"{found[0]:,}" if found is not None else steps
        print(f"| `{method}`{'' if own else ' (with the curve of dense)'} | {steps} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
