"""The papers' settings have one home, the method's class; everything that compares with them takes them from there."""

from __future__ import annotations

from dataclasses import replace

import claims
import pytest
from paths import ROOT

import thinwire
from thinwire.lab.bench import cluster

PAPER_BLOCKSIGN, PAPER_DGC = thinwire.BlockSign.paper, thinwire.DGC.paper
PAPER_GTOPK, PAPER_TERNGRAD = thinwire.GTopK.paper, thinwire.TernGrad.paper


def test_paper_settings_are_what_the_documentation_says() -> None:
    paper = thinwire.DGC(density=0.001, scope="tensor", values="fp32", factor_masking=True)
    assert thinwire.parse_method(PAPER_DGC) == paper
    assert thinwire.parse_method(PAPER_GTOPK) == thinwire.GTopK(density=0.001, momentum_correction=False)
    assert thinwire.parse_method(PAPER_TERNGRAD) == thinwire.TernGrad(dense_below=0)
    assert thinwire.parse_method(PAPER_BLOCKSIGN) == thinwire.BlockSign(dense_below=0)
    page = (ROOT / "docs" / "methods.md").read_text()
    assert all(f"`{spec}`" in page for spec in (PAPER_DGC, PAPER_GTOPK, PAPER_TERNGRAD, PAPER_BLOCKSIGN))


def test_paper_settings_are_used_by_benchmarks_and_claims() -> None:
    assert {PAPER_DGC, PAPER_GTOPK} < set(cluster.benched())
    paper = replace(thinwire.parse_method(PAPER_DGC), warmup=388)  # type: ignore[call-arg]
    assert thinwire.parse_method(claims.RUNS["r20-direct-dgc-s0"].split()[-3]) == paper
    assert claims.RUNS["vgg-gtopk-s0"].endswith(f" --method {PAPER_GTOPK},warmup=388")
    ours = replace(thinwire.parse_method(PAPER_BLOCKSIGN), topology="server")  # type: ignore[call-arg]
    assert thinwire.parse_method(claims.SIGNS) == ours
    ternary = replace(thinwire.parse_method(PAPER_TERNGRAD), topology="server")  # type: ignore[call-arg]
    assert thinwire.parse_method(claims.MNIST_TERN) == ternary
    assert thinwire.parse_method(claims.TERN) == replace(ternary, exclude=("14.*",))  # type: ignore[call-arg]


@pytest.mark.parametrize("folder", ["thinwire", "benchmarks", "docs", "examples"])
def test_paper_settings_are_written_out_nowhere_else(folder: str) -> None:
    files = [path for path in (ROOT / folder).rglob("*.py") if path.parent.name != "methods"]
    assert files
    for path in files:
        for spec in (PAPER_DGC, PAPER_GTOPK + '"', PAPER_GTOPK + ","):
            said = f"{path.relative_to(ROOT)}: take it from the method's class, thinwire.DGC.paper"
            assert spec not in path.read_text(), said
