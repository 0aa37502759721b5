"""bench cluster's turns: a free step beside every step, and shares that do not see a slow drift."""

from __future__ import annotations

import pytest

from thinwire.lab.bench.cluster import at_once, check_method
from thinwire.lab.bench.cluster_worker import Job, split_merging
from thinwire.lab.bench.turns import FREE, order_of, shares_of


def test_a_free_step_stands_before_and_after_each() -> None:
    order = order_of([4, 2, 1])
    assert order[::2] == [FREE] * (len(order) // 2 + 1) and FREE not in order[1::2]
    assert [order.count(lane) for lane in (1, 2, 3)] == [4, 2, 1]
    others = order[1::2]
    assert max(i for i, lane in enumerate(others) if lane == 2) > len(others) // 2  # not all of them at the beginning
    assert {(a, b) for a, b in zip(order_of([6] * 3)[1::2], order_of([6] * 3)[3::2], strict=False)} > {(1, 2), (3, 1)}
    assert order_of([]) == [FREE]


def test_shares_do_not_see_a_drift() -> None:
    """A machine that becomes three times slower on the way; lane 1 takes 1.25 of a free step, lane 2 twice it."""
    order, cost = order_of([8, 8]), {FREE: 1.0, 1: 1.25, 2: 2.0}
    seconds = [cost[lane] * (1 + 2 * context / len(order)) for context, lane in enumerate(order)]
    shares = shares_of(order, seconds)
    assert shares[1] == pytest.approx([0.8] * 8) and shares[2] == pytest.approx([0.5] * 8)
    assert shares[FREE][1:-1] == pytest.approx([1.0] * 15)
    assert len(shares[FREE]) == 17 and shares_of([FREE], [1.0]) == {FREE: []}


def test_methods_that_do_not_fit_at_once_are_measured_in_batches() -> None:
    job = Job("tiny", ("noop", "a", "b", "c"), 4, 1.0, False, at_once=2)
    assert job.batches() == [("noop", "a", "b"), ("noop", "c")]
    assert Job("tiny", ("noop",), 4, 1.0, False).batches() == [("noop",)]
    assert at_once("tiny", 2) > at_once("resnet50", 64) >= 1


def test_how_buckets_are_merged_is_said_behind_the_method() -> None:
    assert split_merging("dgc:values=fp32@none") == ("dgc:values=fp32", "none") and split_merging("dgc")[1] == "auto"
    check_method("dgc:values=fp32@all")
    for wrong in ("dgc@all", "dense@none", "terngrad@both"):
        with pytest.raises(ValueError, match="@"):
            check_method(wrong)
