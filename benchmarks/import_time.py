"""How long `import thinwire` takes beside `import torch`: fresh processes that take turns.

python benchmarks/import_time.py [--turns 20]
"""

from __future__ import annotations

import argparse
import platform
import statistics
import subprocess
import sys

from comparing import markdown

AFTER_TORCH = {
    "import thinwire": "import thinwire",
    "the first use of thinwire.attach": "import thinwire; thinwire.attach",
    "the first use of thinwire.Reducer": "import thinwire; thinwire.Reducer",
}
TIMED = "import time, torch; start = time.perf_counter(); {}; print(time.perf_counter() - start)"
TORCH = "import time; start = time.perf_counter(); import torch; print(time.perf_counter() - start)"


def seconds(program: str) -> float:
    return float(subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=20)
    turns = parser.parse_args().turns
    programs = {"import torch": TORCH, **{what: TIMED.format(code) for what, code in AFTER_TORCH.items()}}
    taken: dict[str, list[float]] = {what: [] for what in programs}
    for _ in range(turns):
        for what, program in programs.items():
            taken[what].append(1000 * seconds(program))
    table = [["in a fresh process, all but the first behind `import torch`", "median", "fastest"]]
    table += [[what, f"{statistics.median(ms):.0f} ms", f"{min(ms):.0f} ms"] for what, ms in taken.items()]
    print(markdown(table) + f"\n({turns} processes each in turns, Python {platform.python_version()})")


if __name__ == "__main__":
    main()
