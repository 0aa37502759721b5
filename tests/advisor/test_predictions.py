"""Predicted seconds: what overlaps with backward, and how steps grow with hosts and slow links."""

from __future__ import annotations

import pytest
import torch

import thinwire
from thinwire.advisor.cost import ExchangeCost, TimedBucket, Workload, predict, schedule
from thinwire.advisor.link import Link


def test_schedule_without_jobs_is_the_computation() -> None:
    assert schedule(1.0, 0.9, [], 1.0) == pytest.approx(1.0)
    assert schedule(1.0, 0.9, [(0.5, 0.0, 0.0)], 1.0) == pytest.approx(1.0)


def test_schedule_overlaps_waiting_with_backward_and_not_computing() -> None:
    assert schedule(1.0, 0.9, [(0.4, 0.0, 0.3)], 1.0) == pytest.approx(1.0)  # hidden behind backward
    assert schedule(1.0, 0.9, [(0.4, 0.0, 0.3)], 0.0) == pytest.approx(1.3)  # all of it is work for the processor
    assert schedule(1.0, 0.9, [(0.4, 0.2, 0.0)], 1.0) == pytest.approx(1.2)
    assert schedule(1.0, 0.9, [(0.9, 0.2, 0.3)], 1.0) == pytest.approx(1.5)  # the last bucket hides behind nothing
    assert schedule(1.0, 0.9, [(0.4, 0.0, 2.0), (0.9, 0.0, 1.0)], 1.0) == pytest.approx(3.5)  # one after the other


def test_schedule_slows_a_transfer_only_where_its_computing_is_the_larger_part() -> None:
    """A transfer of 0.4 s while backward has 0.5 s left: with 0.1 s of computing in it the wire hides that, with 0.3 s
    twice that is 0.6 s. Backward is delayed by the computing either way, and the next bucket comes later by it."""
    assert schedule(1.0, 0.9, [(0.4, 0.0, 0.4)], 0.75) == pytest.approx(1.0 + 0.1)
    assert schedule(1.0, 0.9, [(0.4, 0.0, 0.4)], 0.25) == pytest.approx(1.0 + 0.3)
    assert schedule(1.0, 0.9, [(0.85, 0.0, 0.4)], 0.75) == pytest.approx(0.85 + 0.4 + 0.1)  # the end is the wire's own
    assert schedule(1.0, 0.9, [(0.4, 0.0, 1.0)], 0.75) == pytest.approx(0.4 + 1.0 + 0.1)
    assert schedule(1.0, 0.9, [(0.4, 0.0, 1.0)], 0.25) == pytest.approx(0.4 + 1.0 + 0.5 * 0.5 / 0.75 + 0.1)


def workload() -> Workload:
    return Workload.of_size(25_600_000, 0.2)


def test_workload_of_known_size_has_ddp_buckets() -> None:
    work = workload()
    assert work.numel == 25_600_000 and work.buckets[-1].ready_s == pytest.approx(0.2)
    assert 4 * work.buckets[0].numel < 4 * work.buckets[1].numel <= 30 * 2**20
    ready = [bucket.ready_s for bucket in work.buckets]
    assert ready == sorted(ready) and work.at(0.4).buckets[0].ready_s == pytest.approx(2 * ready[0])


@pytest.mark.parametrize("spec", ["dense", "dense:dtype=bf16", "dgc", "gtopk", "terngrad", "blocksign"])
def test_predicted_steps_grow_with_hosts_and_slowness(spec: str) -> None:
    method, work, codec = thinwire.parse_method(spec), workload(), ExchangeCost(0.02, 0.0005)
    for overlap in (0.0, 0.5, 1.0):
        steps = [predict(method, work, Link(1e-4, 8e-9), codec, 2**p, overlap).step_s for p in range(1, 11)]
        assert steps == sorted(steps) and steps[0] >= work.compute_s
        rates = [predict(method, work, Link(1e-4, 8 / r), codec, 8, overlap).step_s for r in (1e10, 1e9, 1e8, 1e7)]
        assert rates == sorted(rates)
    alone = predict(method, work, Link(1e-4, 8e-9), ExchangeCost(0.0), 1)
    assert alone.step_s == pytest.approx(work.compute_s) and alone.nbytes == 0


def test_predicted_traffic_grows_as_the_methods_promise() -> None:
    """Linear for an all-gather, logarithmic for a global top-k, bounded for a ring."""
    work, link = workload(), Link(0.0, 8e-9)

    def nbytes(spec: str, hosts: int) -> float:
        return predict(thinwire.parse_method(spec), work, link, ExchangeCost(0.0), hosts).nbytes

    assert nbytes("dgc", 1025) / nbytes("dgc", 257) == pytest.approx(4.0)
    assert nbytes("gtopk", 1024) / nbytes("gtopk", 32) == pytest.approx(2.0)
    assert nbytes("dense", 1024) < 2 * 4 * work.numel
    assert nbytes("blocksign", 64) < nbytes("dense", 64) / 25
    assert nbytes("noop", 1024) == 0


def test_measured_wire_stretches_the_plan_and_nothing_else() -> None:
    method, work, link = thinwire.parse_method("dense"), workload(), Link(1e-4, 8e-9)
    planned = predict(method, work, link, ExchangeCost(0.0), 8)
    slower = predict(method, work, link, ExchangeCost(0.0, wire=1.5), 8)
    assert slower.wire_s == pytest.approx(1.5 * planned.wire_s) and slower.nbytes == planned.nbytes
    assert slower.step_s > planned.step_s and slower.codec_s == planned.codec_s


def test_exchange_cost_grows_with_frames() -> None:
    cost_ = ExchangeCost(0.1, 0.01)
    assert cost_.computing_s(10) == pytest.approx(0.2)
    assert ExchangeCost(-0.1, 0.01).computing_s(0) == 0.0
    assert TimedBucket(0.1, (("a", 0, torch.Size([2, 3])),)).numel == 6
