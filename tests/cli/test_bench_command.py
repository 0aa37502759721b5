"""`thinwire bench`: what is said beside the rows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from thinwire import cli
from thinwire.lab.bench.rows import Row


@pytest.mark.parametrize(("x_floor", "is_busy"), [(0.02, True), (0.67, False), (1.2, False), (None, False)])
def test_bench_names_a_floor_that_was_measured_on_a_busy_machine(
    x_floor: float | None, is_busy: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = Row("dgc", "native", "", "cpu", 9000, 1.0, 1.0, 1.0, 1.0, x_floor, None, 1, "abc", "CPU, 1 thread", "today")
    monkeypatch.setattr("thinwire.cli.bench.Bench", lambda *arguments: SimpleNamespace(rows=lambda: iter([row])))
    monkeypatch.setattr("torch.set_num_threads", lambda threads: None)
    assert cli.run(["bench", "kernels", "--sizes", "9000"]) == 0
    sentence = "The machine was busy while the memory copy was timed; repeat this on a quiet one."
    assert (sentence in capsys.readouterr().out) is is_busy


def test_bench_refuses_a_folder_as_json_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.run(["bench", "wire", "--numel", "100", "--json", str(tmp_path)]) == 2
    assert "it is a folder" in capsys.readouterr().err
