"""Faults that a review found, one test each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from thinwire import cli

CPU = torch.device("cpu")


@pytest.mark.parametrize("verb", [["info"], ["bench", "wire", "--numel", "100"]])
def test_an_unknown_choice_of_kernels_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: list[str]
) -> None:
    monkeypatch.setenv("THINWIRE_KERNELS", "bogus")
    assert cli.run(verb) == 2
    captured = capsys.readouterr()
    assert not captured.out and captured.err.count("\n") == 1 and "THINWIRE_KERNELS must be one of" in captured.err


def test_a_folder_is_no_json_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.run(["bench", "wire", "--numel", "100", "--json", str(tmp_path)]) == 2
    assert "it is a folder" in capsys.readouterr().err
