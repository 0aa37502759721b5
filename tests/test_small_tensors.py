"""By default BlockSign and TernGrad leave small and one-dimensional tensors dense, as DGC does."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import plain_wire as plain
import pytest
import torch
import torch.distributed as dist
from cluster import Cluster
from oracles import blocksign, terngrad
from oracles.cases import Case, dense, distance, follow
from oracles.optimizers import SGD, Adam
from oracles.problem import Problem
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from traffic import ceil4, slices, traffic

import thinwire
from thinwire.advisor.cost import plan_exchange
from thinwire.cli._job import Job
from thinwire.lab.recipes.histograms import GradientTap, histograms
from thinwire.transport import ThreadNet, ThreadWorld

METHODS = [thinwire.BlockSign, thinwire.TernGrad]
TOPOLOGIES = ["sharded", "server"]
ROWS = [
    ("first", 0, torch.Size([16, 3, 3, 3])), ("norm", 1, torch.Size([5000])), ("one", 2, torch.Size([1023, 1])),
    ("two", 3, torch.Size([32, 32])), ("wide", 4, torch.Size([64, 65])), ("out", 5, torch.Size([10, 64])),
]  # fmt: skip
CODED, TAIL = 1024 + 4160, 432 + 5000 + 1023 + 640


@pytest.mark.parametrize("method", METHODS)
def test_which_tensors_are_dense_by_default(method: Any) -> None:
    assert method().dense_below == thinwire.DGC().dense_below == 1024
    for which in (method(), method(topology="server"), thinwire.DGC()):
        assert [name for name, _, shape in ROWS if which.is_coded(name, shape)] == ["two", "wide"]
        layout = which.layout(ROWS)
        assert (layout.coded_numel, layout.tail_numel) == (CODED, TAIL)
    assert method(exclude=("w*",)).layout(ROWS).coded_numel == 1024, "a wide output layer must be named"
    assert method(dense_below=0).layout(ROWS).tail_numel == 0


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("method", METHODS)
def test_the_bytes_of_the_default_frames(method: Any, topology: str, size: int) -> None:
    """`two` is served whole by rank 3 mod N, `wide` in slices, and so is the dense tail."""
    signs = method is thinwire.BlockSign
    bits = 1 if signs else math.ceil(math.log2(2 * size + 1))
    scalers = 0 if signs else 2 * 4  # bytes of the all-reduce in which two shared scalers are agreed on
    servers = size if topology == "sharded" else 1
    numels = [[1024] * (3 % servers == r) + [slices(4160, servers)[r]] for r in range(servers)]
    fronts = [36 + 4 * tail + 4 * signs * len(own) for tail, own in zip(slices(TAIL, servers), numels, strict=True)]
    up = [
        front + (ceil4(sum(own)) if signs else plain.padded(math.ceil(sum(own) / 5)))
        for front, own in zip(fronts, numels, strict=True)
    ]
    down = max(front + ceil4(sum(own) * bits) for front, own in zip(fronts, numels, strict=True))
    layout = method().layout(ROWS)
    counted = traffic(method(topology=topology), layout, size)
    for rank, counters in enumerate(counted):
        others = sum(up[r] for r in range(servers) if r != rank)
        replies = down if topology == "sharded" else (size - 1) * down if rank == 0 else 0
        assert counters.handed == scalers + others + replies
    busiest = max(max(one.sent, one.received) for one in counted)
    planned = plan_exchange(method(topology=topology), layout, size).nbytes
    if topology == "sharded":
        assert planned == pytest.approx(busiest, rel=0.12)  # the plan gives every server the same share of `two`
    else:
        assert busiest <= planned <= 2 * busiest  # up and down share the busiest link one after the other


NESTEROV = SGD(momentum=0.9, nesterov=True)
EDGE = Problem(sizes=(32, 32, 5))  # hidden.weight has 1024 elements, which are coded; out.weight 160, and the biases
WIDE = Problem(sizes=(64, 65, 5))  # hidden.weight is cut into slices; out.weight has 325
CASES = [
    Case("BlockSign-edge", blocksign, "BlockSign", NESTEROV, {}, EDGE, steps=6),
    Case("BlockSign-edge, server", blocksign, "BlockSign", NESTEROV, {"topology": "server"}, EDGE, steps=6),
    Case("BlockSign-wide, adam", blocksign, "BlockSign", Adam(), {}, WIDE, steps=4),
    Case("TernGrad-edge", terngrad, "TernGrad", NESTEROV, {"seed": 1}, EDGE, steps=6),
    Case("TernGrad-edge, server", terngrad, "TernGrad", Adam(), {"seed": 2, "topology": "server"}, EDGE, steps=6),
    Case("TernGrad-wide, one scaler", terngrad, "TernGrad", NESTEROV, {"seed": 3, "scaler": "model"}, WIDE, steps=6),
]


@pytest.mark.parametrize("N", [2, 3])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_training_by_default_follows_the_simulation(cluster: Cluster, case: Case, N: int) -> None:
    follow(cluster, case, N, {})


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_buckets_without_any_coded_tensor(cluster: Cluster, case: Case) -> None:
    """One parameter a bucket: three of the four have nothing to compress, and no scalers to agree on."""
    follow(cluster, case, 3, {"bucket_cap_mb": 1e-4})


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("method", METHODS)
def test_a_model_of_small_tensors_trains_as_dense(cluster: Cluster, method: Any, topology: str) -> None:
    oracle, seed = (blocksign, {}) if method is thinwire.BlockSign else (terngrad, {"seed": 0})
    case = Case(f"{method.__name__}-{topology}", oracle, method.__name__, NESTEROV, {**seed, "topology": topology})
    assert distance(case.simulate(3), dense(Problem(), 3, NESTEROV), 3) < 1e-12
    follow(cluster, case, 3, {})
    rows = [row for row in ROWS if row[0] not in ("two", "wide")]
    layout, size = method().layout(rows), 3
    servers = size if topology == "sharded" else 1
    frames = [36 + 4 * share for share in slices(TAIL, servers)]
    for rank, counters in enumerate(traffic(method(topology=topology), layout, size)):
        others = sum(frames[r] for r in range(servers) if r != rank)
        replies = max(frames) if topology == "sharded" else 2 * frames[0] if rank == 0 else 0
        assert counters.handed == others + replies, "frames of the tail, and nothing about scalers"
    rounds = plan_exchange(method(topology=topology), layout, size).rounds
    assert rounds == (size if topology == "sharded" else 2)


def test_histograms_of_a_model_without_ternary_tensors() -> None:
    def work(net: ThreadNet) -> set[str]:
        module = nn.Linear(8, 4)
        tap = GradientTap(module)
        module(torch.ones(2, 8)).sum().backward()
        found = histograms("terngrad", thinwire.TernGrad(), module, tap, 0, net)
        return set(found.by_tag) if found is not None else set()

    assert ThreadWorld(2).run(work) == [{"weight/original", "weight/averaged"}, set()]


# --- runs that began with other defaults --------------------------------------------------------------


OLD = {"blocksign": "blocksign:dense_below=1", "terngrad": "terngrad:dense_below=0"}


def attached(group: dist.ProcessGroup, spec: str) -> thinwire.Wire:
    torch.manual_seed(0)
    model = DDP(nn.Linear(8, 8), process_group=group)
    wire = thinwire.attach(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), spec)
    model(torch.ones(2, 8)).sum().backward()
    return wire


def loaded(group: dist.ProcessGroup, saved_with: str, loaded_into: str, without: str = "") -> str:
    """What is said when a state is loaded, without an option that it did not have yet; nothing where it is taken."""
    first, second = attached(group, saved_with), attached(group, loaded_into)
    state, said = first.state_dict(), ""
    try:
        second.load_state_dict({**state, "method": state["method"].replace(without, "")})
    except ValueError as error:
        said = str(error)
    first.detach()
    second.detach()
    return said


@pytest.mark.parametrize("now", OLD)
def test_a_state_of_the_old_default_is_refused_with_the_way_out(cluster: Cluster, now: str) -> None:
    old = OLD[now]
    option = old.partition(":")[2]
    for said in cluster.run(loaded, 2, old, now):
        assert said.startswith(f"the state belongs to method {now}:") and "\n" not in said
        assert said.endswith(f"; to go on from it attach the state's method ({option})")
    assert cluster.run(loaded, 2, old, old) == ["", ""]


def test_a_ternary_state_from_before_the_option_meant_everything(cluster: Cluster) -> None:
    for said in cluster.run(loaded, 2, OLD["terngrad"], "terngrad", "dense_below=0,"):
        assert said.endswith("attach the state's method (dense_below=0)")
    assert cluster.run(loaded, 2, OLD["terngrad"], OLD["terngrad"], "dense_below=0,") == ["", ""]


@pytest.mark.parametrize("unknown", ["", "dense_below=0,"])
def test_a_run_that_began_with_the_old_defaults_goes_on_with_them(tmp_path: Path, unknown: str) -> None:
    """Also where TernGrad did not know the option when it began."""
    job = Job.checked(recipe="digits", specs=list(OLD), epochs=2, seed=0, device="cpu", out=tmp_path)
    then = [thinwire.parse_method(spec).in_full for spec in OLD.values()]  # what such a folder has
    kept = [method.replace(unknown, "") if method.startswith("terngrad") else method for method in then]
    config = {**json.loads(json.dumps(job.config)), "workers": 2, "methods": kept}
    (tmp_path / "config.json").write_text(json.dumps(config))
    again, _ = Job.resumed(tmp_path, timeout_s=1.0)
    assert again.specs == tuple(OLD) and list(again.methods) == then
    assert [thinwire.parse_method(method) for method in again.methods] == list(map(thinwire.parse_method, OLD.values()))
