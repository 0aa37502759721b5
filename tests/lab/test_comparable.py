"""When the seconds of methods that trained one after the other may be compared."""

from __future__ import annotations

import pytest

from thinwire.lab.comparable import why_not_comparable


def test_seconds_compare_where_the_same_work_took_as_long() -> None:
    assert why_not_comparable({"dense": 0.010, "dgc": 0.0119, "noop": 0.0101}, {}) == ""
    assert why_not_comparable({"dense": 0.010}, {}) == why_not_comparable({}, {}) == ""
    assert why_not_comparable({"dense": 0.0, "dgc": 0.010}, {}) == ""  # not measured


@pytest.mark.parametrize("slow", ["dense", "dgc"])
def test_seconds_do_not_compare_where_the_same_work_took_a_fifth_longer(slow: str) -> None:
    said = why_not_comparable({"dense": 0.010, "dgc": 0.010, "noop": 0.010} | {slow: 0.0125}, {slow: 0.0001})
    assert said.startswith("Seconds do not compare: ") and "10 ms per step with " in said
    assert f"25 % more with {slow}, because" in said and said.count(".") == 1


def test_what_a_method_computes_beside_the_backward_pass_is_its_own() -> None:
    assert why_not_comparable({"dense": 0.010, "dgc": 0.0136}, {"dgc": 0.002}) == ""
    assert why_not_comparable({"dense": 0.010, "dgc": 0.0136}, {"dgc": 0.001}).startswith("Seconds do not compare")
