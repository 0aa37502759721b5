"""Importing does no work, imports point one way, and every registered method keeps its contract."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import workers
from cluster import Cluster
from thinwire.engine.context import ExchangeContext, Hyper
from workers import noise

import thinwire
from thinwire.transport import ThreadNet, ThreadWorld

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


# --- contracts: a new name in METHODS is tested without being named here ---------------------------


@pytest.mark.parametrize("name", thinwire.METHODS)
def test_methods_are_frozen_named_and_read_back_from_their_own_string(name: str) -> None:
    method = thinwire.METHODS[name]()
    assert method.name == name and str(method) == name and isinstance(method, thinwire.Method)
    assert thinwire.parse_method(name) == method and hash(method) == hash(thinwire.METHODS[name]())
    for option in fields(method):
        with pytest.raises(FrozenInstanceError):
            setattr(method, option.name, None)
        assert option.kw_only
    with pytest.raises(TypeError):
        thinwire.METHODS[name](1)  # positional
    assert type(method).__doc__


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


def contract(net: ThreadNet, name: str, sgd: bool) -> list[torch.Tensor]:
    """Three exchanges of a method's aggregator with default options, and a copy that takes its state over."""
    method: Any = thinwire.METHODS[name]()
    aggregator, other = method.aggregator(net, sgd), method.aggregator(net, sgd)
    layout = method.layout([("a", 0, torch.Size([40, 50])), ("b", 1, torch.Size([30]))])
    weights = tuple(torch.ones(segment.numel) for segment in layout.segments)
    outputs = []
    for step in range(4):
        context = ExchangeContext(layout, step, (Hyper(0.1, 0.9, True, 0.01),) * 2, weights)
        if step == 2:
            other.load_state_dict(workers.through_a_file(aggregator.state_dict()))
        grad = torch.cat([noise((s.numel,), net.rank, step, s.name) for s in layout.segments])
        parts = [part.clone() for part in layout.split(grad)]
        mean = aggregator.mean(context, grad.clone())
        assert mean.shape == grad.shape and mean.dtype == torch.float32 and mean.isfinite().all()
        if step >= 2:  # the same from the saved state, and in place through reduce()
            other.reduce(context, parts)
            assert torch.equal(torch.cat(parts), mean), f"{name}: reduce is not mean"
        outputs.append(mean.clone())
    numels = {"a": 2000, "b": 30}
    rest = aggregator.leftover(numels, {"a": 0.1, "b": 0.1})
    assert {name: tensor.numel() for name, tensor in rest.items()}.items() <= numels.items()
    kept = [tensor for room in aggregator.state_dict().values() for tensor in room.get("residual", {}).values()]
    squares = sum(float(tensor.double().square().sum()) for tensor in kept)
    assert aggregator.residual_square_sum() == pytest.approx(squares) and bool(rest) == bool(squares)
    return outputs


@pytest.mark.parametrize("sgd", [True, False])
@pytest.mark.parametrize("name", thinwire.METHODS)
def test_every_registered_method_has_a_working_aggregator(name: str, sgd: bool) -> None:
    method = thinwire.METHODS[name]()
    if method.takes_momentum(sgd) and not sgd:
        pytest.skip(f"{name} needs SGD by default")
    results = ThreadWorld(3).run(lambda net: contract(net, name, sgd))
    if not method.replicas_drift:
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_every_registered_method_trains_three_steps_on_three_ranks(cluster: Cluster) -> None:
    runs = [workers.Run(name, "tiny", 3) for name in thinwire.METHODS]  # two tensors are large enough for the defaults
    for run, *results in zip(runs, *cluster.run(workers.train, 3, runs), strict=True):
        assert results[0]["stats"].steps == 3
        assert (results[0]["trajectory"][0] - results[0]["trajectory"][-1]).abs().max() > 0
        if not thinwire.parse_method(run.method).replicas_drift:
            assert len({workers.digest(result["trajectory"]) for result in results}) == 1, run.method
