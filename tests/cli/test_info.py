"""`thinwire --version` and `thinwire info`."""

from __future__ import annotations

import pytest
import torch
from command import command

import thinwire
from thinwire import cli
from thinwire.lab import emulation


def test_version_and_info_are_printed() -> None:
    assert command("thinwire", "--version").stdout == f"thinwire {thinwire.__version__}\n"
    info = dict(line.split(None, 1) for line in command("thinwire", "info").stdout.splitlines())
    assert info["torch"] == torch.__version__
    assert info["gloo"] == "available"
    assert set(info) >= {"thinwire", "python", "nccl", "kernels"}


def test_info_says_what_is_here(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["info"]) == 0
    out = capfd.readouterr().out
    assert all(f"extra       {package} is " in out for package in ("matplotlib", "sacrebleu", "tensorboard"))
    rows = dict(line.split(None, 1) for line in out.splitlines())
    assert set(rows) == {
        "thinwire", "torch", "python", "cpu", "gpu", "kernels", "gloo", "nccl", "clusters", "extra", "methods",
    }  # fmt: skip
    why = emulation.why_not()
    assert rows["clusters"].startswith("can be emulated here" if why is None else f"cannot be emulated here: {why}")


@pytest.mark.parametrize("verb", [["info"], ["bench", "wire", "--numel", "100"]])
def test_unknown_choice_of_kernels_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: list[str]
) -> None:
    monkeypatch.setenv("THINWIRE_KERNELS", "bogus")
    assert cli.run(verb) == 2
    captured = capsys.readouterr()
    assert not captured.out and captured.err.count("\n") == 1 and "THINWIRE_KERNELS must be one of" in captured.err
