"""Interruptions, run folders, event files and everything that can go wrong with `thinwire train`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from thinwire import cli
from thinwire.cli._display import short
from thinwire.lab import emulation

ROOT = Path(__file__).resolve().parent.parent
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SPECS = ["dgc:density=0.01,warmup=20", "blocksign"]
TRAIN = ["train", "--workers", "2", "--epochs", "12", "--method", SPECS[0], "--compare", SPECS[1]]


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def thinwire(*arguments: str, program: tuple[str, ...] = ("-m", "thinwire")) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *program, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment(), start_new_session=True,
    )  # fmt: skip


def done(process: subprocess.Popen[str], exit_code: int = 0) -> tuple[str, str]:
    out, err = process.communicate(timeout=150)
    assert process.returncode == exit_code, (out, err)
    return out, err


def until(process: subprocess.Popen[str], words: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if words in line:
            return
    raise AssertionError(f"ended without {words!r}: {process.communicate()}")


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def what_was_learned(run: Path) -> list[tuple[Any, ...]]:
    """All that must not depend on where a run was interrupted: everything but times, and bytes, because measured times
    decide which buckets travel together."""
    keys = ("kind", "spec", "epoch", "step", "loss", "metric", "lr")
    return [tuple(row.get(key) for key in keys) for row in metrics(run)]


# ---- a run in one piece, and the same in four


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("whole") / "run"
    done(thinwire(*TRAIN, "--out", str(run)))
    return run


def test_the_run_folder_says_where_time_and_bytes_went(whole: Path) -> None:
    config = json.loads((whole / "config.json").read_text())
    assert config["metric"]["name"] == "accuracy" and config["device"] in ("cpu", "cuda") and config["data"] is None
    there = config["environment"]
    assert set(there) == {"hardware", "commit", "date", "hosts", "device", "backend"}
    assert there["hosts"] == [socket.gethostname()] and config["recipe_settings"] == {"batch_size": 64, "lr": 0.05}
    assert set(there["hardware"]) == {"cpu", "cores", "gpus", "os"}
    rows = metrics(whole)
    lines = [row for row in rows if row["kind"] == "steps" and row["spec"] == SPECS[0]]
    assert [row["step"] for row in lines] == [*range(10, 216, 10), 216]  # 18 steps an epoch
    assert [row["epoch"] for row in rows if row["kind"] == "epoch"] == [*range(1, 13)] * 2
    for row in lines:
        parts = row["breakdown"]
        assert min(parts.values()) >= 0 and parts["compress_s"] > 0 and parts["communicate_s"] > 0
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["metric"] == config["metric"]
    assert [set(run["breakdown"]) for run in summary["runs"]] == [set(lines[0]["breakdown"])] * 2
    for run in summary["runs"]:  # three parts are the step; seconds are rank 0's, parts the mean of both ranks
        step_s = sum(run["breakdown"][part] for part in ("forward_backward_s", "wait_s", "other_s"))
        assert step_s * run["steps"] == pytest.approx(run["seconds"], rel=0.2)
    assert not (whole / "checkpoint").exists()  # a finished run needs none


@pytest.mark.timeout(400)
def test_interrupted_and_resumed_is_uninterrupted(whole: Path, tmp_path: Path) -> None:
    """Ctrl-C inside the first method, SIGTERM from torchrun inside the second, kill -9 a little later."""
    run = tmp_path / "run"
    first = thinwire(*TRAIN, "--out", str(run))
    until(first, "epoch 2/12")
    os.killpg(first.pid, signal.SIGINT)  # what a terminal does
    _, err = done(first, 130)
    stopped = re.fullmatch(r"thinwire: stopped at step (\d+) of 216 of dgc:\S+; go on .* --resume (\S+)\n", err)
    assert stopped is not None and 36 <= int(stopped[1]) <= 216 and Path(stopped[2]).resolve() == run
    assert sorted(p.name for p in run.iterdir()) == ["checkpoint", "config.json", "metrics.jsonl"]
    assert len(list((run / "checkpoint").iterdir())) == 2

    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "thinwire")
    second = thinwire("train", "--resume", str(run), program=torchrun)
    until(second, "blocksign  epoch 2/12")
    second.terminate()
    _, err = second.communicate(timeout=100)
    assert re.search(r"thinwire: stopped at step \d+ of 216 of blocksign; go on", err), err

    third = thinwire("train", "--resume", str(run))
    until(third, "blocksign  epoch 6/12")
    os.killpg(third.pid, signal.SIGKILL)
    third.communicate()
    out, err = done(thinwire("train", "--resume", str(run)))
    assert err == "" and out.startswith("blocksign  goes on after step ")

    assert what_was_learned(run) == what_was_learned(whole)
    ours, theirs = (json.loads((folder / "summary.json").read_text())["runs"] for folder in (run, whole))
    for key in ("spec", "metric", "loss", "steps"):
        assert [row[key] for row in ours] == [row[key] for row in theirs]
    for key in ("bytes_sent", "bytes_sent_max", "ratio", "link_ratio"):
        assert [row[key] for row in ours] == pytest.approx([row[key] for row in theirs], rel=0.2)
    assert sorted(p.name for p in run.iterdir()) == ["config.json", "metrics.jsonl", "summary.json"]
    assert len(json.loads((run / "config.json").read_text())["resumed"]) == 3


# ---- event files


def test_tensorboard_has_scalars_and_the_histograms_of_terngrads_figure_2(tmp_path: Path) -> None:
    accumulators = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="the extra 'tensorboard' is not installed"
    )
    run = tmp_path / "run"
    done(
        thinwire(
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


# ---- what can go wrong on the machine


@contextlib.contextmanager
def launched(monkeypatch: pytest.MonkeyPatch, **variables: str) -> Iterator[None]:
    with monkeypatch.context() as patch:
        for name in LAUNCHER:
            patch.delenv(name, raising=False)
        for name, value in variables.items():
            patch.setenv(name, value)
        yield


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (
            {"WORLD_SIZE": "x"},
            "WORLD_SIZE is set, as a launcher does, but RANK and MASTER_ADDR and MASTER_PORT are not",
        ),
        ({"WORLD_SIZE": "x", "RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "WORLD_SIZE must be a whole number"),
        ({"WORLD_SIZE": "2", "RANK": "x"}, "RANK is set, as a launcher does, but MASTER_ADDR and MASTER_PORT are not"),
        ({"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "RANK is 2, but WORLD_SIZE 2 has"),
        (
            {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1", "LOCAL_RANK": "-1"},
            "LOCAL_RANK must be a whole number, not '-1'.",
        ),
    ],
)
def test_a_launchers_variables_are_checked(
    variables: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with launched(monkeypatch, **variables):
        monkeypatch.setattr("time.sleep", lambda seconds: None)
        assert cli.run(["train"]) == 2
    err = capfd.readouterr().err
    assert words in err and err.count("\n") == 1


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as there:
        return there.getsockname()[1]


def test_an_occupied_port_a_missing_host_and_a_dead_first_host(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["train", "--timeout", "1", "--out", str(tmp_path / "run")]
    two = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    with (
        socket.create_server(("", 0)) as taken,
        launched(monkeypatch, **two, RANK="0", MASTER_PORT=str(taken.getsockname()[1])),
    ):
        assert cli.run(arguments) == 1
        assert "is occupied; choose another MASTER_PORT" in last_line(capfd)
    with launched(monkeypatch, **two, RANK="0", MASTER_PORT=str(free_port())):
        assert cli.run(arguments) == 1
        assert "only 1 of 2 workers came in time; is a host down" in last_line(capfd)
    with launched(monkeypatch, **two, RANK="1", MASTER_PORT=str(free_port())):
        assert cli.run(arguments) == 1
        assert "(MASTER_ADDR:MASTER_PORT) cannot be reached; is the first host up" in last_line(capfd)
    assert not (tmp_path / "run").exists()  # nothing began, nothing is left


def last_line(capfd: pytest.CaptureFixture[str]) -> str:
    out, err = capfd.readouterr()
    assert out == "" and "Traceback" not in err
    return err.splitlines()[-1]


@pytest.mark.skipif(emulation.why_not() is not None, reason=f"no emulated hosts here: {emulation.why_not()}")
def test_a_host_that_dies_is_one_sentence_and_the_run_can_go_on(tmp_path: Path) -> None:
    killed = threading.Event()
    run = tmp_path / "run"
    with emulation.Cluster(2, "1gbit", grace_s=20) as there:

        def on_line(rank: int, line: str) -> None:
            if "epoch 2/" in line and not killed.is_set():
                killed.set()
                threading.Thread(target=there.kill, args=(1,)).start()

        command = [sys.executable, "-m", "thinwire", "train", "--method", "dgc", "--epochs", "500", "--out", str(run)]
        result = there.run(command, env={"PYTHONPATH": str(ROOT)}, on_line=on_line, timeout_s=150)
    said = result.hosts[0].output
    assert result.hosts[0].exit_code == 1 and "Traceback" not in said
    assert re.search(r"thinwire: worker 0 failed: .*(the connection to another worker was lost|rank 1)", said)
    assert f"--resume {os.path.relpath(run)}" in said
    steps = {re.match(r"0-(\d+)\.rank(\d)of2\.pt", p.name).groups() for p in (run / "checkpoint").glob("*.pt")}  # type: ignore[union-attr]
    assert {rank for _, rank in steps} == {"0", "1"}


@pytest.mark.skipif(sys.platform != "linux", reason="mounts a small file system, as Linux does")
def test_a_full_disk_is_one_sentence_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    unshare = ["unshare", "--user", "--map-root-user", "--mount"] if os.getuid() else ["unshare", "--mount"]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("this system allows no mount of a small file system")
    # A checkpoint of two workers takes 2.8 MB: there is room for the first one and not for the second beside it.
    train = f"{sys.executable} -m thinwire train"
    line = (
        f'mount -t tmpfs -o size=4m none "{tmp_path}" && cd "{tmp_path}" && '
        f"{train} --workers 2 --epochs 3 --method blocksign --out run; echo exit $?; ls -A run run/checkpoint; "
        f"dd if=/dev/zero of=filler bs=1k 2>/dev/null; {train} --workers 1 --out other; ls other"
    )
    ended = subprocess.run([*unshare, "sh", "-c", line], capture_output=True, text=True, timeout=150, env=environment())
    first, second, *rest = ended.stderr.splitlines()
    assert (
        first.startswith("thinwire: worker ") and "No space left on device; the one before it is kept; go on" in first
    )
    assert second == f"thinwire: '{tmp_path}/other/config.json' cannot be written: No space left on device."
    assert "ls: cannot access 'other'" in rest[0]
    assert "exit 1" in ended.stdout and ".partial" not in ended.stdout
    assert sorted(re.findall(r"0-18.rank\dof2.pt", ended.stdout)) == ["0-18.rank0of2.pt", "0-18.rank1of2.pt"]


# ---- mistakes: one sentence, exit code 2, nothing started, nothing written


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seed", str(2**70)], ["--seed takes a whole number from 0 to 4294967295."]),
        (["--seed", "-1"], ["--seed takes a whole number from 0 to 4294967295."]),
        (["--device", "gpu"], ["unknown device 'gpu'", "auto, cpu, cuda"]),
        (["--compare", "dense,powrsgd"], ["unknown method 'powrsgd'", "did you mean 'powersgd'?", "bf16"]),
        (["--method", "powersgd:rank=0"], ["powersgd: rank must be a whole number of at least 1, not 0."]),
        (["--method", "auto"], ["unknown method 'auto'", "auto is for thinwire.attach, and thinwire advise"]),
        (["--recipe", "mnist-lenet", "--data", "/no/such"], ["--data '/no/such' is not a folder; ", "get it: "]),
        (["--data", "/tmp"], ["--data '/tmp': the recipe 'digits' brings its own data; leave --data out."]),
        (["--set", "lr"], ["--set: 'lr' is not of the form name=value."]),
        (["--set", "lr=-1"], ["--set: recipe 'digits': lr must be a number of at least 0, not '-1'."]),
        (["--set", "batch_size = 3"], ["a global batch_size of 3, too few for 4 workers;", "with --set."]),
        (["--workers", "65"], ["a global batch_size of 64, too few for 65 workers;"]),
        (
            ["--set", "batch_size=1198", "--in-process"],
            ["the training data of recipe 'digits' does not fill one batch of 1198; set a smaller batch_size."],
        ),
        (["--tensorboard"], ["--tensorboard writes into the run folder; name it with --out."]),
        (["--checkpoint-every", "0"], ["--checkpoint-every takes a whole number of at least 1."]),
        (["--timeout", "0"], ["--timeout takes a number of at least 1."]),
        (["--resume", "/no/such/run"], ["takes a run folder made with --out, and '/no/such/run' does not exist."]),
        (["--resume", __file__], ["--resume takes a run folder made with --out", f"and '{__file__}' is a file."]),
        (["--resume", str(ROOT)], [f"a run folder made with --out, and '{ROOT}' has no config.json."]),
        (["--resume", "/tmp", "--epochs", "3"], ["--resume goes on as the run began; leave out --epochs."]),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) and value[0].startswith("--") else "",
)
def test_mistakes(arguments: list[str], words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["train", *arguments]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("thinwire: ") and err.count("\n") == 1 and err.endswith(".\n")
    assert all(word in err for word in words), err


def test_what_cannot_be_resumed_says_why(whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["train", "--resume", str(whole)]) == 2
    assert "is finished; there is nothing to resume." in capfd.readouterr().err
    config = json.loads((whole / "config.json").read_text())
    for text, words in (("{", "is not JSON"), ("{}", "does not describe a run of this version")):
        (tmp_path / "config.json").write_text(text)
        assert cli.run(["train", "--resume", str(tmp_path)]) == 2
        assert words in capfd.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert cli.run(["train", "--resume", str(tmp_path), "--workers", "3"]) == 2
    assert "has 2 workers, and they can only go on as 2." in capfd.readouterr().err
    assert cli.run(["train", "--out", str(tmp_path)]) == 2
    assert "is not empty; name another with --out, or go on with --resume" in capfd.readouterr().err


def test_a_run_without_a_checkpoint_and_more_workers_than_cores(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The warning is all that too few cores cause; the sentence comes from the workers, once."""
    monkeypatch.setattr("thinwire.cli.train.num_cores", lambda: 1)
    (tmp_path / "config.json").write_text((whole / "config.json").read_text())
    assert cli.run(["train", "--resume", str(tmp_path)]) == 1
    warning, sentence = capfd.readouterr().err.splitlines()
    assert warning.startswith("thinwire: 2 workers share 1 core and take turns")
    assert "has no checkpoint of all 2 workers; the run ended before its first one." in sentence


def test_settings_that_a_recipe_does_not_have(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert cli.run(["train", "--workers", "1", "--set", "lrr=0.1", "--out", str(run)]) == 2
    err = capfd.readouterr().err
    assert (
        err.startswith("thinwire: --set: recipe 'digits' has no setting 'lrr' (did you mean 'lr'?)")
        and err.count("\n") == 1
    )
    assert not run.exists()


def test_tensorboard_that_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.run(["train", "--tensorboard", "--out", str(tmp_path / "run")]) == 2
    assert "pip install 'thinwire[tensorboard]'" in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


def test_info_says_what_is_here(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["info"]) == 0
    out = capfd.readouterr().out
    assert all(f"extra       {package} is " in out for package in ("matplotlib", "sacrebleu", "tensorboard"))
    rows = dict(line.split(None, 1) for line in out.splitlines())
    assert set(rows) == {
        "thinwire", "torch", "python", "cpu", "gpu", "kernels", "gloo", "nccl", "clusters", "extra",
    }  # fmt: skip
    why = emulation.why_not()
    assert rows["clusters"].startswith("can be emulated here" if why is None else f"cannot be emulated here: {why}")


def test_short_numbers() -> None:
    assert [short(n) for n in (999.6, 9_999, 12_345, 2_345_678)] == ["1,000", "9,999", "12.3k", "2.3M"]
