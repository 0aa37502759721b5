"""What somebody who follows the README meets first: sentences that must be true, and counters that belong together."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from cluster import Cluster
from heard import heard
from workers import Run

from thinwire.advisor.advice import advise_offline, caution
from thinwire.advisor.cost import Workload
from thinwire.monitor.stragglers import Pace

# --- counters ---------------------------------------------------------------------------------------


def test_two_ranks_that_a_scheduler_lets_run_in_turn_are_no_alarm() -> None:
    assert Pace((0.12, 0.22), 0.38).slowest is None  # 2 ms a step
    assert Pace((0.12, 1.22), 2.38).slowest is not None  # 22 ms a step


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
