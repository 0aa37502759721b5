"""Mistakes of `thinwire train`: one sentence, exit code 2, nothing started, nothing written."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import LAUNCHER, command, environment
from paths import ROOT

from thinwire import cli
from thinwire.lab.recipes import RECIPES


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "--recipe", "digit"], ["unknown recipe 'digit'", "did you mean 'digits'?", "Known: digits, "]),
        (["train", "--method", "dcg"], ["unknown method 'dcg'", "did you mean 'dgc'?", "gtopk", "noop"]),
        (["train", "--compare", "dense,tern"], ["unknown method 'tern'", "'terngrad'", "blocksign"]),
        (["train", "--method", "dgc:densty=0.1"], ["'densty'", "did you mean 'density'?", "clip_norm"]),
        (["train", "--method", "dgc:density=2"], ["density", "(0, 1]", "2"]),
        (["train", "--metod", "dgc"], ["unknown option '--metod'", "did you mean '--method'?", "--compare"]),
        (["trian"], ["unknown command 'trian'", "did you mean 'train'?", "info"]),
        (["train", "--workers", "0"], ["--workers takes a whole number of at least 1."]),
        (["train", "--workers", "3.5"], ["--workers takes a whole number of at least 1."]),
        (["train", "--epochs", "many"], ["--epochs takes a whole number of at least 1."]),
        (["bench", "kernels", "--repeats", "2"], ["--repeats takes a whole number of at least 3."]),
        (["advise", "--compute-ms", "long"], ["--compute-ms takes a number."]),
        (["train", "--out", str(ROOT)], ["is not empty", "--out"]),
        (["train", "--out", str(ROOT / "pyproject.toml")], ["pyproject.toml' of --out", "it is a file; name a"]),
    ],
    ids=lambda value: " ".join(value)[:40] if value and isinstance(value, list) else None,
)
def test_command_line_mistake_is_one_sentence(
    arguments: list[str], words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(arguments) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("thinwire: ") and err.count("\n") == 1 and err.endswith(".\n")
    for word in words:
        assert word in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seed", str(2**70)], ["--seed takes a whole number from 0 to 4294967295."]),
        (["--seed", "-1"], ["--seed takes a whole number from 0 to 4294967295."]),
        (["--device", "gpu"], ["unknown device 'gpu'", "auto, cpu, cuda"]),
        (["--compare", "dense,powrsgd"], ["unknown method 'powrsgd'", "did you mean 'powersgd'?", "bf16"]),
        (["--method", "powersgd:rank=0"], ["powersgd: rank must be a whole number of at least 1, not 0."]),
        (["--method", "auto"], ["unknown method 'auto'", "auto is for thinwire.attach, and thinwire advise"]),
        (["--recipe", "mnist-lenet", "--data", "/no/such"], ["--data '/no/such' is not a folder; ", "get it: "]),
        (["--data", "/tmp"], ["--data '/tmp': the recipe 'digits' brings its own data; leave --data out."]),
        (["--set", "lr"], ["--set: 'lr' is not of the form name=value."]),
        (["--set", "lr=-1"], ["--set: recipe 'digits': lr must be a number of at least 0, not '-1'."]),
        (["--set", "batch_size = 3"], ["a global batch_size of 3, too few for 4 workers;", "with --set."]),
        (["--workers", "65"], ["a global batch_size of 64, too few for 65 workers;"]),
        (
            ["--set", "batch_size=1198", "--in-process"],
            ["the training data of recipe 'digits' does not fill one batch of 1198; set a smaller batch_size."],
        ),
        (["--tensorboard"], ["--tensorboard writes into the run folder; name it with --out."]),
        (["--checkpoint-every", "0"], ["--checkpoint-every takes a whole number of at least 1."]),
        (["--timeout", "0"], ["--timeout takes a number of at least 1."]),
        (["--resume", "/no/such/run"], ["takes a run folder made with --out, and '/no/such/run' does not exist."]),
        (["--resume", __file__], ["--resume takes a run folder made with --out", f"and '{__file__}' is a file."]),
        (["--resume", str(ROOT)], [f"a run folder made with --out, and '{ROOT}' has no config.json."]),
        (["--resume", "/tmp", "--epochs", "3"], ["--resume goes on as the run began; leave out --epochs."]),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) and value[0].startswith("--") else "",
)
def test_train_mistake_is_one_sentence(
    arguments: list[str], words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["train", *arguments]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("thinwire: ") and err.count("\n") == 1 and err.endswith(".\n")
    assert all(word in err for word in words), err


def test_set_refuses_a_setting_that_the_recipe_does_not_have(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert cli.run(["train", "--workers", "1", "--set", "lrr=0.1", "--out", str(run)]) == 2
    err = capfd.readouterr().err
    assert (
        err.startswith("thinwire: --set: recipe 'digits' has no setting 'lrr' (did you mean 'lr'?)")
        and err.count("\n") == 1
    )
    assert not run.exists()


def test_missing_data_says_where_it_comes_from(capsys: pytest.CaptureFixture[str]) -> None:
    for name, recipe in RECIPES.items():
        if recipe.needs_data:
            assert cli.run(["train", "--recipe", name]) == 2
            said = capsys.readouterr().err
            assert said.startswith(f"thinwire: the recipe '{name}' needs data: ") and "--data DIR; get it: " in said


def test_exception_in_a_worker_is_one_sentence(tmp_path: Path) -> None:
    done = command(
        "thinwire", "train", "--workers", "2", "--method", "terngrad:exclude=head.*", "--out", str(tmp_path / "run")
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("thinwire: worker ") and done.stderr.count("\n") == 1
    assert "failed; the others were stopped: " in done.stderr and "'head.*' matches no parameter" in done.stderr
    assert not (tmp_path / "run").exists()  # nothing began, nothing is left


# ---- launchers


def test_worker_count_that_contradicts_torchrun_is_refused() -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "thinwire", "train", "--workers", "3"],
        capture_output=True, text=True, timeout=60, env=environment(**variables),
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == "thinwire: --workers 3 does not fit the 2 processes that were started.\n"


@contextlib.contextmanager
def launched(monkeypatch: pytest.MonkeyPatch, **variables: str) -> Iterator[None]:
    with monkeypatch.context() as patch:
        for name in LAUNCHER:
            patch.delenv(name, raising=False)
        for name, value in variables.items():
            patch.setenv(name, value)
        yield


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (
            {"WORLD_SIZE": "x"},
            "WORLD_SIZE is set, as a launcher does, but RANK and MASTER_ADDR and MASTER_PORT are not",
        ),
        ({"WORLD_SIZE": "x", "RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "WORLD_SIZE must be a whole number"),
        ({"WORLD_SIZE": "2", "RANK": "x"}, "RANK is set, as a launcher does, but MASTER_ADDR and MASTER_PORT are not"),
        ({"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "RANK is 2, but WORLD_SIZE 2 has"),
        (
            {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1", "LOCAL_RANK": "-1"},
            "LOCAL_RANK must be a whole number, not '-1'.",
        ),
    ],
)
def test_launchers_variables_are_checked(
    variables: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with launched(monkeypatch, **variables):
        monkeypatch.setattr("time.sleep", lambda seconds: None)
        assert cli.run(["train"]) == 2
    err = capfd.readouterr().err
    assert words in err and err.count("\n") == 1


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as there:
        return there.getsockname()[1]


def test_occupied_port_missing_host_and_dead_first_host_are_one_sentence_each(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["train", "--timeout", "1", "--out", str(tmp_path / "run")]
    two = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    with (
        socket.create_server(("", 0)) as taken,
        launched(monkeypatch, **two, RANK="0", MASTER_PORT=str(taken.getsockname()[1])),
    ):
        assert cli.run(arguments) == 1
        assert "is occupied; choose another MASTER_PORT" in last_line(capfd)
    with launched(monkeypatch, **two, RANK="0", MASTER_PORT=str(free_port())):
        assert cli.run(arguments) == 1
        assert "only 1 of 2 workers came in time; is a host down" in last_line(capfd)
    with launched(monkeypatch, **two, RANK="1", MASTER_PORT=str(free_port())):
        assert cli.run(arguments) == 1
        assert "(MASTER_ADDR:MASTER_PORT) cannot be reached; is the first host up" in last_line(capfd)
    assert not (tmp_path / "run").exists()  # nothing began, nothing is left


def last_line(capfd: pytest.CaptureFixture[str]) -> str:
    out, err = capfd.readouterr()
    assert out == "" and "Traceback" not in err
    return err.splitlines()[-1]


def test_mistake_is_told_where_no_launcher_started_the_command(
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
