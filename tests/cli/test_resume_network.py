"""A run knows its network: it goes on on the same one, and the hint says how."""

from __future__ import annotations

import json
import re
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from command import done, started

from thinwire import cli
from thinwire.lab import emulation
from thinwire.lab.report.gather import gather
from thinwire.lab.report.inputs import read

REASON = emulation.why_not()
needs_hosts = pytest.mark.skipif(REASON is not None, reason=f"no emulated hosts here: {REASON}")
THIN = emulation.Links(4, "100mbit", "100mbit")
TRAIN = (sys.executable, "-m", "thinwire", "train")


def begun(folder: Path, **config: Any) -> Path:
    """The folder of a run that was interrupted, as far as a resume reads it before anything starts."""
    fixed = {"recipe": "digits", "specs": ["dgc"], "methods": ["dgc"], "epochs": 3, "seed": 0, "device": "cpu"}
    fixed |= {"data": None, "settings": [], "checkpoint_every": 1, "tensorboard": False, "in_process": False}
    fixed |= {"cluster": None}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**fixed, "workers": 4, **config}))
    return folder


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
    whole = THIN.as_dict()
    for described in ({"hosts": 4}, {name: whole[name] for name in whole if name != "tcp"}, {**whole, "mtu": 9000}):
        with pytest.raises(ValueError, match="a cluster is described by"):
            emulation.Links.read(described)


@pytest.mark.parametrize("began_on", [THIN, None])
def test_resume_refuses_another_network(
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


def test_resume_refuses_loopback_for_a_run_of_a_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begun(tmp_path / "run", cluster=THIN.as_dict())
    assert cli.run(["train", "--resume", str(tmp_path / "run")]) == 2
    assert "began on 'thinwire cluster --hosts 4 --rate 100mbit', and this is no emulated" in capsys.readouterr().err


@pytest.mark.parametrize("began_on", [THIN, None])
def test_resume_goes_on_on_the_same_network(
    began_on: emulation.Links | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It gets as far as the check of the number of workers, which comes after."""
    described = began_on.as_dict() if began_on else None
    begun(tmp_path / "run", cluster=described)
    monkeypatch.setenv(emulation.Links.VARIABLE, json.dumps(described) if described else "")
    assert cli.run(["train", "--resume", str(tmp_path / "run"), "--workers", "3"]) == 2
    assert "has 4 workers, and they can only go on as 4" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["garbage", "[]", '{"hosts": 4}', json.dumps({**THIN.as_dict(), "hosts": "four"})])
def test_network_that_no_cluster_set_is_one_sentence(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(emulation.Links.VARIABLE, text)
    assert cli.run(["train", "--recipe", "digits"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("thinwire: THINWIRE_LINKS is ") and said.endswith("run: unset THINWIRE_LINKS.\n"), said
    assert said.count("\n") == 1


@needs_hosts
def test_run_in_a_cluster_goes_from_ctrl_c_to_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--method", "dgc", "--epochs", "8", "--out", "run"]
    process = started("cluster", "--hosts", "2", "--rate", "200mbit", "--", *TRAIN, *words, cwd=tmp_path)
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
    out, _ = done(started(*resumed[: resumed.index("--") + 1], *TRAIN, "--resume", "run", cwd=tmp_path))
    assert "goes on after step" in out and (tmp_path / "run" / "summary.json").exists()
    source = gather([read(tmp_path / "run")])["sources"][0]
    assert source["facts"]["emulated"] == "2 hosts, 200mbit"
    assert source["command"].startswith("thinwire cluster --hosts 2 --rate 200mbit -- thinwire train --recipe digits")
