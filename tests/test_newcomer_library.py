"""What somebody who follows the README meets first: sentences that must be true, and counters that belong together."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers
from cluster import Cluster
from workers import Run, Training

import thinwire
from thinwire.advisor.advice import advise_offline, caution
from thinwire.advisor.cost import Workload
from thinwire.monitor.stragglers import Pace


class _Heard(logging.Handler):
    """Collects the sentences of the thinwire log."""

    def __init__(self) -> None:
        super().__init__()
        self.sentences: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.sentences.append(record.getMessage())


def heard(group: dist.ProcessGroup, run: Run, steps: int = 0) -> list[str]:
    """What this rank logs while a run attaches and trains."""
    handler, log = _Heard(), logging.getLogger("thinwire")
    log.addHandler(handler)
    try:
        training = Training(group, run)
        for step in range(steps):
            training.step(step)
        assert training.wire is not None
        training.wire.detach()
    finally:
        log.removeHandler(handler)
    return handler.sentences


def test_one_machine_is_told_once(cluster: Cluster) -> None:
    first, *others = cluster.run(heard, 3, Run("dgc", "heavy", hierarchy=3))
    assert len(first) == 1 and "mean is exact and nothing is compressed or kept back" in first[0], first
    assert others == [[], []]
    first, *_ = cluster.run(heard, 2, Run("signsgd", "heavy", hierarchy=2))
    assert "the update is signsgd's of it" in first[0] and "nothing is compressed" not in first[0]


# --- counters ---------------------------------------------------------------------------------------


def counted_over_a_resume(group: dist.ProcessGroup) -> None:
    method = "dgc:density=0.02,values=fp32"
    first = Training(group, Run(method, "heavy"))
    for step in range(6):
        first.step(step)
    assert first.wire is not None
    saved, whole = first.wire.state_dict(), first.wire.stats
    second = Training(group, Run(method, "heavy"))
    assert second.wire is not None
    second.wire.load_state_dict(saved)
    for step in range(6, 9):
        second.step(step)
    resumed = second.wire.stats
    assert (resumed.steps, resumed.steps_before) == (3, 6) and "3 steps (after 6 before" in str(resumed)
    assert resumed.bytes_sent == whole.bytes_sent / 2 and resumed.dense_bytes == whole.dense_bytes / 2
    second.wire.load_state_dict(saved)  # back to the saved moment: what was sent meanwhile was sent
    second.step(6)
    assert (second.wire.stats.steps, second.wire.stats.dense_bytes) == (4, whole.dense_bytes / 6 * 4)
    assert second.wire.state_dict()["step"] == 7
    first.wire.detach()
    second.wire.detach()


def test_steps_and_bytes_belong_together_after_a_resume(cluster: Cluster) -> None:
    cluster.run(counted_over_a_resume, 2)


def counted_over_changes(group: dist.ProcessGroup) -> None:
    training = Training(group, Run("dgc:density=0.02,values=fp32", "heavy"))
    assert training.wire is not None
    for step in range(51):  # the ranks compare their pace once
        training.step(step)
    wire, before = training.wire, training.wire.stats
    assert (
        0 < before.bytes_aside < 4 * workers.DOT_NUMEL and before.bytes_sent == before.frame_bytes
    )  # two ranks: a frame each
    wire.switch("terngrad")
    wire.detach()
    after = wire.stats
    counters = ("steps", "frame_bytes", "dense_bytes", "bytes_sent", "bytes_received", "ratio", "link_ratio")
    assert all(getattr(after, name) == getattr(before, name) for name in counters)
    assert after.bytes_aside > before.bytes_aside + 4 * workers.DOT_NUMEL
    assert "more for measuring, checking, averaging or changing the method" in str(after)


def test_what_switch_and_detach_move_is_counted_apart(cluster: Cluster) -> None:
    cluster.run(counted_over_changes, 2)


def counted_by_auto(group: dist.ProcessGroup) -> None:
    training = Training(group, Run("auto", "heavy"))
    assert training.wire is not None
    for step in range(8):
        training.step(step)
    stats = training.wire.stats
    dense = 4 * workers.DOT_NUMEL * 7  # of two ranks a ring all-reduce sends each as much as it has
    assert dense <= stats.bytes_sent <= dense + 4 * workers.DOT_NUMEL and stats.steps == 8, stats
    assert stats.bytes_aside > 1e6 and "more for measuring" in str(stats)
    training.wire.detach()


def test_what_auto_measures_is_counted_apart(cluster: Cluster) -> None:
    cluster.run(counted_by_auto, 2)


def test_two_ranks_that_a_scheduler_lets_run_in_turn_are_no_alarm() -> None:
    assert Pace((0.12, 0.22), 0.38).slowest is None  # 2 ms a step
    assert Pace((0.12, 1.22), 2.38).slowest is not None  # 22 ms a step


def saved_and_resumed(group: dist.ProcessGroup, folder: str) -> tuple[Any, Any]:
    """README's save and resume: the same bits as without."""
    whole = Training(group, Run("dgc:density=0.02", "heavy"))
    for step in range(6):
        if step == 3:
            path = f"{folder}/{whole.rank}.pt"
            state = {"model": whole.module.state_dict(), "optimizer": whole.optimizer.state_dict()}
            torch.save({**state, "wire": whole.wire.state_dict()}, path)
        whole.step(step)
    resumed = Training(group, Run("dgc:density=0.02", "heavy"))
    saved = torch.load(path, weights_only=True)
    resumed.model.module.load_state_dict(saved["model"])
    resumed.optimizer.load_state_dict(saved["optimizer"])
    resumed.wire.load_state_dict(saved["wire"])
    for step in range(3, 6):
        resumed.step(step)
    resumed.wire.detach()
    whole.wire.detach()
    return workers.flat(resumed.module), workers.flat(whole.module)


def test_the_readme_resumes_bit_for_bit(cluster: Cluster, tmp_path: Path) -> None:
    for resumed, whole in cluster.run(saved_and_resumed, 2, str(tmp_path)):
        assert torch.equal(resumed, whole)


# --- sentences --------------------------------------------------------------------------------------


def test_advice_says_what_it_did_not_look_at() -> None:
    found = advise_offline(Workload.of_size(1_000_000, 0.01), hosts=4, rate_bits=1e8)
    assert found.compress
    text = str(found)
    for words in (
        "Speed alone decides",
        "docs/results.md",
        "one core of this machine",
        "100 Mb/s is planned as 94 Mb/s",
    ):
        assert words in text, text
    assert "Not compared: signsgd" in text and found.caution in text
    assert "dgc:warmup=STEPS" in caution("dgc") and "exclude=PATTERN" in caution("terngrad:seed=1")
    assert "Not compared" not in str(
        advise_offline(Workload.of_size(1000, 1.0), hosts=2, rate_bits=1e9, methods=["dgc"])
    )


def test_auto_says_so_too(cluster: Cluster) -> None:
    first, second = cluster.run(heard, 2, Run("auto", "heavy"), 8)
    (chose,) = [sentence for sentence in first if "auto chose" in sentence]
    assert ("Speed alone decides" in chose) == ("auto chose dense: " not in chose) and second == []


def adamw(group: dist.ProcessGroup) -> None:
    training = Training(group, Run(None, "adamw"))
    text = workers.sentence_of(ValueError, lambda: training.happen("attach", "dgc"))
    works = ("terngrad", "blocksign", "gtopk", "dropping", "dgc:momentum_correction=false")
    assert all(method in text for method in works), text
    for method in works:
        training = Training(group, Run(method, "adamw"))
        training.step(0)
        training.happen("detach")


def test_whoever_uses_adamw_learns_what_works(cluster: Cluster) -> None:
    cluster.run(adamw, 2)


def test_several_patterns_are_joined_with_a_plus() -> None:
    with pytest.raises(ValueError, match=r"joined with \+: exclude=4.weight\+4.bias"):
        thinwire.parse_method("terngrad:exclude=4.weight,4.bias")
    assert thinwire.parse_method("terngrad:exclude=4.weight+4.bias").exclude == ("4.weight", "4.bias")
    with pytest.raises(ValueError, match=r"not of the form option=value$"):
        thinwire.parse_method("terngrad:seed=1,4.bias")


# --- installation -----------------------------------------------------------------------------------

BUILD = "import sys; from setuptools import build_meta; build_meta.build_editable(sys.argv[1])"
FIND = (
    "import site, sys; site.addsitedir(sys.argv[1]); import importlib.util as u; print(u.find_spec('thinwire').origin)"
)


def test_a_script_beside_the_clone_finds_the_editable_install(tmp_path: Path) -> None:
    """The clone's folder has the package's name: seen from beside it, it must not be taken for the package."""
    pytest.importorskip("setuptools", minversion="77")
    here, clone = Path(__file__).resolve().parent.parent, tmp_path / "thinwire"
    shutil.copytree(here / "thinwire", clone / "thinwire", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(here / name, clone)
    site, environment = tmp_path / "site", {**os.environ, "CC": "false", "CXX": "false"}  # no native kernels needed
    environment.pop("PYTHONPATH", None)
    built = [sys.executable, "-c", BUILD, str(tmp_path)]
    done = subprocess.run(built, cwd=clone, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    looked = [sys.executable, "-S", "-c", FIND, str(site)]  # without what is installed here already
    found = subprocess.run(looked, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert found.stdout.strip() == str(clone / "thinwire" / "__init__.py"), found.stdout + found.stderr
