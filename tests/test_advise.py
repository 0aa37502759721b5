"""The adviser: real measurements on two processes, predictions from numbers alone, and bad input as one sentence."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster import Cluster
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from thinwire.advisor import auto
from thinwire.advisor.advice import LOCAL, WITHOUT_SGD, advise_from, advise_offline, as_fast
from thinwire.advisor.cost import ExchangeCost, Prediction, Workload, predict
from thinwire.advisor.link import Link
from thinwire.advisor.profile import Profile
from thinwire.cli import run
from thinwire.lab import emulation
from thinwire.lab.bench.cluster import ALWAYS, accuracy, merged
from thinwire.lab.bench.peers import PEERS

SPECS = ("dense", "dense:dtype=bf16", "terngrad", "blocksign", "dgc", "gtopk")


def advice(rate_bits: float, hosts: int = 8, compute_s: float = 0.3, codec_s: float = 0.02) -> thinwire.Advice:
    methods = [thinwire.parse_method(spec) for spec in SPECS]
    codecs = {str(method): ExchangeCost(0.0 if method.name == "dense" else codec_s, 1e-4) for method in methods}
    work = Workload.of_size(25_600_000, compute_s)
    return advise_from(Profile(hosts, work, Link(1e-4, 8 / rate_bits), 1.0, codecs), methods)


def test_a_fat_wire_says_do_not_compress() -> None:
    found = advice(400e9)
    assert found.recommended == "dense" and not found.compress
    assert "do not compress" in str(found) and "under 10 %" in found.reason


def test_a_thin_wire_recommends_a_method_with_its_reason() -> None:
    """DGC on few hosts; on twice as many each gets twice as much, and signs are fewer bytes."""
    assert advice(100e6, hosts=8).recommended == "blocksign"
    found = advice(100e6, hosts=4)
    assert found.recommended == "dgc" and found.compress
    assert f"recommended: {found.recommended}" in str(found) and "instead of" in found.reason
    assert found.step_s(found.recommended) < found.step_s("dense") / 5
    with pytest.raises(ValueError, match="no prediction of 'signsgd'"):
        found.step_s("signsgd")


def test_predictions_go_to_1024_hosts_and_say_where_the_choice_changes() -> None:
    found = advice(100e6, hosts=4)
    assert found.host_counts == [4, 8, 16, 32, 64, 128, 256, 512, 1024]
    assert len(found.predictions) == 9 * len(SPECS)
    assert found.step_s("dgc", 1024) > found.step_s("gtopk", 1024)  # linear against logarithmic traffic
    (note,) = [note for note in found.notes if "hosts on:" in note]
    match = re.fullmatch(r"from (\d+) hosts on: (\w+)\.", note)
    assert match is not None and found.recommended == "dgc"
    count, other = int(match[1]), match[2]
    assert all(found.step_s(other, n) < found.step_s("dgc", n) for n in found.host_counts if n >= count)
    assert all(found.step_s(other, n) > found.step_s("dgc", n) for n in found.host_counts if n < count)


def test_methods_that_cannot_be_told_apart_give_the_one_that_keeps_more_accuracy() -> None:
    assert as_fast([1.04, 1.0, 0.999]) == 0 and as_fast([1.06, 1.0]) == 1 and as_fast([2.0]) == 0
    methods = [thinwire.parse_method(spec) for spec in ("dense", "dgc", "blocksign")]
    costs = {str(method): ExchangeCost(0.01) for method in methods}

    class Foretold(Profile):
        def predict(self, method: thinwire.Method, hosts: int | None = None) -> Prediction:
            return replace(super().predict(method, hosts), step_s=steps[str(method)])

    profile = Foretold(4, Workload.of_size(1_000_000, 0.1), Link(1e-4, 8e-8), 1.0, costs)
    for dgc_s, recommended in ((0.103, "dgc"), (0.107, "blocksign")):
        steps = {"dense": 1.0, "dgc": dgc_s, "blocksign": 0.1}
        found = advise_from(profile, methods)
        assert found.recommended == recommended
        assert ("blocksign is less than 5 % faster" in found.reason) == (recommended == "dgc")


@pytest.mark.parametrize(("drift", "word"), [(0.2, "20 % longer"), (-0.15, "15 % less")])
def test_unsteady_machines_are_told(drift: float, word: str) -> None:
    methods = [thinwire.parse_method(spec) for spec in ("dense", "dgc")]
    costs = {str(method): ExchangeCost(0.01) for method in methods}
    steady = Profile(4, Workload.of_size(1_000_000, 0.1), Link(1e-4, 8e-8), 1.0, costs, 0.05)
    assert not any("unsteady" in note for note in advise_from(steady, methods).notes)
    notes = advise_from(replace(steady, drift=drift), methods).notes
    assert any(note.startswith("unsteady machines") and word in note for note in notes)


def test_slow_encoding_is_told_and_not_recommended() -> None:
    found = advice(10e9, codec_s=5.0)
    assert found.recommended == "dense"
    assert any(note.startswith("slower than dense here") and "dgc" in note for note in found.notes)


def test_other_optimizers_are_advised_what_works_with_them() -> None:
    work = Workload.of_size(400_000, 0.02)
    found = advise_offline(work, hosts=2, rate_bits=1e6, optimizer_is_sgd=False)
    assert {one.method for one in found.predictions} == {*WITHOUT_SGD}
    assert "dgc (it needs torch.optim.SGD)" in str(found) and "blocksign and gtopk (how accurate" in str(found)
    assert {"dgc", "blocksign", "gtopk"}.isdisjoint(WITHOUT_SGD)
    only = advise_offline(work, hosts=2, rate_bits=1e6, methods=[LOCAL], optimizer_is_sgd=False)
    assert only.recommended == LOCAL and "wire.averaged()" in only.caution and "warmup=STEPS" in only.caution
    assert {one.method for one in advise_offline(work, hosts=2, rate_bits=1e6).predictions} == set(SPECS)


def test_averaging_the_parameters_now_and_then_is_part_of_a_step() -> None:
    work, link = Workload.of_size(1_000_000, 0.02), Link(0.0, 8e-8)

    def step(spec: str) -> Prediction:
        return predict(thinwire.parse_method(spec), work, link, ExchangeCost(0.0), 4)

    alone, averaged = step("dropping"), step("dropping:local=partial,sync_every=100")
    more = 1.5 * 4e6 / 100  # an all-reduce of 4 MB between 4 ranks, every 100 steps
    assert averaged.nbytes - alone.nbytes == pytest.approx(more)
    assert averaged.step_s - alone.step_s == pytest.approx(more * 8e-8)


# --- the command line without a group --------------------------------------------------------------


def test_offline_advice_prints_a_table_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "advice.json"
    words = ["advise", "--params", "0.4M", "--compute-ms", "20", "--hosts", "64", "--rate", "10mbit"]
    assert run([*words, "--methods", "dgc,gtopk", "--json", str(target)]) == 0
    shown = capsys.readouterr().out
    assert "predicted ms a step" in shown and "1024" in shown and "recommended: " in shown
    written = json.loads(target.read_text())
    assert written["kind"] == "advice" and written["params"] == 400_000
    assert written["recommended"] in ("dgc", "gtopk")
    assert written["compute_ms"] == pytest.approx(20) and written["alpha_s"] == pytest.approx(2e-4)
    assert {"hardware", "commit", "date", "reason", "beta_s_per_byte"} <= set(written)
    assert {"method", "hosts", "step_ms", "bytes_per_step"} == set(written["predictions"][0])
    assert {row["hosts"] for row in written["predictions"]} == {64, 128, 256, 512, 1024}
    assert not list(tmp_path.glob(".*partial"))


def test_offline_advice_takes_the_optimizer(capsys: pytest.CaptureFixture[str]) -> None:
    words = "advise --params 0.4M --compute-ms 20 --hosts 2 --rate 10mbit --optimizer adamw"
    assert run(words.split()) == 0
    shown = capsys.readouterr().out
    assert LOCAL in shown and "\ndgc " not in shown


def test_offline_advice_measures_a_recipe_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["advise", "--recipe", "digits", "--hosts", "2", "--rate", "100gbit", "--methods", "gtopk"]) == 0
    assert "do not compress" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--hosts 4 --rate 1gbit", "--params and --compute-ms are missing"),
        ("--params 1M --compute-ms 5 --rate 1gbit", "--hosts is missing"),
        ("--params many --compute-ms 5 --hosts 4 --rate 1gbit", "is not a number of parameters such as 25.6M"),
        ("--params 1M --compute-ms 0 --hosts 4 --rate 1gbit", "a step takes longer"),
        ("--params 1M --compute-ms 5 --hosts 1 --rate 1gbit", "at least 2 hosts"),
        ("--params 1M --compute-ms 5 --hosts 4 --rate fast", "--rate:"),
        ("--params 1M --compute-ms 5 --hosts 4 --rate 1gbit --latency-ms -1", "is not possible"),
        ("--params 1M --compute-ms 5 --hosts 4 --rate 1gbit --methods dgcc", "did you mean 'dgc'"),
        ("--params 1M --compute-ms 5 --hosts 4 --rate 1gbit --optimizer adan", "did you mean 'adam'"),
        ("--model vgg61 --hosts 4 --rate 1gbit", "did you mean 'vgg16'"),
        ("--recipe digit --hosts 4 --rate 1gbit", "did you mean 'digits'"),
        ("--model vgg16 --recipe digits --hosts 4 --rate 1gbit", "exclude each other"),
        ("--params 1M --compute-ms 5 --hosts 4 --rate 1gbit --json /nowhere/a.json", "does not exist"),
    ],
)
def test_bad_input_is_answered_with_one_sentence(
    words: str, sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert run(["advise", *words.split()]) == 2
    said = capsys.readouterr().err
    assert sentence in said and said.startswith("thinwire: ") and "Traceback" not in said and said.count("\n") == 1


# --- on real ranks ---------------------------------------------------------------------------------


def small(group: Any) -> tuple[DDP, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs, labels = torch.randn(8, 64), torch.randint(0, 10, (8,))
    return model, optimizer, lambda: nn.functional.cross_entropy(model(inputs), labels).backward()


def asks(group: Any) -> dict[str, Any]:
    model, _, step = small(group)
    before = [p.detach().clone() for p in model.parameters()]
    state = torch.get_rng_state()
    found = thinwire.advise(model, step, methods=["dgc", "gtopk"], group=group)
    untouched = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    untouched &= torch.equal(state, torch.get_rng_state()) and all(p.grad is None for p in model.parameters())
    return {"advice": found.as_dict(), "text": str(found), "untouched": untouched}


def test_two_ranks_measure_and_get_the_same_advice(cluster: Cluster) -> None:
    first, second = cluster.run(asks, 2)
    assert first == second and first["untouched"]
    assert first["advice"]["params"] == 64 * 256 + 256 + 2570 and first["advice"]["compute_ms"] > 0
    assert first["advice"]["alpha_s"] > 0 and "predicted ms a step" in first["text"]
    assert {row["method"] for row in first["advice"]["predictions"]} == {"dense", "dgc", "gtopk"}


def asks_with_adam(group: Any) -> dict[str, Any]:
    model, _, step = small(group)
    return thinwire.advise(model, step, group=group, optimizer_is_sgd=False).as_dict()


def test_two_ranks_with_another_optimizer_rehearse_local_gradients(cluster: Cluster) -> None:
    first, second = cluster.run(asks_with_adam, 2)
    assert first == second and {row["method"] for row in first["predictions"]} == {*WITHOUT_SGD}


def trains_auto(group: Any, with_adam: bool = False) -> tuple[str, int, list[str]]:
    """With "auto" a link is made to look thin, so that something is chosen; the training itself is real."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("thinwire").addHandler(handler)
    measured = auto.measure_link
    auto.measure_link = lambda net: Link(measured(net).alpha_s, 8 / 1e4)  # type: ignore[attr-defined]
    try:
        model, optimizer, step = small(group)
        if with_adam:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
        wire = thinwire.attach(model, optimizer, "auto")
        assert str(wire.method) == "dense"
        for _ in range(auto.WARMUP + auto.WATCHED + 3):
            optimizer.zero_grad()
            step()
            optimizer.step()
        chosen, steps = str(wire.method), wire.stats.steps
        wire.detach()
    finally:
        auto.measure_link = measured  # type: ignore[attr-defined]
        logging.getLogger("thinwire").removeHandler(handler)
    return chosen, steps, messages


def test_auto_starts_dense_and_changes_on_all_ranks_alike(cluster: Cluster) -> None:
    (first, steps, said), (second, _, silent) = cluster.run(trains_auto, 2)
    assert first == second and first in ("dgc", "gtopk", "blocksign", "terngrad") and steps == 10
    assert len(said) == 1 and said[0].startswith(f"thinwire: auto chose {first}") and not silent
    (with_adam, _, _), (other, _, _) = cluster.run(trains_auto, 2, True)
    assert with_adam == other == "terngrad"  # bf16 is slower here, and nothing else was trained with Adam


def refuses(group: Any) -> None:
    model, optimizer, _ = small(group)
    thinwire.attach(model, optimizer, "auto", hierarchy=1)


def test_auto_refuses_what_it_does_not_know(cluster: Cluster) -> None:
    for raised in cluster.run(refuses, 2, expect_errors=True):
        assert raised.type == "ValueError" and "flat groups only" in raised.message


def test_advise_needs_a_group_and_a_function() -> None:
    with pytest.raises(ValueError, match="torchrun"):
        thinwire.advise(nn.Linear(2, 2), lambda: None)
    with pytest.raises(ValueError, match="torch module"):
        thinwire.advise("model", lambda: None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="step must be a function"):
        thinwire.advise(nn.Linear(2, 2), None)  # type: ignore[arg-type]


# --- bench cluster ---------------------------------------------------------------------------------


def test_rounds_of_a_method_become_one_row() -> None:
    def part(seconds: list[float], predicted: float | None, kb: float) -> dict[str, Any]:
        breakdown = {"wait": kb, "compress": None}
        return {"method": "dgc", "seconds": seconds, "shares": [kb], "bytes_per_step": kb, "processor_ms": kb,
                "ratio": kb, "breakdown_ms": breakdown, "predicted_ms": predicted}  # fmt: skip

    row = merged([part([1.0, 2.0, 3.0], 10.0, 4.0), part([5.0], 14.0, 8.0)])
    assert row["seconds"] == [1.0, 2.0, 3.0, 5.0] and row["predicted_ms"] == 12.0 and row["shares"] == [4.0, 8.0]
    assert row["bytes_per_step"] == row["processor_ms"] == row["breakdown_ms"]["wait"] == 5.0
    assert row["breakdown_ms"]["compress"] is None and row["counted_bytes_per_step"] is None and row["ratio"] == 8.0
    assert merged([part([1.0], None, 1.0)])["predicted_ms"] is None


def test_what_following_the_advice_costs_is_said() -> None:
    def row(method: str, predicted: float, measured: float) -> dict[str, Any]:
        return {"method": method, "predicted_ms": predicted, "step_ms_p50": measured}

    rows = [row("noop", 90, 80), row("dense", 200, 180), row("gtopk", 100, 100), row("dgc", 104, 102)]
    said = accuracy(rows)
    assert "advised dgc, measured best gtopk, 2 % faster" in said and "at worst 11 % (dense)" in said
    assert accuracy([row("noop", 90, 80)]) == "no predictions"


why_not = emulation.why_not()


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


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--hosts two", "is not a list of numbers"),
        ("--hosts 1", "between 2 and 64"),
        ("--rate fast", "--rate:"),
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
