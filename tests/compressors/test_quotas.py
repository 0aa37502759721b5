"""How many entries every tensor may send."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles.selection import balanced

from thinwire import DGC, GradientDropping
from thinwire.compressors.quotas import balanced_rate, quotas
from thinwire.engine.layout import Layout

VGG = [1728, 36864, 73728, 147456, 294912, 589824, 589824, 1179648, *[2359296] * 5, 5120]


def layout(sizes: list[int]) -> Layout:
    return Layout.of([(f"w{place}", place, numel, True) for place, numel in enumerate(sizes)])


@given(
    sizes=st.lists(st.integers(1, 10**7), min_size=1, max_size=12),
    density=st.floats(1e-4, 1.0),
)
def test_balanced_quotas_are_the_oracles_and_add_up(sizes: list[int], density: float) -> None:
    found = quotas("balanced", density, layout(sizes))
    for mine, expected in zip(found, balanced(density, sizes), strict=True):
        assert abs(mine - expected) <= 1, "a half may be rounded either way"
    assert all(1 <= k <= numel for k, numel in zip(found, sizes, strict=True))
    rate = balanced_rate(density, tuple(sorted(sizes)))
    exact = math.fsum(min(numel, rate * math.sqrt(numel)) for numel in sizes)
    assert exact == pytest.approx(density * sum(sizes), rel=1e-9)


@pytest.mark.parametrize("sizes", [VGG, [1, 1, 1], [7], [10**8, 3], [1000] * 50])
def test_quotas_at_density_one_send_everything(sizes: list[int]) -> None:
    for scope in ("balanced", "tensor", "chunk"):
        assert quotas(scope, 1.0, layout(sizes)) == sizes
    assert quotas("model", 1.0, layout(sizes)) == [sum(sizes)]


def test_balanced_quotas_give_small_tensors_a_larger_share() -> None:
    found = quotas("balanced", 0.006, layout(VGG))
    shares = [k / numel for k, numel in zip(found, VGG, strict=True)]
    assert sum(found) == pytest.approx(0.006 * sum(VGG), rel=1e-4)
    assert shares[0] > shares[-1] > shares[1] > shares[4] > 0.006 > shares[-2]
    assert found[1] == pytest.approx(found[0] * math.sqrt(36864 / 1728), abs=1)


@pytest.mark.parametrize("method", [DGC(scope="balanced"), GradientDropping(scope="balanced", dense_below=1024)])
def test_quota_of_a_tensor_does_not_depend_on_what_it_shares_an_exchange_with(method: DGC) -> None:
    model = [(f"w{place}", place, torch.Size([numel // 16, 16])) for place, numel in enumerate(VGG)]
    model.append(("bias", len(model), torch.Size([512])))
    together = quotas("balanced", 0.006, method.layout(model))
    apart = [k for row in model for k in quotas("balanced", 0.006, method.layout([row], model=model))]
    assert apart == together == quotas("balanced", 0.006, layout(VGG))


def test_quotas_of_chunks_are_the_same_share_of_each() -> None:
    assert quotas("chunk", 1 / 64, layout([4096, 4095, 8192 + 640, 10, 0])) == [64, 64, 138, 1, 0]
    assert quotas("chunk", 1e-5, layout([3 * 4096, 3 * 4096 + 1])) == [3, 4]


def test_quotas_of_nothing_are_zero() -> None:
    assert quotas("balanced", 0.006, Layout.of([("b", 0, 5, False)])) == []
    assert quotas("balanced", 0.006, layout([0, 0])) == [0, 0]
