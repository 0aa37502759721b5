"""Tables of step times on emulated links, for docs/results.md and docs/speed.md, from what `bench cluster` measured.

python benchmarks/cluster_table.py table     # every row of benchmarks/results/cluster.json, a table for hosts and rate
python benchmarks/cluster_table.py speed     # docs/speed.md's; what VGG-16 lost is in benchmarks/results/claims
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))

from comparing import RESULTS, difference, find, markdown, of_the_same_seeds

from thinwire import DGC, GradientDropping, GTopK

CLUSTER = RESULTS.parent / "cluster.json"
RATES = {"1gbit": "1 Gb/s", "100mbit": "100 Mb/s"}
DGC_SHARE, GTOPK_SHARE, DROPPING_SHARE = (f"{100 * kind().density:g} %" for kind in (DGC, GTopK, GradientDropping))
OLD_DGC_PAPER = DGC.paper.replace("scope=tensor,", "")  # as it was typed when scope was no option
LABELS = {
    "dense:dtype=bf16": "bf16 (ours)",
    "powersgd-1": "PowerSGD hook, rank 1",
    "powersgd-4": "PowerSGD hook, rank 4",
    "ddp-fp16": "fp16 hook",
    "torch-topk": "top-k in plain torch, 0.1 %",
    "dgc": f"dgc (default: {DGC_SHARE}, int8)",
    "dgc:density=0.006": "dgc, 0.6 %, int8",
    DGC.paper: "dgc, the paper's 0.1 % and fp32",
    OLD_DGC_PAPER: "dgc, the paper's 0.1 % and fp32",
    GTopK.paper: "gtopk, the paper's 0.1 %",
    "gtopk": f"gtopk (default: {GTOPK_SHARE})",
    "terngrad:dense_below=0": "terngrad, small tensors as well",
    "blocksign:dense_below=0": "blocksign, small tensors as well",
    "dropping:local=partial": f"dropping with local gradients ({DROPPING_SHARE}, int8)",
}
HEADINGS = (
    "method",
    "p20 ms",
    "p50 ms",
    "p80 ms",
    "share of the free network's speed",
    "p20 to p80 of pairs",
    "kB per host and step, kernel's counter",
    "processor ms",
    "predicted ms",
    "off",
)
SPEED_HEADINGS = ("", "1 Gb/s", "100 Mb/s", "a step at 100 Mb/s", "sent a step and host", "points lost")
SLOW_RISE = "with a slow rise "  # of the learning rate: for four epochs, as the warm-up, and not for 83 steps


@dataclass(frozen=True)
class Shown:
    """A line of docs/speed.md: how a method is named there, and the runs of VGG-16 that say what it lost."""

    method: str
    label: str
    runs: str = ""
    slowly: str = ""  # the same with a learning rate that rises slowly


SPEED_ROWS = (
    Shown("noop", "no communication"),
    Shown("dense", "dense fp32"),
    Shown("dense:dtype=bf16", '`"dense:dtype=bf16"` (added up in 32 bits)', "vgg-bf16-s*"),
    Shown("ddp-fp16", "PyTorch's fp16 hook (added up in 16 bits)"),
    Shown("powersgd-1", "PyTorch's PowerSGD hook, rank 1", "vgg-powersgd-s*"),
    Shown("powersgd-4", "rank 4", "vgg-powersgd-4-s*"),
    Shown("torch-topk", "top-k 0.1 % in plain torch"),
    Shown("dgc", f"`DGC()`: {DGC_SHARE}, int8", "vgg-0.02-s*", "vgg-warm-0.02-s*"),
    Shown("dgc:density=0.006", "`DGC(density=0.006)`", "vgg-balanced-s*", "vgg-warm-s*"),
    Shown(DGC.paper, "the DGC paper's 0.1 %, fp32", "vgg-dgc-s*"),
    Shown("gtopk", f"`GTopK()`: {GTOPK_SHARE}", "vgg-gtopk-0.03-s*"),
    Shown(GTopK.paper, "the gTop-k paper's 0.1 %", "vgg-gtopk-s*"),
    Shown("blocksign", "`BlockSign()`"),
    Shown("terngrad", "`TernGrad()`"),
    Shown("dropping:local=partial", '`GradientDropping(local="partial")`'),
)


def _cells(row: Mapping[str, Any]) -> list[str]:
    steps = [f"{row[f'step_ms_{part}']:,.0f}" for part in ("p20", "p50", "p80")]
    pairs = [row.get(f"share_of_noop_{part}") for part in ("p20", "p80")]
    spread = " to ".join(f"{share:.2f}" for share in pairs) if None not in pairs else ""
    predicted = ["", ""]
    if row["predicted_ms"] is not None:
        predicted = [
            f"{row['predicted_ms']:,.0f}",
            f"{row['predicted_ms'] / row['step_ms_p50'] - 1:+.0%}".replace("%", " %"),
        ]
    counted = f"{row['bytes_per_step'] / 1e3:,.0f}"
    label = LABELS.get(row["method"], row["method"])
    return [label, *steps, f"{row['share_of_noop']:.2f}", spread, counted, f"{row['processor_ms']:.0f}", *predicted]


def tables(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """One for every number of hosts and every rate, in the order in which these are first met."""
    groups: dict[tuple[int, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["hosts"], row["rate"]), []).append(row)
    found = []
    for (hosts, rate), measured in groups.items():
        tcp = ", ".join(dict.fromkeys(f"TCP {row.get('tcp', 'not recorded')}" for row in measured))
        commits = ", ".join(dict.fromkeys(f"commit {row['commit']}, {row['date']}" for row in measured))
        head = f"{hosts} hosts, {RATES.get(rate, rate)}, {tcp} ({commits}):\n\n"
        found.append(head + markdown([HEADINGS, *map(_cells, measured)]))
    return found


def _lost(runs: str, dense: str, results: Path) -> str:
    """Points behind dense, and of how many seeds."""
    measured = find(runs, results)
    found = difference(measured, of_the_same_seeds(measured, find(dense, results)))
    if found is None:
        raise ValueError(f"the table of docs/speed.md lacks '{runs}' or '{dense}'")
    seeds = f"{len(measured)} seed{'s' if len(measured) > 1 else ''}"
    return f"{found.lost:.2f} ({seeds})" if found.lost >= 0.005 else f"none ({seeds})"


def _all_lost(shown: Shown, results: Path) -> str:
    """With either rise of the learning rate; nothing where VGG-16 was not trained so."""
    found = [_lost(shown.runs, "vgg-dense-s*", results)] if shown.runs else []
    found += [SLOW_RISE + _lost(shown.slowly, "vgg-warm-dense-s*", results)] if shown.slowly else []
    return "; ".join(found)


def _only(rows: Sequence[Mapping[str, Any]], method: str, rate: str) -> Mapping[str, Any]:
    found = [row for row in rows if (row["method"], row["hosts"], row["rate"]) == (method, 4, rate)]
    if len(found) != 1:
        raise ValueError(
            f"the table of docs/speed.md needs one row of '{method}' on 4 hosts at {rate}, and there are {len(found)}"
        )
    return found[0]


def speed_table(rows: Sequence[Mapping[str, Any]], results: Path = RESULTS) -> str:
    """Four hosts on both links, one line per method."""
    lines: list[Sequence[str]] = [SPEED_HEADINGS]
    for shown in SPEED_ROWS:
        fast, slow = (_only(rows, shown.method, rate) for rate in RATES)
        alone = shown.method == "noop"
        shares = ["1", "1"] if alone else [f"{row['share_of_noop']:.2f}" for row in (fast, slow)]
        sent = "" if alone else f"{slow['bytes_per_step'] / 1e6:.3g} MB"
        step = f"{slow['step_ms_p50'] / 1e3:.2f} s"
        lines.append([shown.label, *shares, step, sent, _all_lost(shown, results)])
    return markdown(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("table", "speed"))
    parser.add_argument("--cluster", type=Path, default=CLUSTER)
    given = parser.parse_args(arguments)
    rows = json.loads(given.cluster.read_text())
    try:
        print(speed_table(rows) if given.what == "speed" else "\n".join(tables(rows)), end="")
    except ValueError as error:
        sys.exit(f"cluster_table: {error}")


if __name__ == "__main__":
    main()
