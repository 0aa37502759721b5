"""Importing does no work, imports point one way, and the package offers what it says."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import thinwire

PACKAGE = Path(thinwire.__file__).parent

# From the ground up: a module may import from its own line and from the lines above it.
LAYERS = [
    {"errors", "stats", "schedules", "timing", "starting", "warning", "changed"},
    {"kernels", "lookout"},
    {"layout", "transport", "scratch"},
    {"payloads", "named_state"},
    {"memory"},
    {"protocols"},
    {"codecs", "compressors"},
    {"local", "groups", "pace", "probe"},
    {"collectives"},
    {"exchange"},
    {"hierarchy"},
    {"methods", "optimizers", "ddp", "gate", "merging", "replicas", "reshard", "state"},
    {"checkpoint", "guard", "peers", "regroup"},
    {"kept"},
    {"watching"},
    {"saving"},
    {"stepping"},
    {"wire", "cost"},
    {"dry"},
    {"profile"},
    {"advice"},
    {"auto"},
    {"attach"},
]  # what is in no line (the command line, recipes, benchmarks) uses the engine and is not used by it


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
    assert set(height) <= set(files().values()), "a part that is listed is not there"


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
    there = {name for name, it in vars(thinwire).items() if not name.startswith("_") and not isinstance(it, ModuleType)}
    assert there | set(thinwire.__all__) == set(thinwire.__all__), "public, and not in __all__"
    assert all(hasattr(thinwire, name) for name in thinwire.__all__)
    order = {name: (not name.isupper(), not name[0].isupper(), name) for name in thinwire.__all__}
    assert thinwire.__all__ == sorted(order, key=order.__getitem__), "twice, or not where a reader looks for it"
    assert re.fullmatch(r"\d+\.\d+\.\d+", thinwire.__version__)


@pytest.mark.parametrize("text", [
    "dgc:density=0.25,selection=sampled,momentum_correction=false,clip_norm=2.5,warmup=7,values=fp16,indices=delta16",
    "dgc:dense_below=0,exclude=a.*+b.?", "gtopk:density=0.5,momentum_correction=true,dense_below=9,exclude=x",
    "terngrad:clip_sigma=none,share_scaler=false,topology=server,seed=4", "terngrad:clip_sigma=1.5,scaler=model",
    "blocksign:block=64,two_way=false,topology=server", "dropping:density=0.1,local=sum,sync_every=3,warmup=2",
    "gtopk:clip_norm=0.25", "blocksign:clip_norm=2.0", "dropping:clip_norm=1.5", "dense:dtype=bf16",
])  # fmt: skip
def test_a_method_string_is_read_and_written_alike(text: str) -> None:
    method = thinwire.parse_method(text)
    assert thinwire.parse_method(str(method)) == method
    assert set(str(method).split(":")[1].split(",")) == set(text.split(":")[1].split(","))
    assert thinwire.parse_method("  " + text.replace(",", " , ").upper().split(":")[0] + ":" + text.split(":")[1])
