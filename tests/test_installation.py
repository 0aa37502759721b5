"""Installing: what pip makes of a clone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from paths import ROOT

import thinwire

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


WHEEL = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
USE = """
import torch, thinwire, thinwire.kernels as kernels
from thinwire.transport import ThreadWorld

def work(net):
    weight = torch.nn.Parameter(torch.zeros(3000))
    reducer = thinwire.Reducer({"weight": weight}, "dgc:density=1,values=fp32", net)
    gradient = torch.full((3000,), float(net.rank))
    reducer.reduce({"weight": gradient})
    return gradient.unique().tolist()

print(thinwire.__file__, ThreadWorld(2).run(work), kernels.describe())
"""


def test_wheel_serves_every_python_and_is_used_from_outside_the_clone(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    clone, built, home = tmp_path / "clone", tmp_path / "built", tmp_path / "environment"
    shutil.copytree(ROOT / "thinwire", clone / "thinwire", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    shutil.copytree(ROOT / "native", clone / "native")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, clone)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    arguments = [sys.executable, "-c", WHEEL, str(built)]
    done = subprocess.run(arguments, cwd=clone, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    (wheel,) = built.glob("*.whl")
    assert wheel.name.startswith(f"thinwire-{thinwire.__version__}-py3-none-") and "none-any" not in wheel.name
    assert "thinwire/kernels/_native.so" in zipfile.ZipFile(wheel).namelist()

    venv.create(home, with_pip=False)
    (site,) = home.glob("lib/python*/site-packages")
    (site / "torch_and_numpy.pth").write_text(
        f"{sysconfig.get_path('purelib')}\n"
    )  # the test's own; no editable install
    pip = [sys.executable, "-m", "pip", "--python", str(home / "bin" / "python")]
    installed = subprocess.run(
        [*pip, "install", "-q", "--no-deps", "--no-index", "--target", str(site), str(wheel)],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert installed.returncode == 0, installed.stderr
    used = subprocess.run(
        [home / "bin" / "python", "-c", USE], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert used.returncode == 0, used.stderr
    assert used.stdout.startswith(str(site)) and "[[0.5], [0.5]]" in used.stdout, used.stdout
    assert "native" in used.stdout and "other sources" not in used.stdout, used.stdout
