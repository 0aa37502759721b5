"""Installing: what pip makes of a clone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from paths import ROOT

BUILD = "import sys; from setuptools import build_meta; build_meta.build_editable(sys.argv[1])"
FIND = (
    "import site, sys; site.addsitedir(sys.argv[1]); import importlib.util as u; print(u.find_spec('thinwire').origin)"
)


def test_editable_install_is_found_by_a_script_beside_the_clone(tmp_path: Path) -> None:
    """The clone's folder has the package's name: seen from beside it, it must not be taken for the package."""
    pytest.importorskip("setuptools", minversion="77")
    here, clone = ROOT, tmp_path / "thinwire"
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
