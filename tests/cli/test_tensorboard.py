"""Event files: scalars, and the histograms of TernGrad's figure 2."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from command import done, started

from thinwire import cli


def test_tensorboard_has_scalars_and_the_histograms_of_terngrads_figure_2(tmp_path: Path) -> None:
    accumulators = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="the extra 'tensorboard' is not installed"
    )
    run = tmp_path / "run"
    done(
        started(
            "train", "--workers", "2", "--epochs", "1", "--method", "terngrad:exclude=8.weight", "--tensorboard",
            "--out", str(run),
        )
    )  # fmt: skip
    (folder,) = (run / "tensorboard").iterdir()
    events = accumulators.EventAccumulator(str(folder), size_guidance={"histograms": 0})
    events.Reload()
    tags = events.Tags()
    assert {"loss/train", "accuracy", "megabytes_sent", "ratio", "step/wait_s"} <= set(tags["scalars"])
    assert [event.step for event in events.Scalars("loss/train")] == [10, 18]
    stages = {f"gradient/2.weight/{stage}" for stage in ("original", "clipped", "ternary", "averaged")}
    assert stages <= set(tags["histograms"])
    assert "gradient/8.weight/ternary" not in tags["histograms"]  # it travels dense
    found = {tag: events.Histograms(tag)[0].histogram_value for tag in stages}
    ternary = found["gradient/2.weight/ternary"]
    assert len([count for count in ternary.bucket if count > 0]) == 3  # -s, 0 and s
    original, clipped = found["gradient/2.weight/original"], found["gradient/2.weight/clipped"]
    assert clipped.max < original.max and ternary.max >= clipped.max  # the scaler is shared: the largest of both ranks
    assert original.num == ternary.num == 64 * 32 * 9


def test_tensorboard_that_is_not_installed_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "tensorboard" else found(name))
    assert cli.run(["train", "--tensorboard", "--out", str(tmp_path / "run")]) == 2
    assert "pip install 'thinwire[tensorboard]'" in capfd.readouterr().err
    assert not (tmp_path / "run").exists()
