"""Exchanges that are rehearsed over a real net, and steps beside a transfer, give the cost model its numbers."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from cluster import Cluster
from torch import Tensor, nn

import thinwire
from thinwire.advisor.cost import TimedBucket, Workload, plan_exchange
from thinwire.advisor.cost.plans import layouts_of
from thinwire.advisor.link import Link
from thinwire.advisor.microbench import DryRun
from thinwire.advisor.profile import (
    UNTIMED,
    Transfer,
    cut,
    dense_below,
    exchanges_of,
    frames_grow,
    measure_exchange,
    measure_profile,
    measure_work,
)
from thinwire.compressors.topk import _Carried
from thinwire.transport import ThreadNet, ThreadWorld, TorchNet

ROWS = (("a.weight", 0, torch.Size([64, 300])), ("a.bias", 1, torch.Size([64])), ("b.weight", 2, torch.Size([900, 40])))
WORK = Workload(0.1, (TimedBucket(0.1, ROWS),))
CPU = torch.device("cpu")


class SlowNet(ThreadNet):
    """Ranks that are threads; every all-reduce of more than a few numbers takes its time on the wire."""

    def __init__(self, net: ThreadNet, wire_s: float) -> None:
        super().__init__(net.world, net.rank)
        self.wire_s = wire_s
        self.largest_sent = 0

    def all_reduce(self, tensor: Tensor, largest: bool = False) -> None:
        if tensor.numel() > 100:
            self.largest_sent = max(self.largest_sent, tensor.numel())
            self._timed(lambda: time.sleep(self.wire_s))
        super().all_reduce(tensor, largest)


def test_rehearsal_finds_how_much_longer_than_planned_the_wire_takes() -> None:
    """The plan of dense on 2 ranks: 2 rounds and 4 bytes an element over each link, together 0.02 s here."""
    numel = sum(shape.numel() for _, _, shape in ROWS)
    link = Link(0.0, 0.02 / (4 * numel))
    costs = ThreadWorld(2).run(
        lambda net: measure_exchange(SlowNet(net, 0.05), thinwire.parse_method("dense"), WORK, link, True, CPU)
    )
    assert costs[0] == costs[1]
    assert 2.5 <= costs[0].wire < 4.0 and 0.0 < costs[0].computing_s(0) < 0.05


def test_rehearsal_of_a_long_exchange_is_of_a_share() -> None:
    """Planned 20 s: a tenth of it is sent, and what that took counts for the whole."""
    numel = sum(shape.numel() for _, _, shape in ROWS)
    link = Link(0.0, 20.0 / (4 * numel))
    method = thinwire.parse_method("dense")

    def work(net: ThreadNet) -> tuple[float, int]:
        slow = SlowNet(net, 0.02)
        return measure_exchange(slow, method, WORK, link, True, CPU, longest_s=2.0).wire, slow.largest_sent

    (factor, sent), _ = ThreadWorld(2).run(work)
    assert 0.08 * numel < sent < 0.12 * numel
    assert factor == 0.25  # 0.02 s for what was planned as 2 s is odd, and taken as no better than this


@pytest.mark.parametrize("spec", ["dgc:density=0.01", "gtopk:density=0.001,momentum_correction=false"])
def test_rehearsal_is_no_worse_to_a_carried_threshold_than_training(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that has to search the whole gradient takes several times as long: the timed ones do not."""
    seen: list[tuple[int | None, int]] = []
    update = _Carried.update

    def noting(self: _Carried, passed: int | None, k: int, smallest: float) -> None:
        seen.append((passed, k))
        update(self, passed, k, smallest)

    monkeypatch.setattr(_Carried, "update", noting)
    run = DryRun(thinwire.parse_method(spec), [(("a.weight", 0, torch.Size([1000, 600])),)], 4, True, CPU)
    for _ in range(UNTIMED):
        run.seconds()
    seen.clear()
    for _ in range(10):
        run.seconds()
    assert len(seen) == 10 and all(passed is not None and passed >= k for passed, k in seen), seen


def test_cutting_keeps_names_order_and_vectors() -> None:
    short = cut(ROWS, 0.1)
    assert [(name, ordinal) for name, ordinal, _ in short] == [(name, ordinal) for name, ordinal, _ in ROWS]
    assert [shape for _, _, shape in short] == [torch.Size([6, 300]), torch.Size([64]), torch.Size([90, 40])]
    assert cut(ROWS, 1.0) is ROWS and cut(ROWS, 1e-9)[0][2] == torch.Size([1, 300])


def test_cutting_leaves_the_same_tensors_to_the_compressor() -> None:
    method = thinwire.parse_method("terngrad:dense_below=1024")
    rows = [*ROWS, ("c.weight", 3, torch.Size([64, 16])), ("d.weight", 4, torch.Size([31, 33]))]
    short = cut(rows, 1e-3, dense_below(method))
    assert [method.is_coded(name, shape) for name, _, shape in short] == [True, False, True, True, False]
    assert [tuple(shape) for _, _, shape in short] == [(4, 300), (64,), (26, 40), (64, 16), (31, 33)]


@pytest.mark.parametrize(("beside_s", "wanted"), [(0.0, 1.0), (0.1, 0.0)])
def test_transfer_overlaps_by_what_a_step_beside_does_not_notice(
    beside_s: float, wanted: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of 0.2 s and a transfer of 0.1 s: together 0.2 s where they do not meet, 0.3 s where they share a core."""
    takes = iter([0.1, 0.2 + beside_s])
    monkeypatch.setattr("thinwire.advisor.profile.slowest_s", lambda net, work: next(takes))
    transfer = Transfer(ThreadNet(ThreadWorld(2), 0), Link(0.0, 8e-9), 0.1)
    transfer.alone()
    transfer.beside(lambda: None)
    assert transfer.overlap(0.2) == pytest.approx(wanted)


def test_transfer_on_a_free_link_overlaps_wholly() -> None:
    transfer = Transfer(ThreadNet(ThreadWorld(1), 0), Link(0.0, 0.0), 0.1)
    transfer.alone()
    transfer.beside(lambda: None)
    assert transfer.overlap(0.2) == 1.0


def test_measured_step_has_its_gradients_and_leaves_no_hook() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    calls = []

    def step() -> None:
        calls.append(1)
        model(torch.ones(4, 8)).sum().backward()

    work = measure_work(ThreadNet(ThreadWorld(1), 0), dict(model.named_parameters()), step)
    assert work.numel == 90 and 0 < work.buckets[-1].ready_s <= work.compute_s and len(calls) == 2 + 3
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())


def test_measured_step_that_fails_leaves_no_hook() -> None:
    model = nn.Linear(8, 2)

    def step() -> None:
        raise MemoryError("no room")

    for measure in (measure_work, lambda *arguments: measure_profile(*arguments, methods=[])):
        with pytest.raises(MemoryError):
            measure(ThreadNet(ThreadWorld(1), 0), dict(model.named_parameters()), step)
        assert all(not p._post_accumulate_grad_hooks for p in model.parameters())


def measures(group: Any) -> tuple[Any, int]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    net = TorchNet(group, CPU)
    methods = [thinwire.parse_method(spec) for spec in ("noop", "dense", "dgc", "gtopk", "terngrad", "blocksign")]
    found = measure_profile(
        net, dict(model.named_parameters()), lambda: model(torch.ones(4, 64)).sum().backward(), methods
    )
    return found, net.traffic.handed


def test_profile_of_real_ranks_is_the_same_and_counts_no_bytes(cluster: Cluster) -> None:
    (first, handed), (second, _), (third, _) = cluster.run(measures, 3)
    assert first == second == third and handed == 0
    assert first.hosts == 3 and first.work.numel == 64 * 256 + 256 + 2570 and first.link.beta_s_per_byte > 0
    assert list(first.costs) == ["noop", "dense", "dgc", "gtopk", "terngrad", "blocksign"]
    sent = {}
    for spec, cost in first.costs.items():
        method = thinwire.parse_method(spec)
        (layout,) = layouts_of(method, exchanges_of(method, first.work))
        assert cost.computing_s(plan_exchange(method, layout, 3).frames) > 0, spec
        sent[spec] = first.predict(method).nbytes
    assert sent["noop"] == 0 < max(sent["dgc"], sent["gtopk"], sent["terngrad"], sent["blocksign"]) < sent["dense"]
    assert first.costs["noop"].wire == 1.0


def test_frames_grow_with_the_model_where_they_are_gathered() -> None:
    grow = {spec for spec in thinwire.METHODS if frames_grow(thinwire.parse_method(spec))}
    assert grow == {"dgc", "gtopk", "dropping", "perlayer", "sparseloco"}  # perlayer is dgc unless told
