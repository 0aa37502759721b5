"""Ctrl-C, killed workers and hosts, full disks: one sentence, and no worker is left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import environment
from paths import ROOT

from thinwire.lab import emulation


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
def test_killed_worker_ends_the_others(long_run: LongRun) -> None:
    process, workers = long_run
    os.kill(workers[-1], signal.SIGKILL)
    _, error = process.communicate(timeout=20)
    assert process.returncode == 1
    assert error.splitlines()[-1].endswith("was ended by SIGKILL; the others were stopped.")
    assert "Traceback" not in error
    assert all_end(workers)


@needs_proc
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_their_parent(long_run: LongRun, number: signal.Signals) -> None:
    process, workers = long_run
    process.send_signal(number)
    process.communicate(timeout=20)
    assert process.returncode == (128 + number if number == signal.SIGTERM else -number)
    assert all_end(workers)


# ---- hosts, ports and disks


REASON = emulation.why_not()
needs_hosts = pytest.mark.skipif(REASON is not None, reason=f"no emulated hosts here: {REASON}")
TRAIN = (sys.executable, "-m", "thinwire", "train")


@needs_hosts
def test_killed_host_is_named_with_step_and_stage() -> None:
    killed = []

    def kill_when_it_trains(rank: int, line: str) -> None:
        if "epoch 1/" in line and not killed:
            killed.append(1)
            there.kill(1)

    with emulation.Cluster(2, grace_s=60) as there:
        result = there.run(
            [*TRAIN, "--method", "dgc", "--epochs", "500", "--timeout", "15"],
            env={"PYTHONPATH": str(ROOT)}, timeout_s=120, on_line=kill_when_it_trains,
        )  # fmt: skip
    said = result.hosts[0].output
    failure = next(line for line in said.splitlines() if "worker 0 failed" in line)
    assert re.search(r"the exchange of step \d+ failed at stage '[\w -]+': no sign of life from rank 1", failure)
    assert "hostname of the client socket" not in said and killed


@needs_hosts
def test_killed_host_is_one_sentence_and_the_run_can_go_on(tmp_path: Path) -> None:
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
def test_full_disk_is_one_sentence_and_leaves_nothing_half_written(tmp_path: Path) -> None:
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
    parts = ["0-18.rank0of2.pt", "0-18.rank1of2.pt"]
    assert re.findall(r"\d+-\d+\.rank.*", ended.stdout) == sorted([*parts, *(f"{part}.done" for part in parts)])
