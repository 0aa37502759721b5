"""Instructions an element of the native kernels, counted by valgrind: the same on a busy machine as on a quiet one.

    python benchmarks/native_instructions.py [--json FILE] [--check FILE]

Builds native/count.cpp with the library's sources and runs each kernel once, on one thread, under callgrind. valgrind
knows no AVX-512, so the AVX2 version of the hot loops is what is counted. ``--check`` compares with kept counts and
fails when a kernel needs more than a tenth more; a new compiler is a reason to keep new ones.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NUMEL = 400_000
FLAGS = ["-O3", "-g0", "-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-pthread"]
# What a count is divided by: every element of the vector, or every entry of a choice of one in a hundred.
KERNELS = {
    "tw_accumulate": "element",
    "tw_error_step": "element",
    "tw_blockwise_sign": "element",
    "tw_add_signs": "element",
    "tw_pack_bits": "element",
    "tw_moments": "element",
    "tw_ternarize_packed": "element",
    "tw_checksum": "element",
    "tw_select_topk": "element",
    "tw_select_chunks": "element",
    "tw_select_scopes": "entry",
    "tw_merge_topk": "entry",
    "tw_int8_quantize": "entry",
    "tw_two_bit_encode": "entry",
    "tw_two_bit_decode": "entry",
    "tw_rice_encode_of": "entry",
    "tw_rice_indices": "entry",
    "tw_scatter_add": "entry",
}
ROOM = 1.1


def why_not() -> str | None:
    """Why nothing can be counted here, or None."""
    for tool in ("valgrind", "g++"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    return None


def build(folder: Path) -> Path:
    program = folder / "count"
    skipped = {"fuzz.cpp"}
    sources = sorted(str(file) for file in (ROOT / "native").glob("*.cpp") if file.name not in skipped)
    subprocess.run(["g++", *FLAGS, *sources, "-o", str(program)], check=True)
    return program


def count(program: Path, kernel: str, numel: int) -> int:
    """Instructions between entering and leaving the kernel."""
    command = ["valgrind", "--tool=callgrind", f"--toggle-collect={kernel}", "--callgrind-out-file=/dev/null"]
    # Bound at the start: looking symbols up would be counted with whoever calls first.
    environment = {**os.environ, "LD_BIND_NOW": "1"}
    done = subprocess.run([*command, str(program), kernel, str(numel)], capture_output=True, text=True, env=environment)
    collected = re.search(r"Collected : (\d+)", done.stderr)
    if done.returncode or collected is None or collected.group(1) == "0":
        raise RuntimeError(f"{kernel} was not counted:\n{done.stderr}")
    return int(collected.group(1))


def measure(kernels: list[str], numel: int = NUMEL) -> list[dict[str, Any]]:
    compiler = subprocess.run(["g++", "--version"], capture_output=True, text=True).stdout.splitlines()[0]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder))
        for kernel in kernels:
            of = KERNELS[kernel]
            divisor = numel if of == "element" else numel // 100
            instructions = count(program, kernel, numel)
            rows.append({
                "kernel": kernel, "instructions": instructions, "per": of,
                "each": round(instructions / divisor, 2), "numel": numel, "compiler": compiler,
            })  # fmt: skip
    return rows


def grown(rows: list[dict[str, Any]], kept: list[dict[str, Any]]) -> list[str]:
    """A sentence for every kernel that needs clearly more than it did."""
    before = {row["kernel"]: row for row in kept}
    return [
        f"{row['kernel']}: {row['each']} instructions an {row['per']}, {before[row['kernel']]['each']} before"
        for row in rows
        if row["kernel"] in before and row["each"] > ROOM * before[row["kernel"]]["each"]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", type=Path, help="kept counts to compare with")
    options = parser.parse_args()
    why = why_not()
    if why:
        sys.exit(f"nothing can be counted here: {why}")
    rows = measure(list(KERNELS))
    for row in rows:
        print(f"{row['kernel']:<22}{row['each']:>9.2f} instructions an {row['per']}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if options.check:
        sentences = grown(rows, json.loads(options.check.read_text()))
        if sentences:
            sys.exit("\n".join(sentences))


if __name__ == "__main__":
    main()
