"""A method from outside of the package is one file: the one in CONTRIBUTING.md, as it stands there."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers
from cluster import Cluster
from workers import Run, Training, flat, noise

import thinwire
from thinwire.advisor.advice import advise_offline
from thinwire.advisor.cost import Workload, bucket_layouts, plan_exchange
from thinwire.engine.context import ExchangeContext, Hyper
from thinwire.engine.named_state import StateKind
from thinwire.lab.bench.cluster import benched, check_method
from thinwire.methods import registry
from thinwire.transport import ThreadNet, ThreadWorld

ROOT = Path(__file__).parents[2]
ROWS = [("a", 0, torch.Size([40, 50])), ("b", 1, torch.Size([30]))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the file, and what pip leaves beside an installed package of one file."""
    folder = tmp_path_factory.mktemp("site")
    text = (ROOT / "CONTRIBUTING.md").read_text()
    example = re.search(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert example is not None
    (folder / "everyother.py").write_text(example[1])
    info = folder / "everyother-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: everyother\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[thinwire.methods]\neveryother = everyother:EveryOther\n")
    return folder


@pytest.fixture(scope="module")
def extension(folder: Path) -> Iterator[type[thinwire.Method]]:
    """The method, as long as the tests of this file run."""
    sys.path.insert(0, str(folder))
    before = dict(registry._known)
    yield importlib.import_module("everyother").EveryOther
    registry._known.clear()
    registry._known.update(before)
    sys.path.remove(str(folder))
    del sys.modules["everyother"]


def test_the_example_is_short(folder: Path) -> None:
    lines = [line for line in (folder / "everyother.py").read_text().splitlines() if line.strip()]
    code = [line for line in lines if not line.startswith(("from", "import", '"""'))]
    assert len(code) <= 21, "what CONTRIBUTING.md shows is to be read at a glance"


def test_an_extension_is_frozen_named_and_read_back_from_its_own_string(extension: Any) -> None:
    method = thinwire.METHODS["everyother"]()
    assert (
        type(method) is extension and str(method) == "everyother" == method.name and hash(method) == hash(extension())
    )
    assert thinwire.parse_method("everyother:exclude=a+b.*") == extension(exclude=("a", "b.*"))
    for option in fields(method):
        with pytest.raises(FrozenInstanceError):
            setattr(method, option.name, None)
    with pytest.raises(TypeError, match="EveryOther has no option 'colour'; known options: exclude"):
        extension(colour="red")
    with pytest.raises(ValueError, match=r"unknown method 'everyothr' \(did you mean 'everyother'\?\)"):
        thinwire.parse_method("everyothr")


def contract(net: ThreadNet, sgd: bool) -> list[torch.Tensor]:
    """Four exchanges, and a copy that takes the state over after two."""
    method = thinwire.METHODS["everyother"]()
    aggregator, other = method.aggregator(net, sgd), method.aggregator(net, sgd)
    layout = method.layout(ROWS)
    outputs = []
    for step in range(4):
        context = ExchangeContext(layout, step, (Hyper(0.1, 0.9, True, 0.01),) * 2)
        if step == 2:
            other.load_state_dict(workers.through_a_file(aggregator.state_dict()))
        parts = [noise((s.numel,), net.rank, step, s.name) for s in layout.segments]
        again = [part.clone() for part in parts]
        aggregator.reduce(context, parts)
        assert all(part.isfinite().all() for part in parts)
        if step >= 2:
            other.reduce(context, again)
            assert all(torch.equal(a, b) for a, b in zip(parts, again, strict=True))
        outputs += parts
    rest = aggregator.leftover({"a": 2000, "b": 30}, {"a": 0.1, "b": 0.1})
    assert {name: tensor.numel() for name, tensor in rest.items()} == {"a": 2000, "b": 30}
    assert aggregator.residual_square_sum() > 0
    return outputs


@pytest.mark.parametrize("sgd", [True, False])
def test_an_extension_keeps_the_contract_of_aggregators(extension: Any, sgd: bool) -> None:
    first, *others = ThreadWorld(3).run(lambda net: contract(net, sgd))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_an_extension_is_predicted_and_listed(extension: Any) -> None:
    (layout,) = bucket_layouts(extension(), [ROWS])
    sparse = thinwire.parse_method("dropping:density=0.5,values=fp32,scope=tensor")
    assert plan_exchange(extension(), layout, 4) == plan_exchange(sparse, layout, 4), "half of the entries, tried"
    found = advise_offline(Workload.of_size(200_000, 0.01), hosts=4, rate_bits=1e8, methods=["everyother"])
    assert [one.method for one in found.predictions[:2]] == ["dense", "everyother"]
    assert found.step_s("everyother") > 0.01 and not any("not predicted" in note for note in found.notes)
    assert "everyother" in benched()
    check_method("everyother@all")  # its buckets may share an exchange


# --- a memory that keeps vectors of kinds of its own ------------------------------------------------

BACKLOG = '''
from dataclasses import dataclass

import thinwire
from everyother import OneParity
from thinwire.codecs import SparseCodec
from thinwire.collectives import AllGather
from thinwire.engine.aggregators import Exchange
from thinwire.engine.flat_gradient import as_flat
from thinwire.engine.named_state import StateKind
from thinwire.memory.base import StatefulMemory


class Backlog(StatefulMemory):
    """What was not sent, and a running mean of magnitudes that nobody uses."""

    kinds = (StateKind("backlog", leftover=True), StateKind("magnitude", reshard="first"))
    watches = False

    def compensate(self, context, gradients, direct_decay, hint, flag):
        flat = as_flat(gradients)
        backlog, magnitude = (self.state.flat(kind, context.layout, flat.device) for kind in self.state.kinds)
        magnitude.mul_(0.9).add_(flat.abs(), alpha=0.1)
        return backlog.add_(flat), None

    def retain(self, context, x, accepted):
        accepted.subtract_from(x)


@thinwire.method("backlog")
@dataclass(frozen=True, kw_only=True)
class WithBacklog(thinwire.Method):
    """Half of the elements; its memory has names of its own."""

    def aggregator(self, net, optimizer_is_sgd):
        return Exchange(Backlog(), OneParity(), AllGather(SparseCodec(holds_any=True)), net)
'''


@pytest.fixture(scope="module")
def backlog(folder: Path, extension: Any) -> Any:
    (folder / "backlog.py").write_text(BACKLOG)
    return importlib.import_module("backlog").WithBacklog


def reducer_on(net: ThreadNet, spec: str, seed: int = 0) -> tuple[dict[str, torch.Tensor], thinwire.Reducer]:
    weights = {"w": noise((40, 5), 99, seed, "w"), "b": noise((7,), 99, seed, "b")}
    return weights, thinwire.Reducer(weights, spec, net)


def steps(net: ThreadNet, reducer: thinwire.Reducer, weights: dict[str, torch.Tensor], first: int, last: int) -> None:
    for step in range(first, last):
        gradients = {name: noise(tuple(w.shape), net.rank, step, name) for name, w in weights.items()}
        reducer.reduce(gradients)
        for name, weight in weights.items():
            weight.sub_(gradients[name], alpha=0.1)


def mean_of(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([tensor.double() for tensor in tensors]).mean(dim=0)


def test_vectors_of_an_extensions_kinds_are_saved_and_resumed_bit_exact(backlog: Any) -> None:
    def whole(net: ThreadNet) -> torch.Tensor:
        weights, reducer = reducer_on(net, "backlog")
        steps(net, reducer, weights, 0, 6)
        return torch.cat([weight.reshape(-1) for weight in weights.values()])

    def interrupted(net: ThreadNet) -> torch.Tensor:
        weights, reducer = reducer_on(net, "backlog")
        steps(net, reducer, weights, 0, 3)
        saved = workers.through_a_file({"weights": weights, "reducer": reducer.state_dict()})
        _, again = reducer_on(net, "backlog", seed=1)
        again.load_state_dict(saved["reducer"])
        steps(net, again, saved["weights"], 3, 6)
        return torch.cat([weight.reshape(-1) for weight in saved["weights"].values()])

    for a, b in zip(ThreadWorld(3).run(whole), ThreadWorld(3).run(interrupted), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("ranks", "new_ranks"), [(3, 2), (2, 5), (4, 1)])
def test_every_kind_is_redistributed_by_its_own_rule(backlog: Any, ranks: int, new_ranks: int) -> None:
    def save(net: ThreadNet) -> Any:
        weights, reducer = reducer_on(net, "backlog")
        steps(net, reducer, weights, 0, 3)
        return workers.through_a_file(reducer.state_dict())

    saved = ThreadWorld(ranks).run(save)

    def load(net: ThreadNet) -> Any:
        _, reducer = reducer_on(net, "backlog")
        reducer.load_state_dict(saved)
        return workers.own_part(reducer.state_dict())["aggregator"]["memory"], reducer.detach()

    before = [workers.own_part(state)["aggregator"]["memory"] for state in saved]
    for memory, leftover in ThreadWorld(new_ranks).run(load):
        for name in ("w", "b"):
            mean = mean_of([one["backlog"][name] for one in before])
            torch.testing.assert_close(memory["backlog"][name].double(), mean, rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(leftover[name].reshape(-1).double(), mean, rtol=1e-6, atol=1e-7)
            assert torch.equal(memory["magnitude"][name], before[0]["magnitude"][name])


def test_what_an_extension_did_not_send_enters_the_next_gradient_after_a_switch(backlog: Any) -> None:
    """Everything that was put in comes out: sent before, or with the first dense step behind the switch."""

    def work(net: ThreadNet) -> dict[str, torch.Tensor]:
        weights, reducer = reducer_on(net, "backlog")
        applied = {name: torch.zeros(w.shape, dtype=torch.float64) for name, w in weights.items()}
        for step in range(4):
            if step == 3:
                reducer.switch("dense")
            gradients = {name: noise(tuple(w.shape), net.rank, step, name) for name, w in weights.items()}
            reducer.reduce(gradients)
            for name, gradient in gradients.items():
                applied[name] += gradient.double()
        reducer.switch("backlog")
        steps(net, reducer, weights, 4, 5)
        return applied

    for applied in ThreadWorld(3).run(work):
        for name, total in applied.items():
            put_in = [noise(tuple(total.shape), rank, step, name) for rank in range(3) for step in range(4)]
            torch.testing.assert_close(total, 4 * mean_of(put_in), rtol=1e-5, atol=1e-5)


def test_a_rule_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="the state kind 'odd': reshard must be 'mean' or 'first', not 'sum'"):
        StateKind("odd", reshard="sum")


# --- real processes ---------------------------------------------------------------------------------


def trained(group: dist.ProcessGroup, folder: str) -> dict[str, Any]:
    """Through attach and through Reducer, with an extension that the script imports itself."""
    if folder not in sys.path:
        sys.path.insert(0, folder)
    importlib.import_module("everyother")
    spec = "everyother:exclude=out.bias"
    attached = Training(group, Run(spec, "nesterov", 8, "net")).train()
    torch.manual_seed(0)
    problem = workers.Problem()
    module = problem.module()
    optimizer = workers.OPTIMIZERS["nesterov"](module)
    reducer = thinwire.Reducer(module.named_parameters(), spec, group, optimizer)
    for step in range(8):
        optimizer.zero_grad()
        problem.loss(module, dist.get_rank(group), step).backward()
        reducer.reduce({name: p.grad for name, p in module.named_parameters() if p.grad is not None})
        optimizer.step()
    assert reducer.stats.steps == 8 and attached["stats"].steps == 8
    return {"attached": attached["final"], "reduced": flat(module), "leftover": attached["leftover"]}


def test_an_extension_trains_through_attach_and_through_reducer(cluster: Cluster, folder: Path) -> None:
    first, *others = cluster.run(trained, 3, str(folder))
    assert torch.equal(first["attached"], first["reduced"]), "the way in changes no bit"
    assert first["leftover"].abs().sum() > 0
    for other in others:
        assert all(torch.equal(first[key], other[key]) for key in first)


# --- the command line, in a process that finds the plugin by itself ---------------------------------


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    paths = [str(folder), str(ROOT)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "thinwire", *words], capture_output=True, text=True, timeout=240, env=env, cwd=folder
    )


@pytest.mark.parametrize("words", [["train"], ["bench", "cluster"], ["info"]])
def test_an_installed_extension_is_in_the_help_and_in_info(folder: Path, words: list[str]) -> None:
    done = command(folder, *words, *([] if words == ["info"] else ["--help"]))
    assert done.returncode == 0 and "everyother" in done.stdout, done.stdout + done.stderr


def test_an_installed_extension_is_advised_by_the_command(folder: Path) -> None:
    words = "advise --params 1M --compute-ms 5 --hosts 4 --rate 100mbit --methods everyother:exclude=x,gtopk"
    done = command(folder, *words.split())
    assert done.returncode == 0, done.stderr
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("everyother")]
    assert row.endswith(" MB")


def test_an_installed_extension_trains_by_the_command(folder: Path) -> None:
    words = "train --recipe digits --epochs 1 --workers 2 --method everyother:exclude=0.bias --compare dense"
    done = command(folder, *words.split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "everyother:exclude=0.bias" in done.stdout
    wrong = command(folder, "train", "--method", "everyothr")
    assert wrong.returncode == 2 and "did you mean 'everyother'?" in wrong.stderr
