"""`thinwire advise` without a group, mistakes included."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from thinwire.cli import run

LOCAL = "dropping:local=partial"


def test_advise_prints_a_table_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "advice.json"
    words = ["advise", "--params", "0.4M", "--compute-ms", "20", "--hosts", "64", "--rate", "10mbit"]
    assert run([*words, "--methods", "dgc,gtopk", "--json", str(target)]) == 0
    shown = capsys.readouterr().out
    recommended, paste, _, head, _, *table = shown.splitlines()
    assert recommended.startswith("recommended: ") and "ms per step instead of" in recommended
    assert paste == f'    wire = thinwire.attach(model, optimizer, "{json.loads(target.read_text())["recommended"]}")'
    assert head.startswith("0.4 M parameters, 20 ms per step") and table[0].startswith("on 64 hosts ")
    assert [line.split()[0] for line in table[1:4]] == ["dense", "dgc", "gtopk"] and table[4] == ""
    assert all(re.search(r"  \d[\d.]*x (faster|slower)  ", line) for line in table[2:4]) and "1024" not in shown
    written = json.loads(target.read_text())
    assert written["kind"] == "advice" and written["params"] == 400_000
    assert written["recommended"] in ("dgc", "gtopk")
    assert written["compute_ms"] == pytest.approx(20) and written["alpha_s"] == pytest.approx(2e-4)
    assert {"hardware", "commit", "date", "reason", "beta_s_per_byte"} <= set(written)
    assert {"method", "hosts", "step_ms", "bytes_per_step"} == set(written["predictions"][0])
    assert {row["hosts"] for row in written["predictions"]} == {64, 128, 256, 512, 1024}
    assert not list(tmp_path.glob(".*partial"))


def test_advise_shows_more_hosts_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["advise", "--params", "0.4M", "--compute-ms", "20", "--hosts", "64", "--rate", "10mbit"]
    assert run([*words, "--methods", "gtopk", "--more-hosts"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("recommended: gtopk")
    heading = next(line for line in shown.splitlines() if line.startswith("predicted ms per step"))
    assert heading.split()[4:] == ["64", "128", "256", "512", "1024", "hosts"]


def test_advise_predicts_local_steps_and_says_what_they_want(capsys: pytest.CaptureFixture[str]) -> None:
    spec = "sparseloco:every=3,density=0.06,error_decay=1.0"
    words = ["advise", "--params", "0.4M", "--compute-ms", "20", "--hosts", "4", "--methods", spec, "--more-hosts"]
    assert run([*words, "--rate", "10 Mbit/s"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"recommended: {spec}") and "evaluate and save inside wire.averaged()" in shown
    columns = [line.index("hosts") for line in shown.splitlines() if line.startswith("predicted")]
    assert columns[0] > len(spec) and f"\n{spec}  " in shown  # numbers stand below their headings
    assert run([*words, "--rate", "100 Gb/s"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("do not compress: ") and "thinwire.attach" not in shown
    assert shown.splitlines()[1] == "Keep DistributedDataParallel as it is."


def test_advise_takes_the_optimizer(capsys: pytest.CaptureFixture[str]) -> None:
    words = "advise --params 0.4M --compute-ms 20 --hosts 2 --rate 10mbit --optimizer adamw"
    assert run(words.split()) == 0
    shown = capsys.readouterr().out
    assert LOCAL in shown and "\ndgc " not in shown


def test_advise_measures_a_recipe_here(capsys: pytest.CaptureFixture[str]) -> None:
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
        ("--params 1M --compute-ms 5 --hosts 4 --rate fast", "--rate: the rate 'fast' is not understood"),
        (
            "--params 1M --compute-ms 5 --hosts 4 --rate 100",
            "--rate: the rate '100' has no unit; write bits as 100mbit",
        ),
        ("--params 1M --compute-ms 5 --hosts 4 --rate 1gbit --latency-ms -1", "is not possible"),
        ("--params 1M --compute-ms 5 --hosts 4 --rate 1gbit --methods dgcc", "did you mean 'dgc'"),
        ("--params 1M --compute-ms 5 --hosts 4 --rate 1gbit --optimizer adan", "did you mean 'adam'"),
        ("--model vgg61 --hosts 4 --rate 1gbit", "did you mean 'vgg16'"),
        ("--recipe digit --hosts 4 --rate 1gbit", "did you mean 'digits'"),
        ("--model vgg16 --recipe digits --hosts 4 --rate 1gbit", "exclude each other"),
        ("--params 1M --compute-ms 5 --hosts 4 --rate 1gbit --json /nowhere/a.json", "does not exist"),
    ],
)
def test_advise_answers_mistakes_with_one_sentence(
    words: str, sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert run(["advise", *words.split()]) == 2
    said = capsys.readouterr().err
    assert sentence in said and said.startswith("thinwire: ") and "Traceback" not in said and said.count("\n") == 1
