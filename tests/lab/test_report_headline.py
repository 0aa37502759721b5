"""What the report says first: a sentence and three numbers, and whether seconds may be compared."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from report_inputs import write_run

from thinwire.lab.report.gather import gather
from thinwire.lab.report.inputs import read


def compute_took(run: Path, spec: str, seconds: float) -> None:
    summary = json.loads((run / "summary.json").read_text())
    for row in summary["runs"]:
        if row["spec"] == spec:
            row["breakdown"] |= {"forward_backward_s": seconds, "compress_s": 0.001}
    (run / "summary.json").write_text(json.dumps(summary))


def test_report_says_where_seconds_do_not_compare(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", ["dense", "terngrad"], steps=False)
    assert gather([read(run)])["sections"][0]["uneven"] == {}
    compute_took(run, "terngrad", 0.06)
    (said,) = gather([read(run)])["sections"][0]["uneven"].values()
    assert "40 ms per step with dense and 50 % more with terngrad" in said
    threads = write_run(tmp_path / "threads", ["dense", "terngrad"], steps=False, in_process=True)
    compute_took(threads, "terngrad", 0.06)
    assert gather([read(threads)])["sections"][0]["uneven"] == {}  # their seconds are no real workers' anyway


def headline_of(*runs: Path) -> dict[str, Any]:
    return gather([read(run) for run in runs])["sections"][0]["headline"]


def curve(run: Path, spec: str, points: list[tuple[float, float, float]]) -> None:
    """Give a method these epochs: metric, seconds, bytes."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    own = [line for line in lines if line["spec"] == spec and line["kind"] == "epoch"]
    for line, (metric, seconds, sent) in zip(own, points, strict=True):
        line |= {"metric": metric, "seconds": seconds, "bytes_sent": sent}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if (run / "summary.json").exists():
        summary = json.loads((run / "summary.json").read_text())
        for row in summary["runs"]:
            if row["spec"] == spec:
                row |= {"metric": metric, "seconds": seconds, "bytes_sent": sent}
        (run / "summary.json").write_text(json.dumps(summary))


def test_report_headline_says_how_much_sooner_dense_was_met(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", ["dense", "terngrad"], epochs=3, steps=False)
    curve(run, "dense", [(60, 10, 30e6), (90, 20, 60e6), (95, 30, 90e6)])
    curve(run, "terngrad", [(70, 4, 1e6), (95, 8, 2e6), (96, 12, 3e6)])
    told = headline_of(run)
    assert told["sentence"] == "terngrad reached 95 % accuracy 3.8\u00d7 sooner than dense, with 45\u00d7 fewer bytes."
    assert told["numbers"] == [
        {"value": "3.8\u00d7", "label": "sooner than dense"},
        {"value": "45\u00d7", "label": "fewer bytes than dense"},
        {"value": "95 %", "label": "accuracy, reached by both"},
    ]
    curve(run, "terngrad", [(70, 12, 1e6), (90, 22.6, 2e6), (92.25, 34, 3e6)])  # later, and never as good
    assert headline_of(run)["sentence"] == (
        "terngrad reached 92.25 % accuracy 1.13\u00d7 later than dense, with 30\u00d7 fewer bytes; "
        "it ended 2.75 points worse than dense."
    )


def test_report_headline_of_a_method_that_is_as_fast(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", ["dense", "terngrad"], epochs=2, steps=False)
    curve(run, "dense", [(60, 10, 30e6), (90, 20, 60e6)])
    curve(run, "terngrad", [(60, 10, 30e6), (90, 20.01, 60e6)])
    told = headline_of(run)
    assert told["sentence"] == "terngrad reached 90 % accuracy as soon as dense, with as many bytes as dense."
    assert [one["value"] for one in told["numbers"]] == ["1\u00d7", "1\u00d7", "90 %"]


def test_report_headline_reads_a_metric_that_falls(tmp_path: Path) -> None:
    metric = {"name": "bits per character", "unit": "", "difference_unit": "bits", "higher_is_better": False}
    run = write_run(tmp_path / "run", ["dense", "terngrad"], epochs=3, steps=False, metric=metric)
    curve(run, "dense", [(3, 10, 30e6), (2.5, 20, 60e6), (2.33, 30, 90e6)])
    curve(run, "terngrad", [(2.4, 4, 1e6), (2.35, 8, 2e6), (2.31, 11.5, 4.3e6)])
    assert headline_of(run)["sentence"] == (
        "terngrad reached 2.33 bits per character 2.6\u00d7 sooner than dense, with 21\u00d7 fewer bytes."
    )


def test_report_headline_compares_what_there_is(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", ["dense", "terngrad"], epochs=4, steps=False, finished=False)
    assert headline_of(run)["sentence"].startswith("So far: terngrad reached ")
    compared = write_run(tmp_path / "busy", ["dense", "terngrad"], steps=False)
    compute_took(compared, "terngrad", 0.06)
    told = headline_of(compared)
    assert "sooner" not in told["sentence"] and "fewer bytes than dense" in told["sentence"]
    assert told["numbers"][0]["label"] == "accuracy to dense at the end"
    alone = headline_of(write_run(tmp_path / "alone", ["terngrad"], steps=False))
    ended = r"terngrad ended at [\d.]+ % accuracy after [\d.]+ s, with 14\u00d7 fewer bytes than dense fp32\."
    assert re.fullmatch(ended, alone["sentence"])
    dense = headline_of(write_run(tmp_path / "dense", ["dense"], steps=False))
    assert "fewer" not in dense["sentence"] and len(dense["numbers"]) == 3
    assert headline_of(write_run(tmp_path / "others", ["terngrad", "noop"], steps=False)) == {}
    assert headline_of(write_run(tmp_path / "nothing", ["dense", "noop"], steps=False)) == {}
