"""By default BlockSign and TernGrad leave small and one-dimensional tensors dense, as DGC does."""

from __future__ import annotations

import math
from typing import Any

import plain_wire as plain
import pytest
import torch
from cluster import Cluster
from oracles import blocksign, terngrad
from oracles.cases import Case, dense, distance, follow
from oracles.optimizers import SGD, Adam
from oracles.problem import Problem
from traffic import ceil4, slices, traffic

import thinwire
from thinwire.advisor.cost import plan_exchange

METHODS = [thinwire.BlockSign, thinwire.TernGrad]
TOPOLOGIES = ["sharded", "server"]
ROWS = [
    ("first", 0, torch.Size([16, 3, 3, 3])), ("norm", 1, torch.Size([5000])), ("one", 2, torch.Size([1023, 1])),
    ("two", 3, torch.Size([32, 32])), ("wide", 4, torch.Size([64, 65])), ("out", 5, torch.Size([10, 64])),
]  # fmt: skip
CODED, TAIL = 1024 + 4160, 432 + 5000 + 1023 + 640


@pytest.mark.parametrize("method", METHODS)
def test_tensors_below_1024_elements_and_vectors_are_dense_by_default(method: Any) -> None:
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
def test_default_frames_have_the_bytes_of_the_formula(method: Any, topology: str, size: int) -> None:
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
def test_default_methods_follow_the_simulation(cluster: Cluster, case: Case, N: int) -> None:
    follow(cluster, case, N, {})


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_default_methods_follow_the_simulation_with_buckets_of_dense_tensors_alone(
    cluster: Cluster, case: Case
) -> None:
    """One parameter a bucket: three of the four have nothing to compress, and no scalers to agree on."""
    follow(cluster, case, 3, {"bucket_cap_mb": 1e-4})


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("method", METHODS)
def test_model_of_small_tensors_trains_as_dense(cluster: Cluster, method: Any, topology: str) -> None:
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
