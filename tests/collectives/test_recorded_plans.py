"""What an exchange puts on the wire is stated beside the code that does it, and summed up by the adviser."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire
from thinwire.advisor.advice import advise_offline, planned
from thinwire.advisor.cost import ExchangeCost, Plan, Workload, bucket_layouts, plan_exchange, predict
from thinwire.advisor.cost.steps import fuses
from thinwire.advisor.link import Link
from thinwire.advisor.profile import frames_grow
from thinwire.collectives import AllGather
from thinwire.collectives.stateless_collective import StatelessCollective
from thinwire.compressors import TopK
from thinwire.engine.aggregators import Exchange
from thinwire.engine.hierarchy import Hierarchy
from thinwire.engine.traffic_plan import Budget, NoPlan
from thinwire.lab import peers
from thinwire.methods import parse_method
from thinwire.methods.shared_parts import gathered_codec
from thinwire.transport import ThreadNet, ThreadWorld

ROWS = [("a.weight", 0, torch.Size([64, 300])), ("a.bias", 1, torch.Size([64])), ("b.weight", 2, torch.Size([9000, 4])),
        ("b.scale", 3, torch.Size([5000]))]  # fmt: skip
BUCKETS = ([ROWS], [ROWS[2:], ROWS[:2]], [ROWS[1:2]])
HOSTS = (2, 3, 4, 6, 64, 1000)
# Of the cost model as it was when it was one file of formulas, one per method.
RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "recorded_plans.json").read_text())


@pytest.mark.parametrize("spec", RECORDED)
def test_plans_and_predictions_are_the_recorded_ones(spec: str) -> None:
    method, recorded = parse_method(spec), RECORDED[spec]
    plans = [
        plan_exchange(method, layout, hosts)
        for buckets in BUCKETS for hosts in HOSTS for layout in bucket_layouts(method, buckets)
    ]  # fmt: skip
    assert [[plan.rounds, plan.nbytes, plan.frames] for plan in plans] == recorded["plans"]
    work, link = Workload.of_size(3_000_000, 0.05, tensor=200_003), Link(1e-4, 8e-9)
    found = [predict(method, work, link, ExchangeCost(0.02, 0.0005, 1.2), hosts, 0.3) for hosts in HOSTS]
    assert [[one.step_s, one.nbytes, one.codec_s, one.wire_s] for one in found] == recorded["predicted"]
    assert frames_grow(method) == recorded["frames_grow"]


def test_a_group_of_one_sends_nothing() -> None:
    for name, kind in thinwire.METHODS.items():
        assert plan_exchange(kind(), bucket_layouts(kind(), [ROWS])[0], 1) == Plan(), name


def test_what_buckets_may_share_is_asked_of_the_parts() -> None:
    assert not fuses(thinwire.Dense()) and not fuses(thinwire.Noop())
    assert not fuses(thinwire.DGC()) and not fuses(thinwire.GTopK()), "int8 scales, and the whole model"
    assert fuses(thinwire.DGC(values="fp32")) and fuses(thinwire.TernGrad()) and fuses(thinwire.BlockSign())


# --- parts from elsewhere ---------------------------------------------------------------------------


class Unstated:
    """A compressor that does not state its budget."""

    def __init__(self, inner: TopK) -> None:
        self.hint, self.measure, self.compress = inner.hint, inner.measure, inner.compress


@dataclass(frozen=True, kw_only=True)
class Tried(thinwire.Method):
    values: str = "fp32"
    indices: str = "rice"

    def aggregator(self, net: Any, optimizer_is_sgd: bool) -> Any:
        memory = thinwire.DGC().aggregator(net, True).memory
        compressor: Any = Unstated(TopK(0.02, scope="balanced"))
        return Exchange(memory, compressor, AllGather(gathered_codec(self)), net)  # type: ignore[arg-type]


def test_a_compressor_that_states_no_budget_is_tried() -> None:
    """Once, without a trace of its state: the payload says how many entries it holds."""
    for rows in BUCKETS:
        for tried, stated in zip(
            bucket_layouts(Tried(), rows), bucket_layouts(thinwire.DGC(values="fp32", dense_below=0), rows), strict=True
        ):
            for hosts in (2, 5):
                expected = plan_exchange(thinwire.DGC(values="fp32", dense_below=0), stated, hosts)
                assert plan_exchange(Tried(), tried, hosts) == expected
    assert Tried().aggregator(ThreadNet(ThreadWorld(1), 0), True).waits(stated) == 1


@dataclass(frozen=True, kw_only=True)
class Unplanned(thinwire.Method):
    def aggregator(self, net: Any, optimizer_is_sgd: bool) -> Any:
        parts = thinwire.DGC().aggregator(net, True)
        return Exchange(parts.memory, parts.compressor, StatelessCollective(), net)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Broken(thinwire.Method):
    def aggregator(self, net: Any, optimizer_is_sgd: bool) -> Any:
        raise RuntimeError("no parts today")


@pytest.mark.parametrize(("method", "why"), [
    (Unplanned(), "StatelessCollective has no plan()"),
    (Broken(), "no parts today"),
    (thinwire.Method(), "Method must define aggregator(net, optimizer_is_sgd)"),
    (peers.parse("powersgd"), "what PyTorch's hook puts on the wire is not stated"),
])  # fmt: skip
def test_what_cannot_be_predicted_is_told_in_one_line_and_the_rest_is_advised(method: Any, why: str) -> None:
    with pytest.raises(NoPlan, match=f"there is no cost model of the method {method.name!r}: "):
        plan_exchange(method, bucket_layouts(method, [ROWS])[0], 2)
    dense = thinwire.Dense()
    chosen, (line,) = planned([dense, method])
    assert chosen == [dense] and why in line and "\n" not in line
    found = advise_offline(Workload.of_size(100_000, 0.01), hosts=2, rate_bits=1e8, methods=[method, "gtopk"])
    assert line in found.notes and {one.method for one in found.predictions} == {"dense", "gtopk"}
    assert line in str(found)


def test_a_hierarchy_plans_what_travels_between_its_machines() -> None:
    inner = thinwire.GTopK().aggregator(ThreadNet(ThreadWorld(1), 0), True)
    outer = Hierarchy(inner, ThreadNet(ThreadWorld(1), 0), ((0, 1), (2, 3)))
    (layout,) = bucket_layouts(thinwire.GTopK(), [ROWS])
    assert outer.plan(layout, 4) == inner.plan(layout, 4) and outer.frames_grow and not outer.fusible


def test_plans_add_up() -> None:
    assert Plan(1, 10, 2, 1) + Plan(2, 5, 0, 3) == Plan(3, 15, 2, 4)
    assert Plan(3, 100).seconds(Link(0.5, 0.01)) == pytest.approx(2.5)
    assert Budget() == Budget(entries=0, spread=(), scales=0, agreed=0)
