"""Step times on long thin links: every step and local steps, as shares of the free network's speed.

    python benchmarks/links.py --rate 100mbit --latency 50ms [--model vgg16] [--methods ...] [--steps 4] --json FILE

Four emulated hosts (`thinwire cluster`), each method with its neighbours of `noop` as in `thinwire bench cluster`, but
without predictions and with these methods alone; rows are added to those in FILE. The latency is one way: a ping takes
twice it, and the row says what it took.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from thinwire.cli._job import split_specs
from thinwire.lab import emulation
from thinwire.lab.bench.cluster import check_method, measure_cluster
from thinwire.lab.bench.cluster_worker import BenchJob

OURS = "local:every=15,method=(dropping:density=0.06,scope=chunk,values=int2)"
METHODS = f"dense,dense:dtype=bf16,powersgd-4,dgc,{OURS},sparseloco"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", required=True)
    parser.add_argument("--latency", required=True)
    parser.add_argument("--model", default="vgg16")
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--row-seconds", type=float, default=20.0)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    wanted = split_specs("noop", args.methods)[1:]
    for method in wanted:
        check_method(method)
    job = BenchJob(args.model, ("noop", *wanted), args.steps, args.row_seconds, predict=False)
    distance = emulation.Distance(emulation.parse_ms(args.latency))
    rows, _ = measure_cluster(args.hosts, args.rate, job, lambda what: print(f"  {what}", file=sys.stderr), distance)
    before = json.loads(args.json.read_text()) if args.json.exists() else []
    args.json.write_text(json.dumps([*before, *rows], indent=1) + "\n")
    for row in rows:
        far = f"{row['rate']}, {row['latency_ms']:g} ms"
        print(f"{far}: {row['method']:<72} {row['step_ms_p50']:9,.0f} ms  share {row['share_of_noop']:.3f}")


if __name__ == "__main__":
    main()
