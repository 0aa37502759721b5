"""`thinwire bench kernels` times what is shipped: the methods' own objects, at their defaults."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

import thinwire
from thinwire import cli, kernels
from thinwire.lab.bench import kernels as bench
from thinwire.lab.bench.kernels import TimingNet, exchange_seconds
from thinwire.methods import DGC, METHODS

CPU = torch.device("cpu")


def run(folder: Path, *words: str) -> list[dict[str, object]]:
    out = folder / "rows.json"
    size = ["--sizes", "5003", "--repeats", "3", "--threads", str(torch.get_num_threads())]
    assert cli.run(["bench", "kernels", *size, *words, "--json", str(out)]) == 0
    rows: list[dict[str, object]] = json.loads(out.read_text())
    return rows


def test_every_method_is_timed_at_its_defaults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = run(tmp_path)
    backend = kernels.backend_name(CPU)
    assert [(row["name"], row["kernels"]) for row in rows] == [
        ("memory copy", "torch"),
        ("dgc, 2 %, int8: to the frame", "plain torch"),
        ("dgc, 2 %, int8: to the frame", backend),
        ("dgc, 2 %, int8: decode + add 8 frames", backend),
        ("gtopk, 3 %, fp32: to the frame", "plain torch"),
        ("gtopk, 3 %, fp32: to the frame", backend),
        ("gtopk, 3 %, fp32: merge 8 ranks' frames", backend),
        ("terngrad: to the frame", "plain torch"),
        ("terngrad: to the frame", backend),
        ("terngrad: serve and read, 8 ranks", backend),
        ("blocksign: to the frame", "plain torch"),
        ("blocksign: to the frame", backend),
        ("blocksign: serve and read, 8 ranks", backend),
    ]
    for row in rows:
        assert 0 < row["p20_ms"] <= row["p50_ms"] <= row["p80_ms"] and row["numel"] == 5003  # type: ignore[operator]
        name = str(row["name"]).split(",")[0].split(":")[0]
        is_ours = row["kernels"] == backend
        assert row["setting"] == (METHODS[name]().in_full if is_ours else "")
        assert (row["x_torch"] is not None) == (is_ours and str(row["name"]).endswith("to the frame"))
    assert "decode + add 8 frames" in capsys.readouterr().out


def test_another_density_and_other_values_are_beside_the_defaults(tmp_path: Path) -> None:
    settings = {row["setting"] for row in run(tmp_path, "--density", "0.001", "--values", "fp32")}
    assert {DGC().in_full, DGC(density=0.001, values="fp32").in_full} < settings and len(settings) == 6
    assert {DGC(density=0.1).in_full, DGC().in_full} < {row["setting"] for row in run(tmp_path, "--density", "0.1")}
    assert len(run(tmp_path, "--density", "0.02")) == len(run(tmp_path))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--density", "2"], "dgc: density is the share of elements that is sent and must lie in (0, 1], not 2.0."),
        (
            ["--values", "int9"],
            "dgc: values must be one of 'fp32', 'fp16', 'bf16', 'int8', 'int4', 'int2', not 'int9'.",
        ),
        (["--sizes", "100"], "a number of at least 4096."),
    ],
)
def test_mistakes_get_one_sentence(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", "kernels", *words]) == 2
    captured = capsys.readouterr()
    assert not captured.out and captured.err.count("\n") == 1 and captured.err.endswith(f"{sentence}\n")


@pytest.mark.parametrize("spec", ["dgc", "gtopk", "terngrad", "blocksign"])
def test_the_methods_own_objects_are_what_is_timed(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, turns = METHODS[spec], []
    assemble = kind.aggregator

    def aggregator(self: thinwire.Method, net: object, sgd: bool) -> object:
        found = assemble(self, net, sgd)  # type: ignore[arg-type]
        reduce = found.reduce
        found.reduce = lambda context, parts, norms: (turns.append(context), reduce(context, parts, norms))[1]
        return found

    monkeypatch.setattr(kind, "aggregator", aggregator)
    to_frame, from_frames = exchange_seconds(kind(), 5003, CPU, 3)
    assert len(to_frame) == len(from_frames) == 3 and min(*to_frame, *from_frames) > 0
    assert [context.step for context in turns] == list(range(bench.WARMUP + 3))
    assert all(segment.coded for context in turns for segment in context.layout.segments)


def test_what_is_done_while_frames_travel_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 5.0, 7.0, 20.0, 23.0])
    monkeypatch.setattr(bench.time, "perf_counter", lambda: next(now))
    net, frame, done = TimingNet(8, CPU), torch.zeros(4, dtype=torch.uint8), list[Tensor]()
    net.clock()
    assert net.swap(1, frame) is frame
    assert len(net.all_gather(frame, overlap_with=lambda: done.append(frame))) == 8 and len(done) == 1
    net.clock()
    assert net.take_parts() == (1.0, 2.0 + 3.0)


def test_an_exchange_that_sends_nothing_is_no_exchange() -> None:
    net = TimingNet(8, CPU)
    net.clock()
    net.clock()
    with pytest.raises(AssertionError, match="sends frames"):
        net.take_parts()
