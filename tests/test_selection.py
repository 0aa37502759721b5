"""Top-k by magnitude: exact against a stable sort, sampled against exact; scopes and densities of the compressor."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire.compressors import Sign, Ternarize, TopK
from thinwire.compressors.quotas import entries_kept, quotas
from thinwire.engine.context import ExchangeContext, Hyper
from thinwire.engine.layout import Layout
from thinwire.engine.schedules import ExponentialWarmup
from thinwire.kernels import cpu, native, reference

QUICK = settings(deadline=None, max_examples=80, derandomize=True)
SIZES = [0, 1, 7, 1023, 4097]
HOMES = [reference] + ([cpu] if native.library() is not None else [])
every_home = pytest.mark.parametrize("home", HOMES, ids=lambda home: home.__name__.split(".")[-1])
NAN, INF = float("nan"), float("inf")
ODD = [0.0, -0.0, 1e-45, -1e-45, 1e-40, -1e-40, 2.0**-126, INF, -INF, NAN, -NAN, 3.4028235e38, 1.0, -1.0, 0.5]


@pytest.fixture(autouse=True)
def _torch_generator_untouched() -> Any:
    before = torch.get_rng_state()
    yield
    assert torch.equal(before, torch.get_rng_state())


def oracle(x: np.ndarray, k: int) -> list[int]:
    """A stable sort by falling magnitude, nan as large as inf: of equals the lower index comes first."""
    magnitude = np.abs(x)
    magnitude[np.isnan(magnitude)] = np.inf
    return sorted(np.argsort(-magnitude, kind="stable")[:k].tolist())


def vector(seed: int, size: int, flavour: str) -> np.ndarray:
    generator = np.random.default_rng(seed)
    x = generator.standard_normal(size).astype(np.float32)
    if flavour == "ties":
        return np.round(x).astype(np.float32)
    if flavour == "zeros":
        return np.where(generator.random(size) < 0.9, 0, x).astype(np.float32) * np.float32(-1)
    if flavour == "odd":
        return generator.choice(np.array(ODD, dtype=np.float32), size)
    if flavour == "denormal":
        return (x * np.float32(1e-42)).astype(np.float32)
    if flavour == "equal":
        return np.full(size, -2.5, dtype=np.float32)
    if flavour == "wide":
        return (x * 10.0 ** generator.integers(-37, 37, size)).astype(np.float32)
    return x


FLAVOURS = ["plain", "ties", "zeros", "odd", "denormal", "equal", "wide"]


@every_home
@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("size", SIZES)
def test_exact_selection_is_a_stable_sort(home: ModuleType, size: int, flavour: str) -> None:
    x = vector(size, size, flavour)
    for k in sorted({0, 1, 2, 5, size // 1000, size // 100, size // 10, size // 2, size - 1, size, size + 1}):
        if k >= 0:
            chosen = home.select_topk(torch.from_numpy(x), k)
            assert chosen.dtype == torch.int64 and chosen.tolist() == oracle(x, k), k


@every_home
@QUICK
@given(x=st.lists(st.one_of(st.floats(width=32), st.sampled_from(ODD)), max_size=60), k=st.integers(0, 65))
def test_exact_selection_of_anything(home: ModuleType, x: list[float], k: int) -> None:
    given_ = torch.tensor(x, dtype=torch.float32)
    kept = given_.clone()
    assert home.select_topk(given_, k).tolist() == oracle(np.array(x, dtype=np.float32), k)
    assert given_.view(torch.int32).equal(kept.view(torch.int32))


@every_home
def test_exact_selection_of_a_large_vector(home: ModuleType) -> None:
    """A size at which a kernel splits its work; ties cross every border."""
    x = vector(1, 150_000, "ties")
    for k in (1, 300, 75_000):
        assert home.select_topk(torch.from_numpy(x), k).tolist() == oracle(x, k)


@every_home
def test_selection_of_a_view(home: ModuleType) -> None:
    x = torch.from_numpy(vector(2, 4097, "plain"))
    assert home.select_topk(x[100:900], 9).tolist() == oracle(x[100:900].numpy(), 9)
    assert home.select_topk(x[::3], 9).tolist() == oracle(x[::3].numpy(), 9)


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("size", [*SIZES, 20_000])
def test_sampled_selection(size: int, flavour: str) -> None:
    """Never more than k, rising, no index twice, and the largest of those that pass its threshold."""
    x = vector(size + 7, size, flavour)
    given_, magnitude = torch.from_numpy(x), np.nan_to_num(np.abs(x), nan=np.inf, posinf=np.inf)
    for k in sorted({0, 1, size // 1000, size // 100, size // 10, size // 2, size, size + 3}):
        for key in (0, 2**32 - 1):
            chosen = reference.select_sampled(given_, k, key).numpy()
            assert len(chosen) <= k and np.all(np.diff(chosen) > 0)
            if len(chosen) == k:
                assert chosen.tolist() == oracle(x, k)  # enough passed: the exact answer
            elif k <= size:  # an upper part of the exact answer
                assert len(chosen) and set(chosen) <= set(oracle(x, k))
                assert magnitude[chosen].min() > np.delete(magnitude, chosen).max()


def test_sampled_selection_finds_nearly_all() -> None:
    """With ordinary values the estimate is good: at least 70 % of k always, and 95 % in the mean."""
    shares = []
    for seed in range(20):
        x = torch.from_numpy(vector(seed, 30_000, "plain"))
        shares.append(reference.select_sampled(x, 300, seed).numel() / 300)
    assert min(shares) >= 0.7 and sum(shares) / 20 >= 0.95


# --------------------------------------------------------------------------------------------------------- compressors


def turn_of(sizes: list[int], step: int = 0, coded: list[bool] | None = None) -> ExchangeContext:
    rows = [(f"p{i}", i, n, coded[i] if coded else True) for i, n in enumerate(sizes)]
    return ExchangeContext(Layout.of(rows), step, (Hyper(),) * len(rows))


def test_entries_kept() -> None:
    assert entries_kept(0.001, 0) == 0
    assert [entries_kept(0.001, n) for n in (1, 499, 1500, 2500, 10**6)] == [1, 1, 2, 2, 1000]
    assert entries_kept(1.0, 7) == 7 and entries_kept(0.5, 5) == 2 and entries_kept(0.5, 7) == 4


@QUICK
@given(sizes=st.lists(st.sampled_from(SIZES[:4]), max_size=5), density=st.sampled_from([0.001, 0.01, 0.25, 1.0]),
       scope=st.sampled_from(["tensor", "model", "balanced"]), sampled=st.booleans())  # fmt: skip
def test_scopes_of_topk(sizes: list[int], density: float, scope: str, sampled: bool) -> None:
    context = turn_of(sizes)
    x = vector(3, sum(sizes), "ties")
    compressor = TopK(density, scope=scope, sampled=sampled)
    given_ = torch.from_numpy(x.copy())
    payload = compressor.compress(context, given_, None, 0)
    assert np.array_equal(given_.numpy(), x), "x must not be changed"
    expected: list[int] = []
    start = 0
    scopes = [sum(sizes)] if scope == "model" else sizes
    ks = quotas(scope, density, context.layout)
    if scope != "balanced":  # whose quotas test_quotas.py compares with an oracle
        assert ks == [max(1, round(density * size)) if size else 0 for size in scopes]
    for size, k in zip(scopes, ks, strict=True):
        expected += [start + i for i in oracle(x[start : start + size], k)]
        start += size
    assert payload.capacity == compressor.num_entries(context) == len(expected)
    assert payload.numel == sum(sizes)
    assert payload.values.tolist() == x[payload.indices.numpy()].tolist()
    if sampled:
        assert set(payload.indices.tolist()) <= set(expected)
    else:
        assert payload.indices.tolist() == expected
    again = compressor.compress(context, given_, None, 0)
    assert torch.equal(again.indices, payload.indices) and torch.equal(again.values, payload.values)


def test_topk_follows_the_warm_up() -> None:
    compressor = TopK(0.001, ExponentialWarmup(steps=8))
    x = torch.from_numpy(vector(4, 4096, "plain"))
    counts = [compressor.compress(turn_of([4096], step), x, None, 0).indices.numel() for step in range(10)]
    assert counts == [1024, 1024, 256, 256, 64, 64, 16, 16, 4, 4]


@pytest.mark.parametrize("odd", [NAN, INF, -INF])
@pytest.mark.parametrize("clip", [None, 2.5])
@pytest.mark.parametrize("share", [False, True])
def test_ternary_payloads_show_what_is_not_finite(odd: float, clip: float | None, share: bool) -> None:
    """A broken gradient must be seen in the result; silently becoming zero would hide it."""
    x = torch.from_numpy(vector(5, 100, "plain"))
    x[42] = odd
    context, compressor = turn_of([60, 40]), Ternarize(clip, share, 0)
    agreed = compressor.measure(context, x)
    payload = compressor.compress(context, x, agreed, 0).drawn()
    assert not bool(torch.isfinite(payload.values()[:60]).all())
    assert bool(torch.isfinite(payload.values()[60:]).all())
    assert set(payload.trits.tolist()) <= {-1, 0, 1}


@pytest.mark.parametrize("clip", [None, 2.5, 1.0])
@pytest.mark.parametrize("size", SIZES)
def test_ternary_values_of_the_clipped_gradient(clip: float | None, size: int) -> None:
    x = vector(6, size, "plain")
    compressor, context = Ternarize(clip, True, 0), turn_of([size])
    given_: Tensor = torch.from_numpy(x.copy())
    agreed = compressor.measure(context, given_)
    payload = compressor.compress(context, given_, agreed, 0).drawn()
    assert np.array_equal(given_.numpy(), x)
    if not size:
        assert payload.trits.numel() == 0
        return
    exact = x.astype(np.float64)
    limit = np.inf if clip is None or exact.std() == 0 else clip * exact.std()  # without deviation: no clipping
    clipped = np.clip(exact, -limit, limit)
    assert float(agreed[0]) == pytest.approx(np.abs(clipped).max(), rel=1e-5)
    assert np.array_equal(np.sign(payload.trits.numpy()) * (payload.trits.numpy() != 0),
                          np.sign(x) * (payload.trits.numpy() != 0))  # fmt: skip
    if size > 1000:  # the share of trits that are not zero is the mean of |clipped| / s
        share = np.abs(clipped).mean() / np.abs(clipped).max()
        assert abs(float((payload.trits != 0).double().mean()) - share) < 5 * (share * (1 - share) / size) ** 0.5


def test_votes_of_zeros_are_fair_coins() -> None:
    x = torch.zeros(4097)
    x[:10], x[10:20] = -1.0, 1.0
    x[20:30] = -0.0
    negative = Sign().compress(turn_of([4097], 3), x, None, 1).negative
    assert bool(negative[:10].all()) and not bool(negative[10:20].any())
    assert abs(float(negative[20:].double().mean()) - 0.5) < 5 * 0.5 / 4077**0.5
    assert torch.equal(negative, Sign().compress(turn_of([4097], 3), x, None, 1).negative)
    assert not torch.equal(negative, Sign().compress(turn_of([4097], 4), x, None, 1).negative)
    assert not torch.equal(negative, Sign().compress(turn_of([4097], 3), x, None, 2).negative)
