"""`thinwire train` as a user runs it: real processes, real output."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from command import command, environment, run_of

from thinwire.lab.recipes import Digits


@pytest.fixture(scope="module")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("short") / "run"
    done = command(
        "thinwire", "train", "--workers", "2", "--epochs", "2", "--method", "dgc:density=0.01,warmup=8",
        "--compare", "signsgd,dense", "--seed", "3", "--out", str(folder),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return folder, done.stdout


def test_train_prints_plain_lines_and_a_table(short_run: tuple[Path, str]) -> None:
    _, text = short_run
    assert "\x1b" not in text and "\r" not in text
    lines = text.splitlines()
    epochs = [line for line in lines if "epoch " in line]
    assert len(epochs) == 6
    assert epochs[0].startswith("dgc:density=0.01,warmup=8  epoch 1/2  loss ")
    table = {line.split()[0]: line.split() for line in lines if line.startswith(" ")}
    assert {"method", "dgc:density=0.01,warmup=8", "signsgd", "dense"} <= set(table)
    assert table["dense"][2] == "-" and table["dense"][3] == "1.00x"
    assert float(table["dgc:density=0.01,warmup=8"][3].removesuffix("x")) > 3
    assert "signsgd ran with 0.02 times the recipe's learning rate." in lines


def test_train_writes_the_run_folder(short_run: tuple[Path, str]) -> None:
    folder, _ = short_run
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "metrics.jsonl", "summary.json"]
    config = json.loads((folder / "config.json").read_text())
    assert config["specs"] == ["dgc:density=0.01,warmup=8", "signsgd", "dense"]
    assert (config["workers"], config["epochs"], config["seed"]) == (2, 2, 3)
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    epochs = [(row["spec"], row["epoch"]) for row in metrics if row["kind"] == "epoch"]
    assert epochs == [(s, e) for s in config["specs"] for e in (1, 2)]
    dense = run_of(folder, "dense")
    parameters = sum(p.numel() for p in Digits().model().parameters())
    assert dense["steps"] == 2 * Digits().num_batches(2)
    assert dense["bytes_sent"] == pytest.approx(4 * parameters * dense["steps"], rel=0.01)  # a ring of two


def test_train_repeats_bit_for_bit(short_run: tuple[Path, str], tmp_path: Path) -> None:
    spec = "dgc:density=0.01,warmup=8"
    done = command(
        "thinwire", "train", "--workers", "2", "--epochs", "2", "--method", spec, "--seed", "3",
        "--out", str(tmp_path / "again"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, again = run_of(short_run[0], spec), run_of(tmp_path / "again", spec)
    assert (first["loss"], first["metric"], first["bytes_sent"]) == (
        again["loss"],
        again["metric"],
        again["bytes_sent"],
    )


def test_train_with_one_worker_says_that_nothing_is_sent(tmp_path: Path) -> None:
    done = command("thinwire", "train", "--workers", "1", "--epochs", "1", "--method", "dgc")
    assert done.returncode == 0, done.stderr
    assert "nothing is sent" in done.stderr


def test_train_workers_use_the_package_of_the_command(tmp_path: Path) -> None:
    """Another folder of that name, where the user happens to stand, must not become the workers' package."""
    (tmp_path / "thinwire").mkdir()
    (tmp_path / "thinwire" / "__init__.py").write_text("raise RuntimeError('the wrong thinwire')\n")
    program = "import sys; sys.path.pop(0); from thinwire.cli import run; sys.exit(run(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", program, "train", "--workers", "2", "--epochs", "1", "--out", "run"],
        capture_output=True, text=True, timeout=120, env=environment(), cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert (tmp_path / "run" / "summary.json").exists()


def test_train_joins_torchrun(tmp_path: Path) -> None:
    done = command(
        "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "thinwire", "train",
        "--epochs", "1", "--method", "blocksign", "--compare", "dense", "--out", str(tmp_path / "run"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("blocksign  epoch 1/1") == 1  # rank 0 speaks for all
    assert json.loads((tmp_path / "run" / "config.json").read_text())["workers"] == 2
    assert {run["spec"] for run in json.loads((tmp_path / "run" / "summary.json").read_text())["runs"]} == {
        "blocksign",
        "dense",
    }
