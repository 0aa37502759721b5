"""Ctrl-C while the command is still importing: one line and exit code 130, in real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

from thinwire.ctrl_c import LAUNCHER, LOCAL, is_silent

# Python runs this first: the process gets its signal at the moment it begins to import a module.
SIGNAL_AT_IMPORT = """
import os, signal, sys
def look(event, args, wanted=os.environ["CTRL_C_AT"]):
    if event == "import" and args[0] == wanted and "done" not in os.environ:
        os.environ["done"] = "yes"
        os.kill(os.getpid(), signal.SIGINT)
sys.addaudithook(look)
"""
SCRIPT = (
    "import sys\nfrom thinwire.cli import main\nif __name__ == '__main__':\n    sys.exit(main())\n"  # as pip writes it
)
LINE = "thinwire: stopped by Ctrl-C.\n"


@pytest.fixture
def started(tmp_path: Path) -> Path:
    (tmp_path / "sitecustomize.py").write_text(SIGNAL_AT_IMPORT)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "thinwire").write_text(SCRIPT)
    return tmp_path


def run(folder: Path, at: str, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "done")}
    paths = os.pathsep.join([str(folder), str(ROOT)])
    environment = {**kept, "PYTHONPATH": paths, "CTRL_C_AT": at, **variables}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=environment, cwd=folder, timeout=120
    )


@pytest.mark.parametrize(
    "at", ["torch", "torch._C", "torch.distributed", "thinwire.methods", "typer", "thinwire.cli.train"]
)
def test_ctrl_c_while_the_command_imports_is_one_line(started: Path, at: str) -> None:
    done = run(started, at, "-m", "thinwire", "info")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", LINE)


def test_ctrl_c_ends_the_installed_script_alike_and_one_rank_speaks(started: Path) -> None:
    script = str(started / "bin" / "thinwire")
    done = run(started, "torch", script, "info")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", LINE)
    done = run(started, "torch", script, "info", RANK="1", WORLD_SIZE="2", MASTER_ADDR="host0", MASTER_PORT="29500")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ctrl_c_stays_the_script_s_own_where_it_imports_the_library(started: Path) -> None:
    code = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    assert run(started, "nothing", "-c", f"import thinwire.cli; thinwire.attach; {code}").stdout == "True\n"
    done = run(started, "torch", "-c", "import thinwire; thinwire.attach")
    assert "KeyboardInterrupt" in done.stderr


@pytest.mark.parametrize(("changed", "silent"), [
    ({}, True), ({"LOCAL_RANK": "0"}, True), ({"RANK": "0"}, False), ({"RANK": "2"}, False), ({"RANK": "x"}, False),
    ({"RANK": ""}, False), ({"WORLD_SIZE": "-2"}, False), ({"MASTER_PORT": "any"}, False),
    ({"LOCAL_RANK": "-1"}, False), *(({name: None}, False) for name in LAUNCHER),
])  # fmt: skip
def test_ctrl_c_is_silent_on_ranks_that_a_launcher_started(
    changed: dict[str, str | None], silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "host0", "MASTER_PORT": "29500"}
    for name in (*LAUNCHER, *LOCAL):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**started, **changed}.items():
        if value is not None:
            monkeypatch.setenv(name, value)
    assert is_silent() is silent
