"""Instruction counts of native kernels: a regression shows however busy the machine is."""

from __future__ import annotations

import json

import native_instructions
import pytest
from paths import BENCHMARKS

KEPT = BENCHMARKS / "results" / "native_instructions.json"


def test_no_kernel_needs_more_instructions_than_it_did() -> None:
    why = native_instructions.why_not()
    if why:
        pytest.skip(f"nothing can be counted here: {why}")
    kept = json.loads(KEPT.read_text())
    assert {row["kernel"] for row in kept} == set(native_instructions.KERNELS)
    rows = native_instructions.measure(["tw_accumulate", "tw_ternarize_packed", "tw_rice_indices"], kept[0]["numel"])
    if rows[0]["compiler"] != kept[0]["compiler"]:
        pytest.skip(f"the counts were kept with {kept[0]['compiler']}, here is {rows[0]['compiler']}")
    assert native_instructions.grown(rows, kept) == []


def test_growth_of_instructions_is_seen() -> None:
    kept = [{"kernel": "tw_moments", "each": 2.0, "per": "element"}]
    assert native_instructions.grown([{"kernel": "tw_moments", "each": 2.1, "per": "element"}], kept) == []
    assert (
        "3.0 instructions an element, 2.0 before"
        in native_instructions.grown([{"kernel": "tw_moments", "each": 3.0, "per": "element"}], kept)[0]
    )
