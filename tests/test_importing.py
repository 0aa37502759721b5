"""`import thinwire` does no work and needs torch and numpy alone; the command line is the lab's."""

from __future__ import annotations

import ast
import json
import os
import pickle
import pydoc
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import thinwire
from thinwire import cli

ROOT = Path(thinwire.__file__).parents[1]
SENTENCE = "thinwire: the command needs typer and rich: pip install 'thinwire[lab]'.\n"

# Python runs this first. What was installed beside Python and is not named cannot be found, as if it were not there.
ONLY = """
import importlib.machinery, os, sys
class Only(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        spec = super().find_spec(name, path, target)
        installed = spec is not None and "-packages" in str((spec.origin, spec.submodule_search_locations))
        return None if installed and name.split(".")[0] not in os.environ["ONLY"].split() else spec
sys.meta_path[:] = [Only if finder is importlib.machinery.PathFinder else finder for finder in sys.meta_path]
"""

IMPORTING = """
import json, random, signal, sys, threading

def handlers():
    return [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())]

untouched = handlers(), threading.active_count()
import thinwire
light = [module for module in sys.modules if module.split(".")[0] in ("thinwire", "torch", "numpy")]
light_untouched = untouched == (handlers(), threading.active_count())

import numpy, torch
torch.manual_seed(7)

def state():
    dice = torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()
    return dice, handlers(), threading.active_count(), torch.cuda.is_initialized(), torch.distributed.is_initialized()

before, modules = state(), set(sys.modules)
for name in thinwire.__all__:
    getattr(thinwire, name)
added = {module.split(".")[0] for module in set(sys.modules) - modules} - sys.stdlib_module_names
untouched = light_untouched and before == state()
lab = [module for module in sys.modules if module.startswith(("thinwire.cli", "thinwire.lab"))]
print(json.dumps({"light": light, "untouched": untouched, "added": sorted(added), "lab": lab}))
"""

ORDERS = """
import importlib, sys
import torch
WAYS = (
    "import thinwire.attach",
    "from thinwire.attach import attach",
    "from thinwire import attach",
    "from thinwire import *",
    "import thinwire.advisor.auto, thinwire.edges.wire, thinwire.advisor.advice",
    "importlib.import_module('thinwire.attach')",
)
for first in range(len(WAYS)):
    order = WAYS[first:] + WAYS[:first]
    for module in [m for m in sys.modules if m.split(".")[0] == "thinwire"]:
        del sys.modules[module]
    for way in order:
        exec(way, {"importlib": importlib})
        thinwire = sys.modules["thinwire"]
        for name, module in (("attach", "thinwire.attach"), ("advise", "thinwire.advisor.advice")):
            function = getattr(thinwire, name)
            assert function is getattr(sys.modules[module], name), (order, way, function)
            assert type(function).__name__ == "function" and type(sys.modules[module]).__name__ == "module"
    try:
        thinwire.attach(None, None, "dgc")
    except ValueError as error:
        assert "attach needs a DistributedDataParallel model, not NoneType" in str(error), error
print("ok")
"""


def installed_with(*names: str) -> set[str]:
    """The top-level modules of these distributions and of all that they require."""
    found: set[str] = set()
    left = list(names)
    while left:
        name = re.sub(r"[-_.]+", "-", left.pop()).lower()
        try:
            requires = metadata.requires(name) if name not in found else None
        except metadata.PackageNotFoundError:  # for another system
            continue
        found.add(name)
        left += [re.match(r"[\w.-]+", text)[0] for text in requires or () if "extra ==" not in text]  # type: ignore[index]
    owners = metadata.packages_distributions()
    return {module for module, of in owners.items() if {re.sub(r"[-_.]+", "-", o).lower() for o in of} & found}


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that finds torch, numpy, what these require, and thinwire."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "sitecustomize.py").write_text(ONLY)
    only = installed_with("torch", "numpy")
    assert {"torch", "numpy", "typing_extensions"} <= only and not only & {"typer", "rich", "click", "matplotlib"}
    paths = os.pathsep.join([str(folder), str(ROOT)])
    return {**os.environ, "PYTHONPATH": paths, "ONLY": " ".join(sorted(only))}


def python(environment: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=environment, cwd=ROOT, timeout=240
    )


def test_importing_does_no_work_and_imports_nothing_else(bare: dict[str, str]) -> None:
    """No torch at first; then no process group, thread, signal handler, CUDA or random number, and no other library."""
    done = python(bare, "-c", IMPORTING)
    assert not done.stderr.strip()
    assert json.loads(done.stdout) == {"light": ["thinwire"], "untouched": True, "added": ["thinwire"], "lab": []}


def test_training_needs_torch_and_numpy_alone(bare: dict[str, str]) -> None:
    example = str(ROOT / "examples" / "ddp_digits.py")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    done = python({**bare, "EPOCHS": "1", "OMP_NUM_THREADS": "1"}, *torchrun, example)
    assert done.returncode == 0, done.stderr
    assert "test accuracy" in done.stdout and "x less" in done.stdout


def test_the_command_without_the_lab_says_how_to_install_it(bare: dict[str, str]) -> None:
    for arguments in (("info",), ("train", "--workers", "2"), ()):
        done = python(bare, "-m", "thinwire", *arguments)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", SENTENCE)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    done = python({**bare, "OMP_NUM_THREADS": "1"}, *torchrun, "-m", "thinwire", "train")
    assert done.returncode != 0 and done.stderr.count(SENTENCE) == 1, done.stderr


def test_attach_is_the_function_whoever_imported_the_module_of_that_name_first() -> None:
    done = python({**os.environ, "PYTHONPATH": str(ROOT)}, "-c", ORDERS)
    assert done.stdout == "ok\n", done.stderr


def test_type_checkers_and_python_are_told_the_same_names() -> None:
    block = next(node for node in ast.parse(Path(thinwire.__file__).read_text()).body if isinstance(node, ast.If))
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    told = {name.name: line.module for line in block.body if isinstance(line, ast.ImportFrom) for name in line.names}
    assert told == thinwire._MODULES
    assert sorted(thinwire.__all__) == sorted(told)
    assert thinwire.__version__.count(".") == 2


def test_public_names_behave_like_those_of_any_module() -> None:
    everything: dict[str, object] = {}
    exec("from thinwire import *", everything)
    assert set(thinwire.__all__) <= set(everything) and set(thinwire.__all__) <= set(dir(thinwire))
    assert everything["attach"] is thinwire.attach
    for name in thinwire.__all__:
        value = getattr(thinwire, name)
        if name != "METHODS":
            assert pickle.loads(pickle.dumps(value)) is value
    assert pickle.loads(pickle.dumps(thinwire.DGC(density=0.5))) == thinwire.DGC(density=0.5)
    page = pydoc.render_doc(thinwire, renderer=pydoc.plaintext)
    assert all(name in page for name in thinwire.__all__) and "attach(model" in page
    with pytest.raises(AttributeError, match="module 'thinwire' has no attribute 'atach'"):
        thinwire.atach  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError):
        exec("from thinwire import atach")


def test_every_install_line_names_an_extra_that_is_there() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no TOML reader")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert [re.match(r"\w+", text)[0] for text in project["dependencies"]] == ["torch", "numpy"]  # type: ignore[index]
    assert set(cli.LAB) <= {re.match(r"\w+", text)[0] for text in extras["lab"]}  # type: ignore[index]
    for path in (ROOT / "README.md", ROOT / "Makefile", *(ROOT / "thinwire").rglob("*.py")):
        for named in re.findall(r"(?:thinwire|'\.|\"\.)\[([\w,]+)\]", path.read_text()):
            assert set(named.split(",")) <= set(extras), f"{path}: {named}"
