"""`thinwire report --watch`: the page follows a run to its end, or to Ctrl-C."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report_inputs import write_run

from thinwire.cli import run


def watching(run: Path, out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "thinwire", "report", str(run), "--watch", "--out", str(out)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(what: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 120
    while not what():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.05)


def data_in(out: Path) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', out.read_text(), re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_report_watch_writes_the_page_again_until_the_run_ends(tmp_path: Path) -> None:
    whole, out = write_run(tmp_path / "whole", ["dense"], steps=False), tmp_path / "r.html"
    lines, run = (whole / "metrics.jsonl").read_text().splitlines(keepends=True), tmp_path / "run"
    with watching(run, out) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"waiting for numbers in '{run}'; Ctrl-C ends that.\n"
        run.mkdir()
        (run / "config.json").write_text((whole / "config.json").read_text())
        (run / "metrics.jsonl").write_text(lines[0][:40])  # torn
        time.sleep(2)
        assert process.poll() is None and not out.exists()
        (run / "metrics.jsonl").write_text(lines[0])
        wait_for(out.exists, process)
        first = data_in(out)
        assert first["live"] > 0 and first["sections"][0]["series"][0]["epochs"]["step"] == [20]
        (run / "metrics.jsonl").write_text("".join(lines[:3]))
        wait_for(lambda: data_in(out)["sections"][0]["series"][0]["epochs"]["step"] == [20, 40, 60], process)
        (run / "metrics.jsonl").write_text("".join(lines))
        (run / "summary.json").write_text((whole / "summary.json").read_text())
        told, error = process.communicate(timeout=60)
    assert process.returncode == 0 and not error and told.endswith(f"Written to {out}; every run has ended.\n")
    last = data_in(out)
    assert last["live"] == 0 and last["sections"][0]["series"][0]["finished"]


def test_report_watch_leaves_a_page_that_is_still_after_ctrl_c(tmp_path: Path) -> None:
    run, out = write_run(tmp_path / "run", ["dense"], steps=False, finished=False), tmp_path / "r.html"
    with watching(run, out) as process:
        wait_for(out.exists, process)
        process.send_signal(signal.SIGINT)
        told, error = process.communicate(timeout=60)
    assert process.returncode == 0 and not error and data_in(out)["live"] == 0
    assert told.endswith(f"Written to {out} as far as the run has come.\n")


def test_report_watch_answers_mistakes_with_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("x")
    run_folder = write_run(tmp_path / "run", ["dense"])
    for words, sentence in {
        (str(tmp_path / "other"),): "is not a run folder",
        (str(run_folder), "--figures", str(tmp_path / "f")): "leave --figures out until the run has ended",
    }.items():
        assert run(["report", "--watch", "--out", str(tmp_path / "r.html"), *words]) == 2
        error = capsys.readouterr().err
        assert re.search(sentence, error) and error.count("\n") == 1, error
