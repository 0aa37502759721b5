"""No bit has changed: parameters and state of every method are what they were when they were frozen.

    cd tests/contract; export PYTHONPATH=../support
    python test_frozen_bits.py                 train everything and say which cells differ from those kept
    python test_frozen_bits.py --show [TEXT]   the kept digests, of cells whose name contains TEXT
    python test_frozen_bits.py --write         keep what was found, and say which cells changed

frozen_bits.json keeps four digests of every cell: "parameters" after each step (so the first step that differs
shows), "state" (what all ranks keep at the end), "end" (parameters, the optimizer's state and what was not sent,
behind detach) and "bytes" (frame_bytes and bytes_sent, all ranks together). Digests that begin with ~ are of ranks
that differ. Which cells there are stands in frozen_bits_matrix.py.

A change that is not meant to change numbers leaves this file alone. Where one is meant to, ``--write`` prints the cells
that changed; look at them, and commit the file together with the change and the reason. Never write it to get green.

The file says with which kernels and which torch it was recorded; where these differ the tests are skipped. The native
kernels gave the same bits with AVX-512, AVX2 and portable loops, and torch with its AVX-512 and AVX2 loops. The
reference kernels (THINWIRE_KERNELS=reference) gave the same but for TernGrad and BlockSign, whose means they add up in
another order; torch without AVX2 rounds otherwise in its optimizers.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from itertools import zip_longest
from pathlib import Path
from typing import Any

import frozen_bits_rank
import pytest
from frozen_bits_matrix import SAVED, SCENES, Cell, cells
from frozen_bits_rank import Digests, short

import thinwire

KEPT = Path(__file__).with_name("frozen_bits.json")
TIMEOUT_S = 280.0


def train_processes(cluster: Any, size: int, chosen: list[Cell]) -> dict[str, Digests]:
    """The digests of these cells, which have so many ranks."""
    with tempfile.TemporaryDirectory(prefix="frozen-") as folder:
        for loads, (savers, _) in SAVED.items():
            loading = [cell for cell in chosen if SCENES[cell.scene].loads == loads]
            one_each = list({(cell.method, cell.optimizer): cell for cell in loading}.values())
            if one_each:
                cluster.run(frozen_bits_rank.save, savers, one_each, folder, timeout_s=TIMEOUT_S)
        ranks = cluster.run(frozen_bits_rank.in_processes, size, chosen, folder, timeout_s=TIMEOUT_S)
    return {cell.key: together(list(found)) for cell, found in zip(chosen, zip(*ranks, strict=True), strict=True)}


def train_threads(cluster: Any, chosen: list[Cell]) -> dict[str, Digests]:
    shares = cluster.run(frozen_bits_rank.in_threads, cluster.size, chosen, timeout_s=TIMEOUT_S)
    found = {key: ranks for share in shares for key, ranks in share.items()}
    return {cell.key: together(found[cell.key]) for cell in chosen}


def together(ranks: list[Digests]) -> Digests:
    """The digests of a cell out of those of its ranks."""
    steps = zip_longest(*(one["parameters"].split() for one in ranks))  # a rank can run out of inputs
    counted = [[int(count) for count in one["bytes"].split()] for one in ranks]
    return {
        "parameters": " ".join(_one_of([one for one in digests if one]) for digests in steps),
        "state": short([one["state"].encode() for one in ranks], 12),
        "end": _one_of([one["end"] for one in ranks]),
        "bytes": " ".join(str(sum(column)) for column in zip(*counted, strict=True)),
    }


def _one_of(digests: list[str]) -> str:
    """What all ranks have, or ~ and a digest of what they have."""
    if len(set(digests)) == 1:
        return digests[0]
    return "~" + short([digest.encode() for digest in digests], len(digests[0]) - 1)


def differences(found: dict[str, Digests], kept: dict[str, Digests]) -> list[str]:
    """A line for every cell that is not what it was."""
    lines = []
    for key, digests in found.items():
        if key not in kept:
            lines.append(f"{key}: new")
        elif digests != kept[key]:
            lines.append(f"{key}: {', '.join(_what(digests, kept[key]))}")
    return lines


def _what(found: Digests, kept: Digests) -> list[str]:
    what = [name for name in ("state", "end") if found[name] != kept[name]]
    if found["bytes"] != kept["bytes"]:
        what.append(f"bytes {found['bytes']} instead of {kept['bytes']}")
    steps = zip(found["parameters"].split(), kept["parameters"].split(), strict=False)
    first = next((step for step, (one, other) in enumerate(steps) if one != other), None)
    if found["parameters"] != kept["parameters"]:
        what.insert(0, "another number of steps" if first is None else f"parameters from step {first} on")
    return what


def essence(recorded: dict[str, str]) -> dict[str, str]:
    """What must be the same for the bits to be the same: not how wide the loops of the native kernels are."""
    wide = {**recorded, "torch's loops": recorded["torch's loops"].replace("AVX512", "AVX2")}
    return {**wide, "kernels": recorded["kernels"].partition(" ")[0]}


def in_one_process(cluster: Any) -> dict[str, str]:
    return cluster.run(frozen_bits_rank.recorded_with, 1)[0]


# --- the tests ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kept(cluster: Any) -> dict[str, Digests]:
    """The digests that were kept, where they hold for this machine."""
    everything = json.loads(KEPT.read_text())
    here = in_one_process(cluster)
    if essence(here) != essence(everything["recorded with"]):
        pytest.skip(f"the bits were frozen with {everything['recorded with']}, here is {here}")
    return everything["cells"]


def check(found: dict[str, Digests], kept: dict[str, Digests]) -> None:
    lines = differences(found, kept)
    some = "\n".join([*lines[:40], f"and {len(lines) - 40} more"] if len(lines) > 40 else lines)
    assert not lines, f"{len(lines)} of {len(found)} cells are not what they were:\n{some}"


@pytest.mark.parametrize("size", range(1, 6))
def test_processes_train_to_the_same_bits(cluster: Any, kept: dict[str, Digests], size: int) -> None:
    chosen = [cell for cell in cells() if cell.size == size and cell.way != "threads" and not cell.scene]
    check(train_processes(cluster, size, chosen), kept)


@pytest.mark.parametrize("size", range(1, 6))
def test_whatever_happens_on_the_way_ends_in_the_same_bits(cluster: Any, kept: dict[str, Digests], size: int) -> None:
    chosen = [cell for cell in cells() if cell.size == size and cell.way != "threads" and cell.scene]
    check(train_processes(cluster, size, chosen), kept)


def test_threads_train_to_the_same_bits(cluster: Any, kept: dict[str, Digests]) -> None:
    check(train_threads(cluster, [c for c in cells() if c.way == "threads"]), kept)


def test_every_method_and_every_cell_is_frozen() -> None:
    keys = [cell.key for cell in cells()]
    assert len(set(keys)) == len(keys), "two cells have one name"
    # A perlayer's bits are its methods' (tests/methods/test_perlayer.py), and those of rounds an inner method's.
    own = {name for name, kind in thinwire.METHODS.items() if kind().outer_rule is None} - {"perlayer"}
    assert {cell.method.partition(":")[0] for cell in cells()} == own
    frozen = json.loads(KEPT.read_text())
    assert set(keys) == set(frozen["cells"]), "write the digests of the new cells, and take out those that are gone"


def test_a_changed_bit_shows() -> None:
    one = {"parameters": "aa bb", "state": "1", "end": "2", "bytes": "3 4"}
    assert differences({"x": one}, {"x": one}) == []
    assert differences({"x": {**one, "parameters": "aa cc"}}, {"x": one}) == ["x: parameters from step 1 on"]
    other = {**one, "state": "5", "bytes": "3 5"}
    assert differences({"x": other}, {"x": one}) == ["x: state, bytes 3 5 instead of 3 4"]
    assert differences({"y": one}, {"x": one}) == ["y: new"]


# --- the command --------------------------------------------------------------------------------------------------


def record(cluster: Any, chosen: list[Cell]) -> dict[str, Digests]:
    """The digests of all these cells, in their order."""
    threads = [cell for cell in chosen if cell.way == "threads"]
    found = train_threads(cluster, threads) if threads else {}
    for size in range(1, 6):
        of_size = [cell for cell in chosen if cell.size == size and cell.way != "threads"]
        if of_size:
            found.update(train_processes(cluster, size, of_size))
    return {cell.key: found[cell.key] for cell in chosen}


def write(found: dict[str, Digests], here: dict[str, str]) -> None:
    """One line a cell, so that a difference of two versions names the cells."""
    rows = ",\n".join(f"  {json.dumps(key)}: {json.dumps(digests)}" for key, digests in found.items())
    KEPT.write_text(f'{{\n "recorded with": {json.dumps(here)},\n "cells": {{\n{rows}\n }}\n}}\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="keep what was found")
    parser.add_argument("--show", nargs="?", const="", metavar="TEXT", help="print what is kept, and train nothing")
    options = parser.parse_args()
    frozen = json.loads(KEPT.read_text()) if KEPT.exists() else {"recorded with": None, "cells": {}}
    if options.show is not None:
        print(f"recorded with {frozen['recorded with']}")
        for key, digests in frozen["cells"].items():
            if options.show in key:
                print(key, *(f"  {name} {text}" for name, text in digests.items()), sep="\n")
        return
    from cluster import Cluster

    cluster = Cluster()
    try:
        here, found = in_one_process(cluster), record(cluster, list(cells()))
    finally:
        cluster.stop()
    if here != frozen["recorded with"]:
        print(f"the kept digests were recorded with {frozen['recorded with']}, here is {here}")
    lines = differences(found, frozen["cells"])
    lines += [f"{key}: gone" for key in frozen["cells"] if key not in found]
    print("\n".join([*lines, f"{len(lines)} differences, {len(found)} cells"]))
    if options.write:
        write(found, here)
    elif lines:
        sys.exit(1)


if __name__ == "__main__":
    main()
