"""`thinwire bench`: what is said beside the rows."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from thinwire import cli
from thinwire.lab.bench import published_codec
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


def test_bench_wire_has_sparselocos_published_codec_beside_ours(tmp_path: Path) -> None:
    assert (
        cli.run(["bench", "wire", "--numel", "262144", "--densities", "0.015625", "--json", str(tmp_path / "w")]) == 0
    )
    rows = {(row["values"], row["indices"]): row for row in json.loads((tmp_path / "w").read_text())}
    ours, theirs = rows["int2", "rice"], rows["2 bits", "12 bits, SparseLoCo's"]
    k = 262144 // 4096 * 64
    assert theirs["frame_bytes"] == k * 14 // 8 + 16 and theirs["bits"] == pytest.approx(14, abs=0.1)
    assert ours["frame_bytes"] < 0.8 * theirs["frame_bytes"]
    assert 2 < theirs["error"] / ours["error"] < 4  # 0.0125 and 0.0045 of the square, for a Gaussian
    assert rows["fp32", "rice"]["error"] == 0 < rows["int8", "rice"]["error"] < rows["int4", "rice"]["error"]


def test_published_codec_reads_a_bin_as_its_mean() -> None:
    values = torch.tensor([-4.0, -3.0, 3.0, 4.0, 0.1])
    bins, read = published_codec.quantized(values)
    spread = float(values.std())
    assert bins.tolist() == [min(3, max(0, round((v - 0.02) / (1.5 * spread) + 2))) for v in values.tolist()]
    for b in set(bins.tolist()):
        assert float(read[b]) == pytest.approx(float(values[bins == b].mean()))
