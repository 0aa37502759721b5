"""What somebody meets who types the README's commands for the first time, mistakes included."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import report_inputs

from thinwire import cli, emulation
from thinwire.report.gather import gather
from thinwire.report.inputs import read

ROOT = Path(__file__).resolve().parent.parent
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "COLUMNS")
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
def test_a_run_in_a_cluster_from_ctrl_c_to_the_report(tmp_path: Path) -> None:
    words = ["--method", "dgc", "--epochs", "12", "--out", "run"]
    process = thinwire("cluster", "--hosts", "2", "--rate", "200mbit", "--", *TRAIN, *words, cwd=tmp_path)
    assert process.stdout is not None
    assert any("epoch 1/" in line for line in process.stdout)
    process.send_signal(signal.SIGINT)
    out, _ = done(process, 130)
    hint = re.search(r"go on from the checkpoint with: (.*)", out)
    assert hint and hint[1] == "thinwire cluster --hosts 2 --rate 200mbit -- thinwire train --resume run"
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["cluster"] == emulation.Links(2, "200mbit", "200mbit").as_dict() | {"slow": []}

    _, err = done(thinwire("train", "--resume", "run", cwd=tmp_path), 2)
    assert hint[1] in err

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
