"""What is predicted of local steps: the bytes that real ranks send, and an equal part of a round for every step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cluster import Cluster
from torch import nn

import thinwire
from thinwire.advisor.auto import compared
from thinwire.advisor.cost import ExchangeCost, TimedBucket, Workload, predict
from thinwire.advisor.link import Link

EVERY, STEPS = 3, 6
LINK = Link(0.01, 1e-6)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(300, 400), nn.ReLU(), nn.Linear(400, 10))


def predicted(spec: str, hosts: int, cost: ExchangeCost = ExchangeCost(0.0)) -> Any:  # noqa: B008
    rows = tuple((name, place, p.shape) for place, (name, p) in enumerate(net().named_parameters()))
    return predict(thinwire.parse_method(spec), Workload(0.1, (TimedBucket(0.1, rows),)), LINK, cost, hosts)


def sent(group: Any, spec: str) -> float:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wire = thinwire.attach(model, optimizer, spec, group=group)
    torch.manual_seed(torch.distributed.get_rank(group))
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, 300)).square().mean().backward()
        optimizer.step()
    stats = wire.stats
    wire.detach()
    return stats.bytes_sent / STEPS


@pytest.mark.parametrize("spec", [f"sparseloco:every={EVERY},density=0.06", f"diloco:every={EVERY},dtype=bf16"])
def test_planned_bytes_are_those_that_are_sent(cluster: Cluster, spec: str) -> None:
    for hosts in (2, 3):
        meeting = 40 * (hosts - 1) / EVERY  # which statistics count as overhead
        measured = max(cluster.run(sent, hosts, spec))
        assert predicted(spec, hosts).nbytes - meeting == pytest.approx(measured, rel=0.05)


def test_a_step_has_its_part_of_a_round() -> None:
    one, ten = (predicted(f"local:every={every},method=dense", 4) for every in (1, 10))
    assert one.step_s - 0.1 == pytest.approx(10 * (ten.step_s - 0.1)) and one.nbytes == pytest.approx(10 * ten.nbytes)
    dense = predicted("dense", 4)
    meeting = LINK.seconds(3 * 40, 3)
    assert one.step_s - meeting == pytest.approx(dense.step_s)
    slow = predicted("local:every=10,method=dense", 4, ExchangeCost(0.5))
    assert slow.step_s - ten.step_s == pytest.approx(0.05) and slow.codec_s == pytest.approx(0.05)


def test_rounds_are_compared_for_sgd_and_not_by_auto() -> None:
    assert any(spec.startswith("sparseloco:") for spec in compared(True))
    assert not any(thinwire.parse_method(spec).outer_rule for spec in compared(False))
