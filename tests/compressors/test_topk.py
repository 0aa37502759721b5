"""What the top-k compressor chooses: scopes, densities and warm-ups."""

from __future__ import annotations

import numpy as np
import torch
from contexts import context_of
from generators import torch_generator_untouched  # noqa: F401  every test of this file
from hypothesis import given, settings
from hypothesis import strategies as st
from sorted_topk import oracle, vector

from thinwire.compressors import TopK
from thinwire.compressors.quotas import entries_kept, quotas
from thinwire.engine.schedules import ExponentialWarmup

QUICK = settings(deadline=None, max_examples=80, derandomize=True)
SIZES = [0, 1, 7, 1023, 4097]


def test_entries_kept_are_rounded_and_at_least_one() -> None:
    assert entries_kept(0.001, 0) == 0
    assert [entries_kept(0.001, n) for n in (1, 499, 1500, 2500, 10**6)] == [1, 1, 2, 2, 1000]
    assert entries_kept(1.0, 7) == 7 and entries_kept(0.5, 5) == 2 and entries_kept(0.5, 7) == 4


@QUICK
@given(sizes=st.lists(st.sampled_from(SIZES[:4]), max_size=5), density=st.sampled_from([0.001, 0.01, 0.25, 1.0]),
       scope=st.sampled_from(["tensor", "model", "balanced"]), sampled=st.booleans())  # fmt: skip
def test_topk_chooses_the_largest_of_every_scope(sizes: list[int], density: float, scope: str, sampled: bool) -> None:
    context = context_of(sizes)
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


@QUICK
@given(sizes=st.lists(st.sampled_from([0, 1, 7, 1023, 4096, 4097, 9000]), max_size=4),
       density=st.sampled_from([0.0001, 1 / 64, 0.25, 1.0]))  # fmt: skip
def test_topk_chooses_the_largest_of_every_chunk(sizes: list[int], density: float) -> None:
    context = context_of(sizes)
    x = vector(3, sum(sizes), "ties")
    compressor = TopK(density, scope="chunk")
    payload = compressor.compress(context, torch.from_numpy(x.copy()), None, 0)
    expected: list[int] = []
    start = 0
    for size in sizes:
        for first in range(start, start + size, 4096):
            part = x[first : min(first + 4096, start + size)]
            expected += [first + i for i in oracle(part, max(1, round(density * part.size)))]
        start += size
    assert payload.indices.tolist() == expected and payload.values.tolist() == x[payload.indices.numpy()].tolist()
    assert payload.capacity == compressor.num_entries(context) == len(expected)
    assert compressor.budget(context.layout).entries == len(expected)
    assert compressor.hint(context, torch.device("cpu")) is None


def test_topk_follows_the_warm_up() -> None:
    compressor = TopK(0.001, ExponentialWarmup(steps=8))
    x = torch.from_numpy(vector(4, 4096, "plain"))
    counts = [compressor.compress(context_of([4096], step), x, None, 0).indices.numel() for step in range(10)]
    assert counts == [1024, 1024, 256, 256, 64, 64, 16, 16, 4, 4]
