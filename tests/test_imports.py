"""Importing does no work, imports point one way, and the package offers and does nothing else than it says."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import thinwire

PACKAGE = Path(thinwire.__file__).parent

# From the ground up: a room may import from its own line and from the lines above it.
LAYERS = [
    {"errors", "stats", "ctrl_c", "torch_private"},
    {"kernels"},
    {"transport"},
    {"engine"},
    {"memory"},
    {"codecs", "compressors"},
    {"collectives"},
    {"methods"},
    {"checkpoint", "monitor"},
    {"reducer"},
    {"edges"},
    {"advisor"},
    {"attach"},
]  # what is in no line (the command line, integrations, the lab) uses the engine and is not used by it


def room(module: str) -> str:
    """The part of the package that a module belongs to: thinwire.codecs.frame -> codecs."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports_of(path: Path) -> set[str]:
    """The thinwire modules that a file imports when it is imported, type checking apart."""
    tree = ast.parse(path.read_text())
    hidden = {
        id(node)
        for guard in ast.walk(tree)
        if isinstance(guard, ast.If) and "TYPE_CHECKING" in ast.unparse(guard.test)
        for node in ast.walk(guard)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            found.add(node.module or "")
    return {name for name in found if name.split(".")[0] == "thinwire"}


def files() -> dict[Path, str]:
    return {
        path: room(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)) for path in PACKAGE.rglob("*.py")
    }


def test_imports_point_one_way() -> None:
    height = {name: layer for layer, names in enumerate(LAYERS) for name in names}
    wrong = []
    for path, own in files().items():
        for target in map(room, imports_of(path)) if own in height else ():
            if height.get(target, len(LAYERS)) > height[own]:
                wrong.append(f"{path.relative_to(PACKAGE)} imports {target}")
    assert not wrong, wrong
    above = {"__init__", "__main__", "cli", "integrations", "lab"}
    assert set(height) | above == set(files().values()), "a room is listed and not there, or there and not listed"


def test_importing_does_no_work() -> None:
    """No process group, no thread, no CUDA, no random numbers, no network library, and no command line."""
    code = """
import json, random, sys, threading
import numpy, torch
torch.manual_seed(7)
def dice():
    return torch.get_rng_state().tolist(), repr(random.getstate()), numpy.random.get_state()[1].tolist()
before = dice()
threads = threading.active_count()
import thinwire
print(json.dumps({
    "group": torch.distributed.is_initialized(),
    "threads": threading.active_count() - threads,
    "cuda": torch.cuda.is_initialized(),
    "random": before != dice(),
    "heavy": [m for m in ("typer", "rich", "thinwire.cli", "thinwire.lab.recipes") if m in sys.modules],
}))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent, check=True, timeout=120
    )
    expected = {"group": False, "threads": 0, "cuda": False, "random": False, "heavy": []}
    assert json.loads(done.stdout) == expected
    assert not done.stderr.strip()


def test_public_names_are_those_of_all_once_and_in_order() -> None:
    own = {name for name, it in vars(thinwire).items() if getattr(it, "__module__", "").startswith("thinwire")}
    there = {name for name in own | set(thinwire._MODULES) if not name.startswith("_")}
    assert there == set(thinwire.__all__), "public, and not in __all__"
    assert all(hasattr(thinwire, name) for name in thinwire.__all__)
    order = {name: (not name.isupper(), not name[0].isupper(), name) for name in thinwire.__all__}
    assert thinwire.__all__ == sorted(order, key=order.__getitem__), "twice, or not where a reader looks for it"
    assert re.fullmatch(r"\d+\.\d+\.\d+", thinwire.__version__)


def test_nothing_in_the_package_and_its_examples_unpickles() -> None:
    """docs/security.md promises it: frames are read with struct, texts with json."""
    modules = {"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve"}
    calls = re.compile(r"(.*\.)?(\w+_object(_list)?)|torch\.load|eval|exec|__import__")
    for path in [*PACKAGE.rglob("*.py"), *(PACKAGE.parent / "examples").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not modules & {alias.name.split(".")[0] for alias in node.names}, f"{path}:{node.lineno}"
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in modules, f"{path}:{node.lineno}"
            elif isinstance(node, ast.Call):
                # A user's own checkpoint file is read as tensors and plain values only.
                safe = ast.unparse(node.func) == "torch.load" and "weights_only=True" in ast.unparse(node)
                assert safe or not calls.fullmatch(ast.unparse(node.func)), f"{path}:{node.lineno}"
