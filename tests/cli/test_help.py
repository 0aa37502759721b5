"""Help, and what fits a narrow terminal."""

from __future__ import annotations

import pytest

from thinwire import cli


def test_help_is_shown_without_arguments(capfd: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["bench"]):
        assert cli.run(words) == 2
        out, err = capfd.readouterr()
        assert "Usage: thinwire" in out and not err


def test_help_shows_switches_without_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--help"], ["train", "--help"], ["bench", "--help"], ["bench", "kernels", "--help"]):
        assert cli.run(words) == 0
        assert "bool" not in capsys.readouterr().out.lower()


def test_output_fits_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
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
