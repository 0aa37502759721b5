"""Warm-ups: the papers' own numbers, their borders, and what must hold at every step."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from workers import sentence_of

from thinwire.engine.schedules import DropRatioWarmup, ExponentialWarmup, ListedWarmup, Schedule
from thinwire.methods import DGC, GradientDropping, GTopK

QUICK = settings(deadline=None, max_examples=100, derandomize=True)
KINDS = [ExponentialWarmup, ListedWarmup, DropRatioWarmup]


def test_exponential_warm_up_is_the_dgc_papers() -> None:
    schedule = ExponentialWarmup(steps=400)
    stages = [schedule.density(step, 0.001) for step in (0, 99, 100, 199, 200, 299, 300, 399, 400, 10**9)]
    assert stages == [0.25, 0.25, 0.0625, 0.0625, 0.015625, 0.015625, 0.00390625, 0.00390625, 0.001, 0.001]


def test_listed_warm_up_is_the_gtopk_papers() -> None:
    schedule = ListedWarmup(steps=8)
    assert [schedule.density(step, 0.001) for step in range(9)] == [
        0.25, 0.25, 0.0725, 0.0725, 0.015, 0.015, 0.004, 0.004, 0.001,
    ]  # fmt: skip
    assert [ListedWarmup(3, (0.5, 0.1)).density(step, 0.01) for step in range(4)] == [0.5, 0.5, 0.1, 0.01]
    assert ListedWarmup(4, (0.1,)).density(3, 0.01) == 0.1


def test_drop_ratio_warm_up_is_the_local_gradients_papers() -> None:
    """R_t = R ** max(1, T / t), t from 1: with R = 0.99 and T = 1000 almost everything is sent at first."""
    schedule = DropRatioWarmup(steps=1000)
    for t in (1, 2, 10, 500, 1000, 1001, 5000):
        assert schedule.density(t - 1, 0.01) == pytest.approx(1 - 0.99 ** max(1, 1000 / t), rel=1e-12)
    assert schedule.density(0, 0.01) > 0.9999 and schedule.density(999, 0.01) == pytest.approx(0.01)
    assert schedule.density(0, 1.0) == schedule.density(10**6, 1.0) == 1.0


@pytest.mark.parametrize("kind", KINDS)
@QUICK
@given(steps=st.integers(1, 5000), final=st.floats(1e-6, 1.0), data=st.data())
def test_warm_up_falls_to_the_final_density(kind: type, steps: int, final: float, data: st.DataObject) -> None:
    schedule: Schedule = kind(steps)
    step = data.draw(st.integers(0, 2 * steps))
    now, later = schedule.density(step, final), schedule.density(step + 1, final)
    assert 0 < now <= 1 and later <= now
    assert now >= final * (1 - 1e-9)
    if step >= steps:
        assert now == pytest.approx(final, rel=1e-9)
    assert schedule.density(step, final) == now  # a pure function: a saved step is the whole state


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 7])
def test_warm_ups_of_few_steps_fall_to_the_final_density(steps: int) -> None:
    for kind in KINDS:
        densities = [kind(steps).density(step, 0.001) for step in range(steps + 2)]
        assert densities == sorted(densities, reverse=True)
        assert densities[steps] == pytest.approx(0.001)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [0, -1, 1.5, "x", True, None], ids=repr)
def test_warm_up_of_no_steps_is_refused(kind: type, steps: object) -> None:
    text = sentence_of(ValueError, lambda: kind(steps))
    assert "steps" in text and "at least 1" in text


@pytest.mark.parametrize("densities", [(), (0.5, 0.0), (2.0,), (0.5, -1.0), (float("nan"),)], ids=str)
def test_warm_up_with_densities_outside_0_to_1_is_refused(densities: tuple[float, ...]) -> None:
    assert "must lie in (0, 1]" in sentence_of(ValueError, lambda: ListedWarmup(4, densities))


def test_warm_ups_are_frozen_values() -> None:
    for kind in KINDS:
        assert kind(5) == kind(5) and hash(kind(5)) == hash(kind(5)) and kind(5) != kind(6)
        with pytest.raises(dataclasses.FrozenInstanceError):
            kind(5).steps = 6


def test_warm_up_of_a_number_is_the_methods_own() -> None:
    """warmup=T is each paper's own schedule; a schedule object is taken as it is."""
    from thinwire.transport import ThreadWorld

    def densities(net: object) -> list[float]:
        methods = [DGC(warmup=8), GTopK(warmup=8), GradientDropping(density=0.001, warmup=8),
                   DGC(warmup=ListedWarmup(8))]  # fmt: skip
        return [method.aggregator(net, True).compressor.density(2) for method in methods]  # type: ignore[arg-type]

    (found,) = ThreadWorld(1).run(densities)
    assert found == [0.0625, 0.0725, pytest.approx(1 - 0.999 ** (8 / 3)), 0.0725]
