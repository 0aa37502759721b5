"""What it takes to reach a quality: steps, bytes, and how long a link is busy with those bytes.

    python benchmarks/bytes_to_quality.py 34 m30k-dense-s0 m30k-int8-s0 m30k-dropping-s0

Runs are those kept under benchmarks/results/claims, judged after every epoch. Bytes are what a worker sent until
then, the mean over workers. Seconds of link are those bytes at the link's rate: no latency, nothing for computing.
"""

from __future__ import annotations

import argparse

from time_to_accuracy import BITS_PER_S, curve, reached


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("quality", type=float, help="in the metric of the runs")
    parser.add_argument("runs", nargs="+", help="names of kept runs")
    parser.add_argument("--lower", action="store_true", help="a lower metric is better")
    options = parser.parse_args()
    print(f"| to {options.quality:g} | steps | GB sent | {' | '.join(f'{rate}, minutes' for rate in BITS_PER_S)} |")
    print("|---|---|---|" + "---|" * len(BITS_PER_S))
    for name in options.runs:
        columns = curve(name)
        place = reached(columns, options.quality, options.lower)
        if place is None:
            print(f"| `{name}` | not reached |" + " - |" * (1 + len(BITS_PER_S)))
            continue
        sent = columns["bytes_sent"][place]
        minutes = " | ".join(f"{8 * sent / rate / 60:.1f}" for rate in BITS_PER_S.values())
        print(f"| `{name}` | {int(columns['step'][place]):,} | {sent / 1e9:.2f} | {minutes} |")


if __name__ == "__main__":
    main()
