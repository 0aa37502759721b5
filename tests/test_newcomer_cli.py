"""What somebody meets who types the README's commands for the first time, mistakes included."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import report_inputs
from rich.console import Console

from thinwire import cli
from thinwire.cli._display import QUIET_S, Live, Plain, show_table
from thinwire.cli._job import Job, split_specs
from thinwire.cli._text import in_lines, wrapped
from thinwire.cli.cluster import _columns
from thinwire.lab import emulation
from thinwire.lab.bench.rows import Row
from thinwire.lab.recipes import RECIPES
from thinwire.lab.recipes.events import Progress, Started
from thinwire.lab.report.gather import gather
from thinwire.lab.report.inputs import read

ROOT = Path(__file__).resolve().parent.parent
LAUNCHER = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "COLUMNS",
    "THINWIRE_COLUMNS",
)
REASON = emulation.why_not()
needs_hosts = pytest.mark.skipif(REASON is not None, reason=f"no emulated hosts here: {REASON}")
THIN = emulation.Links(4, "100mbit", "100mbit")
TRAIN = (sys.executable, "-m", "thinwire", "train")


def thinwire(*arguments: str, cwd: Path | None = None, **variables: str) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    return subprocess.Popen(
        [sys.executable, "-m", "thinwire", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**kept, "PYTHONPATH": str(ROOT), **variables}, cwd=cwd, start_new_session=True,
    )  # fmt: skip


def done(process: subprocess.Popen[str], exit_code: int = 0) -> tuple[str, str]:
    out, err = process.communicate(timeout=150)
    assert process.returncode == exit_code, (out, err)
    return out, err


def begun(folder: Path, **config: Any) -> Path:
    """The folder of a run that was interrupted, as far as a resume reads it before anything starts."""
    fixed = {"recipe": "digits", "specs": ["dgc"], "methods": ["dgc"], "epochs": 3, "seed": 0, "device": "cpu"}
    fixed |= {"data": None, "settings": [], "checkpoint_every": 1, "tensorboard": False, "in_process": False}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**fixed, "workers": 4, **config}))
    return folder


# --- a run knows its network ------------------------------------------------------------------------------


def test_links_are_read_back_and_say_their_command() -> None:
    all_of_it = emulation.Cluster(3, uplink="1gbit", downlink="0.1gbit", latency_ms=5).links(
        [emulation.Slow(2, 10_000_000), emulation.Kill(1, 7.0), emulation.Slow(0, 20_000_000)]
    )
    assert emulation.Links.read(json.loads(json.dumps(all_of_it.as_dict()))) == all_of_it
    assert shlex.join(all_of_it.command) == (
        "thinwire cluster --hosts 3 --uplink 1gbit --downlink 100mbit --latency 5 --slow 0:20mbit --slow 2:10mbit"
    )
    assert all_of_it.rates == "1gbit up, 100mbit down, 5 ms, host 0 20mbit, host 2 10mbit"
    assert shlex.join(emulation.Cluster(4, "0.1gbit").links().command) == shlex.join(THIN.command)
    other = emulation.Cluster(4, "0.1gbit", tcp="reno").links()
    assert shlex.join(other.command) == f"{shlex.join(THIN.command)} --tcp reno" and other.rates == "100mbit, TCP reno"
    before = {name: value for name, value in THIN.as_dict().items() if name != "tcp"}
    assert emulation.Links.read(before) == THIN, "described when there was no choice"
    with pytest.raises(ValueError, match="a cluster is described by"):
        emulation.Links.read({"hosts": 4})


@pytest.mark.parametrize("began_on", [THIN, None])
def test_a_run_is_not_gone_on_with_on_another_network(
    began_on: emulation.Links | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    here = emulation.Links(4, "1gbit", "1gbit") if began_on else THIN
    monkeypatch.setenv(emulation.Links.VARIABLE, json.dumps(here.as_dict()))
    begun(tmp_path / "run", cluster=began_on.as_dict() if began_on else None)
    assert cli.run(["train", "--resume", "run"]) == 2
    said = capsys.readouterr().err
    if began_on:
        assert "began on 'thinwire cluster --hosts 4 --rate 100mbit', and this is 'thinwire cluster --hosts 4" in said
        assert said.endswith(" go on with: thinwire cluster --hosts 4 --rate 100mbit -- thinwire train --resume run\n")
    else:
        assert "began on no emulated cluster, and this is 'thinwire cluster --hosts 4 --rate 100mbit'" in said
        assert said.endswith("train anew with another --out, or go on with: thinwire train --resume run\n")
    assert said.count("\n") == 1


def test_a_run_of_a_cluster_is_not_gone_on_with_on_loopback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begun(tmp_path / "run", cluster=THIN.as_dict())
    assert cli.run(["train", "--resume", str(tmp_path / "run")]) == 2
    assert "began on 'thinwire cluster --hosts 4 --rate 100mbit', and this is no emulated" in capsys.readouterr().err


def test_folders_that_do_not_name_a_network_go_on_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They get as far as the check of the number of workers, which comes after."""
    begun(tmp_path / "run")
    for value in ("", json.dumps(THIN.as_dict())):
        monkeypatch.setenv(emulation.Links.VARIABLE, value)
        assert cli.run(["train", "--resume", str(tmp_path / "run"), "--workers", "3"]) == 2
        assert "has 4 workers, and they can only go on as 4" in capsys.readouterr().err


@needs_hosts
def test_a_run_in_a_cluster_from_ctrl_c_to_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--method", "dgc", "--epochs", "8", "--out", "run"]
    process = thinwire("cluster", "--hosts", "2", "--rate", "200mbit", "--", *TRAIN, *words, cwd=tmp_path)
    assert process.stdout is not None
    assert any("epoch 1/" in line for line in process.stdout)
    process.send_signal(signal.SIGINT)
    out, _ = done(process, 130)
    hint = re.search(r"go on from the checkpoint with: (.*)", out)
    assert hint and hint[1] == "thinwire cluster --hosts 2 --rate 200mbit -- thinwire train --resume run"
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["cluster"] == emulation.Links(2, "200mbit", "200mbit").as_dict() | {"slow": []}

    monkeypatch.chdir(tmp_path)
    assert cli.run(["train", "--resume", "run"]) == 2 and hint[1] in capsys.readouterr().err

    resumed = shlex.split(hint[1].removeprefix("thinwire "))
    out, _ = done(thinwire(*resumed[: resumed.index("--") + 1], *TRAIN, "--resume", "run", cwd=tmp_path))
    assert "goes on after step" in out and (tmp_path / "run" / "summary.json").exists()
    source = gather([read(tmp_path / "run")])["sources"][0]
    assert source["facts"]["emulated"] == "2 hosts, 200mbit"
    assert source["command"].startswith("thinwire cluster --hosts 2 --rate 200mbit -- thinwire train --recipe digits")


def test_a_report_keeps_runs_of_two_networks_apart(tmp_path: Path) -> None:
    wide = emulation.Links(4, "1gbit", "1gbit")
    runs = [
        report_inputs.write_run(tmp_path / f"run{seed}", ["dense", "terngrad"], seed=seed, cluster=links.as_dict())
        for seed, links in enumerate((THIN, wide))
    ]
    labels = [one["method"] for one in gather([read(run) for run in runs])["sections"][0]["series"]]
    assert labels == [f"{m} (8 epochs, 4 workers, cpu, links of {r})" for r in ("100mbit", "1gbit")
                      for m in ("dense", "terngrad")]  # fmt: skip


def test_an_unfinished_method_is_compared_with_dense_at_the_same_step(tmp_path: Path) -> None:
    run = report_inputs.write_run(tmp_path / "run", ["dgc", "dense"], finished=False)  # dense: half the epochs
    inputs = read(run)
    dgc, dense = gather([inputs])["sections"][0]["series"]
    assert dense["row"]["steps"] == 80 and dgc["row"]["to_dense_step"] == 80
    at_80 = [dict(zip(one["epochs"]["step"], one["epochs"]["metric"], strict=True))[80] for one in (dgc, dense)]
    assert dgc["row"]["to_dense"] == at_80[0] - at_80[1] != dgc["row"]["metric"] - dense["row"]["metric"]
    (run / "metrics.jsonl").write_text(
        "".join(
            line + "\n"
            for line in (run / "metrics.jsonl").read_text().splitlines()
            if '"spec": "dgc"' in line or json.loads(line)["kind"] == "steps"  # dense before its first epoch's end
        )
    )
    dgc, dense = gather([read(run)])["sections"][0]["series"]
    assert dgc["row"]["to_dense"] is None and dgc["row"]["to_dense_step"] is None


# --- failures ---------------------------------------------------------------------------------------------


@needs_hosts
def test_a_killed_host_is_named_with_step_and_stage() -> None:
    killed = []

    def kill_when_it_trains(rank: int, line: str) -> None:
        if "epoch 1/" in line and not killed:
            killed.append(1)
            there.kill(1)

    with emulation.Cluster(2, grace_s=60) as there:
        result = there.run(
            [*TRAIN, "--method", "dgc", "--epochs", "500", "--timeout", "15"],
            env={"PYTHONPATH": str(ROOT)}, timeout_s=120, on_line=kill_when_it_trains,
        )  # fmt: skip
    said = result.hosts[0].output
    failure = next(line for line in said.splitlines() if "worker 0 failed" in line)
    assert re.search(r"the exchange of step \d+ failed at stage '[\w -]+': no sign of life from rank 1", failure)
    assert "hostname of the client socket" not in said and killed


def test_no_arguments_show_the_help_and_nothing_else(capfd: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["bench"]):
        assert cli.run(words) == 2
        out, err = capfd.readouterr()
        assert "Usage: thinwire" in out and not err


def test_missing_data_says_where_it_comes_from(capsys: pytest.CaptureFixture[str]) -> None:
    for name, recipe in RECIPES.items():
        if recipe.needs_data:
            assert cli.run(["train", "--recipe", name]) == 2
            said = capsys.readouterr().err
            assert said.startswith(f"thinwire: the recipe '{name}' needs data: ") and "--data DIR; get it: " in said


def test_a_mistake_is_told_where_no_launcher_started_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "1")
    assert cli.run(["trian"]) == 2
    assert capsys.readouterr().err.startswith("thinwire: unknown command 'trian'")
    for name, value in (("WORLD_SIZE", "2"), ("MASTER_ADDR", "host0"), ("MASTER_PORT", "29500")):
        monkeypatch.setenv(name, value)
    assert cli.run(["trian"]) == 2
    assert capsys.readouterr().err == ""


# --- how it looks -----------------------------------------------------------------------------------------


def test_lines_break_between_words_and_leave_a_command_whole() -> None:
    sentence = "thinwire: unknown recipe 'cifar': did you mean 'cifar10-vgg16'? Known: cifar10-resnet20, an4-gru."
    assert wrapped(sentence, None) == sentence
    lines = wrapped(sentence, 40).splitlines()
    assert max(map(len, lines)) <= 40 and " ".join(lines) == sentence
    assert all(line.startswith("  ") for line in wrapped(sentence, 40, indent=2).splitlines()[1:])
    assert in_lines("dgc:density=0.02,warmup=172,values=fp32", 30) == "dgc:density=0.02,warmup=172,\nvalues=fp32"
    command = "thinwire cluster --hosts 4 --rate 100mbit -- thinwire train --resume runs/thin"
    assert wrapped(f"stopped at step 7 of 90; go on with: {command}", 40).splitlines()[-1] == command


def test_everything_fits_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("THINWIRE_COLUMNS", "80")
    for words, code in (
        (["info"], 0),
        (["advise", "--params", "1M", "--compute-ms", "50", "--hosts", "2", "--rate", "1gbit"], 0),
        (["train", "--recipe", "cifar"], 2),
        (["train", "--recipe", "cifar10-vgg16"], 2),
    ):
        assert cli.run(words) == code
        out, err = capsys.readouterr()
        assert max(map(len, f"{out}{err}".splitlines())) <= 80, out + err


def test_switches_take_no_value(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--help"], ["train", "--help"], ["bench", "--help"], ["bench", "kernels", "--help"]):
        assert cli.run(words) == 0
        assert "bool" not in capsys.readouterr().out.lower()


@pytest.mark.parametrize("width", [80, 100, 110, 130, 160])
@pytest.mark.parametrize("recipe", ["digits", "shakespeare"])
def test_the_live_line_shows_method_and_numbers_in_full(width: int, recipe: str) -> None:
    spec = "dgc:density=0.02,warmup=172,values=fp32"
    job = Job.checked(recipe=recipe, specs=[spec, "blocksign"], epochs=12, seed=0)
    out = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    live = Live(job, out)
    for name in (spec, "blocksign"):
        event = {"epoch": 12, "epochs": 12, "step": 99, "num_steps": 100, "loss": 2.345, "metric": 98.76}
        live.show(Progress(name, **event, samples_per_s=12_345.0, bytes_sent=123.4e6, ratio=43.1))
    live.close()
    assert isinstance(out.file, io.StringIO)
    lines = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\n", out.file.getvalue()).splitlines()]
    shown = "\n".join(lines)
    assert spec in shown and "…" not in shown and "98.76" in shown and "43.1x" in shown and "took" not in shown
    assert any(re.match(r"(dgc|dgc:\S+fp32) ", line) for line in lines)
    assert any(line.startswith("blocksign ") and "left" in line for line in lines)


def test_hosts_leave_room_for_their_names_in_a_terminal() -> None:
    assert _columns(Console(file=io.StringIO(), width=110, force_terminal=True), 4)["COLUMNS"] == "101"
    assert _columns(Console(file=io.StringIO(), width=110, force_terminal=True), 12)["THINWIRE_COLUMNS"] == "100"
    assert _columns(Console(file=io.StringIO(), width=110), 4) == {}


def test_a_plain_run_says_that_it_began_and_that_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = Plain(Job.checked(recipe="shakespeare", specs=["dgc"], epochs=3, seed=0))
    plain.show(Started(["host0", "host1"], "cpu", "gloo", {}))
    step = Progress("dgc", 1, 3, 7, 516, 2.5, None, 1000.0, 2e6, 43.0)
    plain.show(step)
    monkeypatch.setattr("time.monotonic", lambda now=time.monotonic: now() + QUIET_S)
    plain.show(step)
    assert capsys.readouterr().out.splitlines() == [
        "shakespeare: the workers have met on 2 hosts (gloo), training begins",
        "dgc  step 7/516  loss 2.5000  1,000 samples/s  sent 2.00 MB",
    ]


def test_methods_are_shown_without_what_says_nothing() -> None:
    assert split_specs("dgc:", "terngrad:, dgc:density=0.1,warmup=3,,dense") == [
        "dgc",
        "terngrad",
        "dgc:density=0.1,warmup=3",
        "dense",
    ]


def test_one_epoch_and_one_worker(capsys: pytest.CaptureFixture[str]) -> None:
    show_table(Job.checked(recipe="digits", specs=["dgc"], epochs=1, seed=0), [], num_workers=1)
    assert "test accuracy, 1 epoch, 1 worker, seed 0" in capsys.readouterr().out


@pytest.mark.parametrize(("x_floor", "is_busy"), [(0.02, True), (0.67, False), (1.2, False), (None, False)])
def test_a_floor_that_was_measured_on_a_busy_machine_is_named(
    x_floor: float | None, is_busy: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = Row("dgc step", "native", "cpu", 9, 1.0, 1.0, 1.0, 1.0, x_floor, None, 1, "abc", "CPU, 1 thread", "today")
    monkeypatch.setattr("thinwire.cli.bench.Bench", lambda *arguments: SimpleNamespace(rows=lambda: iter([row])))
    monkeypatch.setattr("torch.set_num_threads", lambda threads: None)
    assert cli.run(["bench", "kernels", "--sizes", "9"]) == 0
    sentence = "The machine was busy while the memory copy was timed; repeat this on a quiet one."
    assert (sentence in capsys.readouterr().out) is is_busy
