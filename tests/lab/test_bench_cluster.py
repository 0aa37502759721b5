"""`thinwire bench cluster`: a free step beside every step, shares without a slow drift, and rows on real hosts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from thinwire.cli import run
from thinwire.lab import emulation
from thinwire.lab.bench.cluster import ALWAYS, accuracy, at_once, check_method, merged
from thinwire.lab.bench.cluster_worker import BenchJob, split_merging, steps_per_turn
from thinwire.lab.bench.models import MODELS
from thinwire.lab.bench.peers import PEERS
from thinwire.lab.bench.turns import FREE, order_of, shares_of


def test_bench_turns_have_a_free_step_before_and_after_each() -> None:
    order = order_of([4, 2, 1])
    assert order[::2] == [FREE] * (len(order) // 2 + 1) and FREE not in order[1::2]
    assert [order.count(lane) for lane in (1, 2, 3)] == [4, 2, 1]
    others = order[1::2]
    assert max(i for i, lane in enumerate(others) if lane == 2) > len(others) // 2  # not all of them at the beginning
    assert {(a, b) for a, b in zip(order_of([6] * 3)[1::2], order_of([6] * 3)[3::2], strict=False)} > {(1, 2), (3, 1)}
    assert order_of([]) == [FREE]


def test_bench_shares_do_not_see_a_drift() -> None:
    """A machine that becomes three times slower on the way; lane 1 takes 1.25 of a free step, lane 2 twice it."""
    order, cost = order_of([8, 8]), {FREE: 1.0, 1: 1.25, 2: 2.0}
    seconds = [cost[lane] * (1 + 2 * context / len(order)) for context, lane in enumerate(order)]
    shares = shares_of(order, seconds)
    assert shares[1] == pytest.approx([0.8] * 8) and shares[2] == pytest.approx([0.5] * 8)
    assert shares[FREE][1:-1] == pytest.approx([1.0] * 15)
    assert len(shares[FREE]) == 17 and shares_of([FREE], [1.0]) == {FREE: []}


def test_bench_measures_methods_that_do_not_fit_at_once_in_batches() -> None:
    job = BenchJob("tiny", ("noop", "a", "b", "c"), 4, 1.0, False, at_once=2)
    assert job.batches() == [("noop", "a", "b"), ("noop", "c")]
    assert BenchJob("tiny", ("noop",), 4, 1.0, False).batches() == [("noop",)]
    assert at_once("tiny", 2) > at_once("resnet50", 64) >= 1


def test_bench_reads_how_buckets_are_merged_behind_the_method() -> None:
    assert split_merging("dgc:values=fp32@none") == ("dgc:values=fp32", "none") and split_merging("dgc")[1] == "auto"
    check_method("dgc:values=fp32@all")
    for wrong in ("dgc@all", "dense@none", "terngrad@both"):
        with pytest.raises(ValueError, match="@"):
            check_method(wrong)


def test_bench_rounds_of_a_method_become_one_row() -> None:
    def part(seconds: list[float], predicted: float | None, kb: float) -> dict[str, Any]:
        breakdown = {"wait": kb, "compress": None}
        return {"method": "dgc", "seconds": seconds, "shares": [kb], "bytes_per_step": kb, "processor_ms": kb,
                "ratio": kb, "breakdown_ms": breakdown, "predicted_ms": predicted}  # fmt: skip

    row = merged([part([1.0, 2.0, 3.0], 10.0, 4.0), part([5.0], 14.0, 8.0)])
    assert row["seconds"] == [1.0, 2.0, 3.0, 5.0] and row["predicted_ms"] == 12.0 and row["shares"] == [4.0, 8.0]
    assert row["bytes_per_step"] == row["processor_ms"] == row["breakdown_ms"]["wait"] == 5.0
    assert row["breakdown_ms"]["compress"] is None and row["counted_bytes_per_step"] is None and row["ratio"] == 8.0
    assert merged([part([1.0], None, 1.0)])["predicted_ms"] is None


def test_bench_says_what_following_the_advice_costs() -> None:
    def row(method: str, predicted: float, measured: float) -> dict[str, Any]:
        return {"method": method, "predicted_ms": predicted, "step_ms_p50": measured}

    rows = [row("noop", 90, 80), row("dense", 200, 180), row("gtopk", 100, 100), row("dgc", 104, 102)]
    said = accuracy(rows)
    assert "advised dgc, measured best gtopk, 2 % faster" in said and "at worst 11 % (dense)" in said
    assert accuracy([row("noop", 90, 80)]) == "no predictions"


why_not = emulation.why_not()
why_not_delayed = why_not or emulation.why_no_latency()


@pytest.mark.skipif(why_not is not None, reason=f"no emulated hosts here: {why_not}")
def test_bench_cluster_on_two_hosts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "rows.json"
    words = (
        "bench cluster --hosts 2 --rate 1gbit --model tiny --methods dgc,terngrad@all,torch-topk --steps 4 "
        "--row-seconds 1 --json"
    )
    assert run([*words.split(), str(target)]) == 0
    rows = json.loads(target.read_text())
    assert [row["method"] for row in rows] == [*ALWAYS, "dgc", "terngrad@all", "torch-topk"]
    for row in rows:
        assert (
            row["rounds"] == 2
            and row["kind"] == "cluster"
            and row["hosts"] == 2
            and row["rate"] == "1gbit"
            and row["steps"] == (4 if row["method"] != "noop" else 4 * 6 + 2)  # around every other step
        )
        assert 0 < row["share_of_noop_p20"] <= row["share_of_noop"] <= row["share_of_noop_p80"]
        assert 0 < row["step_ms_p20"] <= row["step_ms_p50"] <= row["step_ms_p80"] and row["samples_per_s"] > 0
        assert set(row["breakdown_ms"]) == {"forward_backward", "compress", "communicate", "wait"}
        assert (row["predicted_ms"] is None) == (row["method"] in PEERS)
    by = {row["method"]: row for row in rows}
    assert by["dense"]["bytes_per_step"] > 4 * 25_994 > by["dgc"]["bytes_per_step"]
    assert "predictions are" in capsys.readouterr().out


@pytest.mark.skipif(
    (why_not or emulation.why_no_latency()) is not None,
    reason=f"no delayed hosts: {why_not or emulation.why_no_latency()}",
)
def test_bench_cluster_takes_whole_rounds_of_local_steps_on_long_links(tmp_path: Path) -> None:
    target = tmp_path / "rows.json"
    words = (
        "bench cluster --hosts 2 --rate 1gbit --latency 5ms --model tiny --methods local:every=3 --steps 4 --rounds 1 "
        "--no-predict --json"
    )
    assert run([*words.split(), str(target)]) == 0
    by = {row["method"]: row for row in json.loads(target.read_text())}
    local, dense = by["local:every=3"], by["dense"]
    assert (local["every"], local["steps"], dense["every"], dense["steps"]) == (3, 12, 1, 4)
    assert local["latency_ms"] == 5 and local["ping_ms"] >= 10
    assert 0 < 2 * local["bytes_per_step"] < dense["bytes_per_step"]  # a third of the steps exchange anything
    assert 3 * local["step_ms_p50"] > 10  # a round has waited for a round trip at least


def test_bench_turn_is_a_step_or_a_round() -> None:
    assert [steps_per_turn(method) for method in ("dense", "powersgd-4", "dgc@all", "sparseloco")] == [1, 1, 1, 15]
    assert steps_per_turn("local:every=7,method=(dropping:density=0.06)") == 7


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--hosts two", "is not a list of numbers"),
        ("--hosts 1", "between 2 and 64"),
        ("--rate fast", "--rate:"),
        ("--latency soon", "--latency: the time 'soon' is not understood"),
        ("--model vgg61", "did you mean 'vgg16'"),
        ("--methods dgcc", "did you mean 'dgc'"),
        ("--methods terngrad@some", "one of auto, none, all"),
        ("--methods gtopk@all", "leave @all out"),
        ("--methods ddp@none", "leave @none out"),
        ("--json /nowhere/a.json", "does not exist"),
    ],
)
def test_bench_cluster_answers_mistakes_with_a_sentence(
    words: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "cluster", *words.split()]) == 2
    said = capsys.readouterr().err
    assert sentence in said and "Traceback" not in said


@pytest.mark.parametrize(("name", "params"), [("vgg16", 14_724_042), ("lstm", 14_452_496), ("resnet50", 25_557_032)])
def test_bench_models_have_the_papers_sizes(name: str, params: int) -> None:
    with torch.device("meta"):
        assert sum(p.numel() for p in MODELS[name].make().parameters()) == params
