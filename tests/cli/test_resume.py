"""Runs that are interrupted and go on, with the method that they began with, option by option."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from command import done, metrics, started, until

import thinwire
from thinwire import cli
from thinwire.cli._job import Job

SPECS = ["dgc:density=0.01,warmup=20", "blocksign"]
TRAIN = ["train", "--workers", "2", "--epochs", "12", "--method", SPECS[0], "--compare", SPECS[1]]


def what_was_learned(run: Path) -> list[tuple[Any, ...]]:
    """All that must not depend on where a run was interrupted: everything but times, and bytes, because measured times
    decide which buckets travel together."""
    keys = ("kind", "spec", "epoch", "step", "loss", "metric", "lr")
    return [tuple(row.get(key) for key in keys) for row in metrics(run)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("whole") / "run"
    done(started(*TRAIN, "--out", str(run)))
    return run


def test_run_folder_says_where_time_and_bytes_went(whole: Path) -> None:
    config = json.loads((whole / "config.json").read_text())
    assert config["metric"]["name"] == "accuracy" and config["device"] in ("cpu", "cuda") and config["data"] is None
    there = config["environment"]
    assert set(there) == {"hardware", "commit", "date", "hosts", "device", "backend"}
    assert there["hosts"] == [socket.gethostname()] and config["recipe_settings"] == {"batch_size": 64, "lr": 0.05}
    assert set(there["hardware"]) == {"cpu", "cores", "gpus", "os"}
    rows = metrics(whole)
    lines = [row for row in rows if row["kind"] == "steps" and row["spec"] == SPECS[0]]
    assert [row["step"] for row in lines] == [*range(10, 216, 10), 216]  # 18 steps an epoch
    assert [row["epoch"] for row in rows if row["kind"] == "epoch"] == [*range(1, 13)] * 2
    for row in lines:
        parts = row["breakdown"]
        assert min(parts.values()) >= 0 and parts["compress_s"] > 0 and parts["communicate_s"] > 0
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["metric"] == config["metric"]
    assert [set(run["breakdown"]) for run in summary["runs"]] == [set(lines[0]["breakdown"])] * 2
    for run in summary["runs"]:  # three parts are the step; seconds are rank 0's, parts the mean of both ranks
        step_s = sum(run["breakdown"][part] for part in ("forward_backward_s", "wait_s", "other_s"))
        assert step_s * run["steps"] == pytest.approx(run["seconds"], rel=0.2)
    assert not (whole / "checkpoint").exists()  # a finished run needs none


@pytest.mark.timeout(400)
def test_interrupted_and_resumed_run_is_the_uninterrupted_one(whole: Path, tmp_path: Path) -> None:
    """Ctrl-C inside the first method, SIGTERM from torchrun inside the second, kill -9 a little later."""
    run = tmp_path / "run"
    first = started(*TRAIN, "--out", str(run))
    until(first, "epoch 2/12")
    os.killpg(first.pid, signal.SIGINT)  # what a terminal does
    _, err = done(first, 130)
    stopped = re.fullmatch(r"thinwire: stopped at step (\d+) of 216 of dgc:\S+; go on .* --resume (\S+)\n", err)
    assert stopped is not None and 36 <= int(stopped[1]) <= 216 and Path(stopped[2]).resolve() == run
    assert sorted(p.name for p in run.iterdir()) == ["checkpoint", "config.json", "metrics.jsonl"]
    # The last checkpoint and the one before it, of each worker a part and the mark beside it.
    assert len(list((run / "checkpoint").iterdir())) == 8

    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "thinwire")
    second = started("train", "--resume", str(run), program=torchrun)
    until(second, "blocksign  epoch 2/12")
    second.terminate()
    _, err = second.communicate(timeout=100)
    assert re.search(r"thinwire: stopped at step \d+ of 216 of blocksign; go on", err), err

    third = started("train", "--resume", str(run))
    until(third, "blocksign  epoch 6/12")
    os.killpg(third.pid, signal.SIGKILL)
    third.communicate()
    out, err = done(started("train", "--resume", str(run)))
    assert err == "" and out.startswith("blocksign  goes on after step ")

    assert what_was_learned(run) == what_was_learned(whole)
    ours, theirs = (json.loads((folder / "summary.json").read_text())["runs"] for folder in (run, whole))
    for key in ("spec", "metric", "loss", "steps"):
        assert [row[key] for row in ours] == [row[key] for row in theirs]
    for key in ("bytes_sent", "bytes_sent_max", "ratio", "link_ratio"):
        assert [row[key] for row in ours] == pytest.approx([row[key] for row in theirs], rel=0.2)
    assert sorted(p.name for p in run.iterdir()) == ["config.json", "metrics.jsonl", "summary.json"]
    assert len(json.loads((run / "config.json").read_text())["resumed"]) == 3


def test_resume_says_why_it_cannot(whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["train", "--resume", str(whole)]) == 2
    assert "is finished; there is nothing to resume." in capfd.readouterr().err
    config = json.loads((whole / "config.json").read_text())
    for text, words in (("{", "is not JSON"), ("{}", "does not describe a run of this version")):
        (tmp_path / "config.json").write_text(text)
        assert cli.run(["train", "--resume", str(tmp_path)]) == 2
        assert words in capfd.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert cli.run(["train", "--resume", str(tmp_path), "--workers", "3"]) == 2
    assert "has 2 workers, and they can only go on as 2." in capfd.readouterr().err
    assert cli.run(["train", "--out", str(tmp_path)]) == 2
    assert "is not empty; name another with --out, or go on with --resume" in capfd.readouterr().err


def test_resume_without_a_checkpoint_and_with_more_workers_than_cores_says_so(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The warning is all that too few cores cause; the sentence comes from the workers, once."""
    monkeypatch.setattr("thinwire.cli.train.num_cores", lambda: 1)
    (tmp_path / "config.json").write_text((whole / "config.json").read_text())
    (tmp_path / "checkpoint").mkdir()  # where a kill found a first one half written
    (tmp_path / "checkpoint" / ".0-18.rank0of2.pt.partial").write_bytes(bytes(100))
    assert cli.run(["train", "--resume", str(tmp_path)]) == 2
    warning, sentence = capfd.readouterr().err.splitlines()
    assert warning.startswith("thinwire: 2 workers share 1 core and take turns")
    assert sentence.endswith("has no checkpoint of all 2 workers; the run ended before its first one.")


# ---- options that were the defaults when a run began


def folder_of(tmp_path: Path, **changed: Any) -> Path:
    job = Job.checked(recipe="digits", specs=["dgc", "dense"], epochs=2, seed=0, device="cpu", out=tmp_path)
    config = {**json.loads(json.dumps(job.config)), "workers": 2, **changed}
    (tmp_path / "config.json").write_text(
        json.dumps({k: v for k, v in config.items() if k != "methods" or v is not None})
    )
    return tmp_path


def test_run_folder_keeps_methods_in_full_and_resuming_reads_them(tmp_path: Path) -> None:
    kept = json.loads((folder_of(tmp_path) / "config.json").read_text())
    assert kept["methods"] == [thinwire.DGC().in_full, thinwire.Dense().in_full] and kept["specs"] == ["dgc", "dense"]
    other = thinwire.DGC(density=0.25, values="fp32").in_full  # as if those had been the defaults
    job, workers = Job.resumed(folder_of(tmp_path, methods=[other, kept["methods"][1]]), timeout_s=1.0)
    assert job.methods == (other, kept["methods"][1])
    assert job.specs == ("dgc", "dense") and workers == 2


@pytest.mark.parametrize(
    ("methods", "words"),
    [
        (None, ["does not describe a run of this version"]),
        (["dgc"], ["it names 2 methods, and not as many in full"]),
        (["dgc:zeal=1", "dense"], ["method 'dgc' has no option 'zeal'"]),
    ],
)
def test_resume_refuses_a_folder_whose_methods_are_not_certain(
    tmp_path: Path, methods: Any, words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    run = folder_of(tmp_path, methods=methods)
    assert cli.run(["train", "--resume", str(run)]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith(f"thinwire: '{run}' cannot be resumed: ") and err.count("\n") == 1
    assert all(word in err for word in words), err


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("began", "named"), [("dgc:density=0.006", "dgc"), ("terngrad:dense_below=0", "terngrad")])
def test_resume_goes_on_with_the_options_the_run_began_with(tmp_path: Path, began: str, named: str) -> None:
    """An option that was the default when the run began and is not any more: its checkpoint fits no other."""
    run = tmp_path / "run"
    first = started("train", "--workers", "2", "--epochs", "6", "--method", began, "--out", str(run))
    until(first, "epoch 2/6")
    os.killpg(first.pid, signal.SIGINT)
    done(first, 130)
    config = json.loads((run / "config.json").read_text())
    assert config["methods"] == [thinwire.parse_method(began).in_full]
    (run / "config.json").write_text(json.dumps({**config, "specs": [named]}))
    lines = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(lines.replace(json.dumps(began), json.dumps(named)))
    done(started("train", "--resume", str(run)))
    (outcome,) = json.loads((run / "summary.json").read_text())["runs"]
    assert outcome["spec"] == named and outcome["method"] == began and outcome["steps"] == 108
    assert [row["epoch"] for row in metrics(run) if row["kind"] == "epoch"] == [1, 2, 3, 4, 5, 6]


OLD = {"blocksign": "blocksign:dense_below=1", "terngrad": "terngrad:dense_below=0"}


def test_resume_goes_on_with_the_old_defaults_the_run_began_with(tmp_path: Path) -> None:
    job = Job.checked(recipe="digits", specs=list(OLD), epochs=2, seed=0, device="cpu", out=tmp_path)
    then = [thinwire.parse_method(spec).in_full for spec in OLD.values()]  # what such a folder has
    config = {**json.loads(json.dumps(job.config)), "workers": 2, "methods": then}
    (tmp_path / "config.json").write_text(json.dumps(config))
    again, _ = Job.resumed(tmp_path, timeout_s=1.0)
    assert again.specs == tuple(OLD) and list(again.methods) == then
