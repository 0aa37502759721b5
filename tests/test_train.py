"""`thinwire train`, `thinwire info` and the example script as a user runs them: real processes, real output."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire
from thinwire import cli
from thinwire.cli._display import megabytes, times
from thinwire.cli._job import split_specs
from thinwire.lab.recipes import RECIPES, Digits
from thinwire.lab.recipes.digits import shifted

ROOT = Path(__file__).resolve().parent.parent
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

# Every method at settings that suit 432 steps of a 118 thousand parameter model: warm-ups over four of 24 epochs,
# and local modes averaged about once an epoch.
CONVERGING = (
    "dense:dtype=bf16",
    "dgc:density=0.01,warmup=72",
    "gtopk:density=0.01,warmup=72",
    "terngrad",
    "blocksign",
    "dropping:density=0.01",
    "dropping:density=0.01,local=sum,sync_every=20",
    "dropping:density=0.01,local=partial,sync_every=20",
    "dropping:density=0.01,local=error,sync_every=20",
    "signsgd",
)


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def command(*arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *arguments], capture_output=True, text=True, timeout=timeout, env=environment()
    )


def run_of(folder: Path, spec: str) -> dict[str, Any]:
    runs = json.loads((folder / "summary.json").read_text())["runs"]
    return next(run for run in runs if run["spec"] == spec)


# ---- the convergence test of the issue: real data, 4 processes, every method


@pytest.fixture(scope="module")
def converged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run of the recipe as it ships over all methods; its folder."""
    folder = tmp_path_factory.mktemp("converged") / "run"
    compared = ",".join(CONVERGING)
    done = command(
        "thinwire", "train", "--recipe", "digits", "--workers", "4", "--method", "dense", "--compare", compared,
        "--out", str(folder), timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    print(done.stdout[done.stdout.index("digits: ") :])
    return folder


def test_the_list_of_converging_methods_is_complete() -> None:
    assert {spec.partition(":")[0] for spec in ("dense", *CONVERGING)} == set(thinwire.METHODS) - {"noop"}


@pytest.mark.timeout(960)
def test_dense_learns_the_digits(converged: Path) -> None:
    assert run_of(converged, "dense")["metric"] > 98


@pytest.mark.timeout(960)
@pytest.mark.parametrize("spec", CONVERGING)
def test_method_ends_within_one_point_of_dense(converged: Path, spec: str) -> None:
    dense, run = run_of(converged, "dense"), run_of(converged, spec)
    assert run["metric"] >= dense["metric"] - 1.0
    assert run["bytes_sent"] < dense["bytes_sent"] / 1.9


# ---- the command


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


def test_runs_repeat_bit_for_bit(short_run: tuple[Path, str], tmp_path: Path) -> None:
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


def test_workers_use_the_package_of_the_command(tmp_path: Path) -> None:
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


def test_example_script_under_torchrun() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*launcher, "examples/ddp_digits.py"],
        capture_output=True, text=True, timeout=120, cwd=ROOT, env={**environment(), "EPOCHS": "8"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    accuracy = float(done.stdout.partition("test accuracy ")[2].partition("%")[0])
    assert accuracy > 90
    assert "176 steps" in done.stdout


def test_version_and_info() -> None:
    assert command("thinwire", "--version").stdout == f"thinwire {thinwire.__version__}\n"
    info = dict(line.split(None, 1) for line in command("thinwire", "info").stdout.splitlines())
    assert info["torch"] == torch.__version__
    assert info["gloo"] == "available"
    assert set(info) >= {"thinwire", "python", "nccl", "kernels"}


# ---- mistakes: one sentence, exit code 2, nothing started, nothing written


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
def test_mistakes_get_one_sentence(arguments: list[str], words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(arguments) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("thinwire: ") and err.count("\n") == 1 and err.endswith(".\n")
    for word in words:
        assert word in err


def test_a_worker_count_that_contradicts_torchrun_is_refused() -> None:
    started = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "thinwire", "train", "--workers", "3"],
        capture_output=True, text=True, timeout=60, env={**environment(), **started},
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == "thinwire: --workers 3 does not fit the 2 processes that were started.\n"


# ---- interruptions: no worker is left behind


def descendants(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []
    return children + [other for child in children for other in descendants(child)]


def workers_of(pid: int) -> list[int]:
    """The worker processes below a running command: those without children of their own that run our code."""
    found = [child for child in descendants(pid) if not descendants(child)]
    return [child for child in found if "resource_tracker" not in Path(f"/proc/{child}/cmdline").read_text()]


@pytest.fixture
def long_run() -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A training that would take long, seen to be in its first epochs, and the ids of its two workers."""
    process = subprocess.Popen(
        [sys.executable, "-m", "thinwire", "train", "--workers", "2", "--epochs", "5000", "--method", "dense"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert any("epoch 1/5000" in line for line in process.stdout)
        workers = workers_of(process.pid)
        assert len(workers) == 2
        yield process, workers
    finally:
        process.kill()
        process.communicate()


def all_end(pids: list[int], within_s: float = 10) -> bool:
    def alive(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    deadline_s = time.monotonic() + within_s
    while any(map(alive, pids)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return not any(map(alive, pids))


needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds processes through Linux's /proc")
LongRun = tuple["subprocess.Popen[str]", list[int]]


@needs_proc
def test_ctrl_c_ends_all_workers(long_run: LongRun) -> None:
    process, workers = long_run
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does
    _, error = process.communicate(timeout=20)
    assert process.returncode == 130
    assert error == "thinwire: stopped by Ctrl-C; all 2 workers have ended; nothing was saved (no --out).\n"
    assert all_end(workers)


@needs_proc
def test_a_killed_worker_ends_the_others(long_run: LongRun) -> None:
    process, workers = long_run
    os.kill(workers[-1], signal.SIGKILL)
    _, error = process.communicate(timeout=20)
    assert process.returncode == 1
    assert error.splitlines()[-1].endswith("was ended by SIGKILL; the others were stopped.")
    assert "Traceback" not in error
    assert all_end(workers)


def test_an_exception_in_a_worker_is_one_sentence(tmp_path: Path) -> None:
    done = command(
        "thinwire", "train", "--workers", "2", "--method", "terngrad:exclude=head.*", "--out", str(tmp_path / "run")
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("thinwire: worker ") and done.stderr.count("\n") == 1
    assert "failed; the others were stopped: " in done.stderr and "'head.*' matches no parameter" in done.stderr
    assert not (tmp_path / "run").exists()  # nothing began, nothing is left


@needs_proc
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_their_parent(long_run: LongRun, number: signal.Signals) -> None:
    process, workers = long_run
    process.send_signal(number)
    process.communicate(timeout=20)
    assert process.returncode == (128 + number if number == signal.SIGTERM else -number)
    assert all_end(workers)


# ---- the parts


def test_commas_separate_methods_and_options() -> None:
    assert split_specs("dgc", "") == ["dgc"]
    assert split_specs("dense", "dgc:density=0.01,warmup=72,dense,gtopk, signsgd") == [
        "dense",
        "dgc:density=0.01,warmup=72",
        "gtopk",
        "signsgd",
    ]


def test_numbers_are_short() -> None:
    assert [megabytes(n) for n in (0, 1_234_000, 12_340_000, 1_234_000_000)] == [
        "0.00 MB",
        "1.23 MB",
        "12.3 MB",
        "1,234 MB",
    ]
    assert [times(r) for r in (None, 1.0, 31.44, 512.3)] == ["-", "1.00x", "31.4x", "512x"]


def test_digits_are_all_there_and_split_for_good() -> None:
    recipe = Digits()
    assert (len(recipe.y_train), len(recipe.y_test)) == (1197, 600)
    assert sorted(torch.cat([recipe.y_train, recipe.y_test]).bincount().tolist()) == sorted(
        [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    )
    train = {image.numpy().tobytes() for image in recipe.x_train}
    assert not any(image.numpy().tobytes() in train for image in recipe.x_test)


def test_shifts_move_whole_pixels() -> None:
    x = torch.rand(3, 1, 8, 8)
    moved = shifted(x, torch.tensor([[0, 0], [1, 0], [0, -1]]))
    assert torch.equal(moved[0], x[0])
    assert torch.equal(moved[1, 0, :-1], x[1, 0, 1:]) and not moved[1, 0, -1].any()
    assert torch.equal(moved[2, 0, :, 1:], x[2, 0, :, :-1]) and not moved[2, 0, :, 0].any()


def test_learning_rate_factors_name_methods() -> None:
    for recipe in RECIPES.values():
        factors: Mapping[str, float] = recipe.lr_factors
        assert set(factors) <= set(thinwire.METHODS)
