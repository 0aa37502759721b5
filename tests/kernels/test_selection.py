"""Top-k by magnitude: exact against a stable sort, sampled against exact."""

from __future__ import annotations

from itertools import accumulate, pairwise
from types import ModuleType

import numpy as np
import pytest
import torch
from generators import torch_generator_untouched  # noqa: F401  every test of this file
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_backends import every_backend
from sorted_topk import FLAVOURS, ODD, oracle, vector

from thinwire.kernels import reference

QUICK = settings(deadline=None, max_examples=80, derandomize=True)
SIZES = [0, 1, 7, 1023, 4097]


@every_backend
@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("size", SIZES)
def test_exact_selection_is_a_stable_sort(home: ModuleType, size: int, flavour: str) -> None:
    x = vector(size, size, flavour)
    for k in sorted({0, 1, 2, 5, size // 1000, size // 100, size // 10, size // 2, size - 1, size, size + 1}):
        if k >= 0:
            chosen = home.select_topk(torch.from_numpy(x), k)
            assert chosen.dtype == torch.int64 and chosen.tolist() == oracle(x, k), k


@every_backend
@QUICK
@given(x=st.lists(st.one_of(st.floats(width=32), st.sampled_from(ODD)), max_size=60), k=st.integers(0, 65))
def test_exact_selection_of_anything(home: ModuleType, x: list[float], k: int) -> None:
    given_ = torch.tensor(x, dtype=torch.float32)
    kept = given_.clone()
    assert home.select_topk(given_, k).tolist() == oracle(np.array(x, dtype=np.float32), k)
    assert given_.view(torch.int32).equal(kept.view(torch.int32))


@every_backend
def test_exact_selection_of_a_large_vector(home: ModuleType) -> None:
    """A size at which a kernel splits its work; ties cross every border."""
    x = vector(1, 150_000, "ties")
    for k in (1, 300, 75_000):
        assert home.select_topk(torch.from_numpy(x), k).tolist() == oracle(x, k)


@every_backend
def test_selection_of_a_view(home: ModuleType) -> None:
    x = torch.from_numpy(vector(2, 4097, "plain"))
    assert home.select_topk(x[100:900], 9).tolist() == oracle(x[100:900].numpy(), 9)
    assert home.select_topk(x[::3], 9).tolist() == oracle(x[::3].numpy(), 9)


def largest_of_chunks(x: np.ndarray, bounds: list[int], chunk: int, k: int, lasts: list[int]) -> list[int]:
    chosen: list[int] = []
    for (start, stop), last in zip(pairwise(bounds), lasts, strict=True):
        for first in range(start, stop, chunk):
            part = x[first : min(first + chunk, stop)]
            chosen += [first + place for place in oracle(part, k if part.size == chunk else last)]
    return chosen


@every_backend
@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize(("chunk", "k"), [(4096, 64), (4096, 1), (4096, 600), (4096, 4096), (1024, 16), (100, 7)])
def test_the_largest_of_every_chunk_are_a_stable_sort_s(home: ModuleType, chunk: int, k: int, flavour: str) -> None:
    """Tensors with and without a shorter chunk behind the others, small ones, empty ones."""
    for sizes in ([5000, 4096, 7, 8292, 0], [9, 300], [0], []):
        x, bounds = vector(1, sum(sizes), flavour), list(accumulate(sizes, initial=0))
        lasts = [min(3, size % chunk) for size in sizes]
        given_ = torch.from_numpy(x.copy())
        chosen = home.select_chunks(given_, bounds, chunk, k, lasts)
        assert chosen.dtype == torch.int64 and chosen.tolist() == largest_of_chunks(x, bounds, chunk, k, lasts)
        assert given_.numpy().tobytes() == x.tobytes()


@every_backend
def test_chunks_of_a_large_vector_and_of_a_view(home: ModuleType) -> None:
    """A size at which a kernel splits its work; the memory that is offered may be used."""
    x = vector(1, 150_001, "ties")
    lasts = [150_001 % 4096 // 64]
    expected = largest_of_chunks(x, [0, x.size], 4096, 64, lasts)
    for threads in (1, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            assert home.select_chunks(torch.from_numpy(x), [0, x.size], 4096, 64, lasts).tolist() == expected
        finally:
            torch.set_num_threads(before)
    room = torch.zeros(len(expected), dtype=torch.int32)
    assert home.select_chunks(torch.from_numpy(x), [0, x.size], 4096, 64, lasts, room).tolist() == expected
    strided = torch.from_numpy(x)[::3]
    expected = largest_of_chunks(x[::3], [0, strided.numel()], 4096, 64, [1])
    assert home.select_chunks(strided, [0, strided.numel()], 4096, 64, [1]).tolist() == expected


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
