"""A run is resumed with the method that it began with, option by option, whatever the defaults are by then."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from test_train_more import done, metrics, thinwire, until

import thinwire as library
from thinwire import cli
from thinwire.cli._job import Job


def folder_of(tmp_path: Path, **changed: Any) -> Path:
    job = Job.checked(recipe="digits", specs=["dgc", "dense"], epochs=2, seed=0, device="cpu", out=tmp_path)
    config = {**json.loads(json.dumps(job.config)), "workers": 2, **changed}
    (tmp_path / "config.json").write_text(
        json.dumps({k: v for k, v in config.items() if k != "methods" or v is not None})
    )
    return tmp_path


def test_the_folder_keeps_methods_in_full_and_resuming_reads_them(tmp_path: Path) -> None:
    kept = json.loads((folder_of(tmp_path) / "config.json").read_text())
    assert kept["methods"] == [library.DGC().in_full, library.Dense().in_full] and kept["specs"] == ["dgc", "dense"]
    run = folder_of(tmp_path, methods=["dgc:density=0.25,values=fp32", "dense"])  # as if those had been the defaults
    job, workers = Job.resumed(run, timeout_s=1.0)
    # Weight decay waited, and every tensor sent the same share, when there was no option for it.
    assert job.methods[0] == library.DGC(density=0.25, scope="tensor", values="fp32", direct_decay=False).in_full
    assert job.specs == ("dgc", "dense") and workers == 2


@pytest.mark.parametrize(
    ("methods", "words"),
    [
        (None, ["older thinwire, which kept 'dgc dense' without the options", "with that version, or train anew"]),
        (["dgc"], ["it names 2 methods, and not as many in full"]),
        (["dgc:zeal=1", "dense"], ["method 'dgc' has no option 'zeal'"]),
    ],
)
def test_a_folder_whose_methods_are_not_certain_is_refused(
    tmp_path: Path, methods: Any, words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    run = folder_of(tmp_path, methods=methods)
    assert cli.run(["train", "--resume", str(run)]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith(f"thinwire: '{run}' cannot be resumed: ") and err.count("\n") == 1
    assert all(word in err for word in words), err


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("began", "named"), [("dgc:density=0.006", "dgc"), ("terngrad:dense_below=0", "terngrad")])
def test_a_run_goes_on_with_the_options_it_began_with(tmp_path: Path, began: str, named: str) -> None:
    """An option that was the default when the run began and is not any more: its checkpoint fits no other."""
    run = tmp_path / "run"
    first = thinwire("train", "--workers", "2", "--epochs", "6", "--method", began, "--out", str(run))
    until(first, "epoch 2/6")
    os.killpg(first.pid, signal.SIGINT)
    done(first, 130)
    config = json.loads((run / "config.json").read_text())
    assert config["methods"] == [library.parse_method(began).in_full]
    (run / "config.json").write_text(json.dumps({**config, "specs": [named]}))
    lines = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(lines.replace(json.dumps(began), json.dumps(named)))
    done(thinwire("train", "--resume", str(run)))
    (outcome,) = json.loads((run / "summary.json").read_text())["runs"]
    assert outcome["spec"] == named and outcome["method"] == began and outcome["steps"] == 108
    assert [row["epoch"] for row in metrics(run) if row["kind"] == "epoch"] == [1, 2, 3, 4, 5, 6]
