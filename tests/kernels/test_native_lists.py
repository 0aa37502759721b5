"""Native lists of entries equal plain torch bit for bit: listing, choosing, gathering, merging, coding."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire import kernels
from thinwire.kernels import native, reference
from thinwire.kernels.dispatch import CHOSEN
from thinwire.kernels.native import library
from thinwire.kernels.reference import Entries

pytestmark = pytest.mark.skipif(library.handle() is None, reason=f"no native library here: {library.why_not()}")
QUICK = settings(deadline=None, max_examples=40, derandomize=True)
ODD = torch.tensor([0.0, -0.0, float("nan"), float("inf"), float("-inf"), 1e38, 1e-45, 1.0, -1.0])


def same_bits(a: Tensor, b: Tensor) -> bool:
    if a.dtype == torch.float32:  # of nans, that they are
        a, b = (torch.where(x.isnan(), torch.full_like(x, float("nan")), x).view(torch.int32) for x in (a, b))
    return torch.equal(a.to(torch.int64), b.to(torch.int64))


def entries_of(seed: int, size: int, numel: int, odd: bool) -> tuple[Tensor, Tensor]:
    generator = np.random.default_rng(seed)
    indices = torch.from_numpy(np.unique(generator.integers(0, numel, size)))
    values = torch.from_numpy(generator.standard_normal(indices.numel()).astype(np.float32))
    if odd:  # many equal magnitudes among them
        values[::2] = ODD[torch.from_numpy(generator.integers(0, ODD.numel(), values[::2].numel()))]
    return indices, values


def room(count: int) -> Entries:
    return Entries(torch.full((2 * count,), -7, dtype=torch.int32))


sizes = st.sampled_from([0, 1, 7, 300, 5000])
numels = st.sampled_from([400, 100_000, 2**31 - 1, 2**32 - 1])


@QUICK
@given(seed=st.integers(0, 2**32 - 1), size=sizes, other=sizes, numel=numels, odd=st.booleans(), narrow=st.booleans())
def test_merge_topk_and_keeping_equal_plain_torch(
    seed: int, size: int, other: int, numel: int, odd: bool, narrow: bool
) -> None:
    (a, a_values), (b, b_values) = entries_of(seed, size, numel, odd), entries_of(seed + 1, other, numel, odd)
    of: Callable[[Tensor], Tensor] = library.narrow if narrow else lambda indices: indices

    def check(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> None:
        assert ours[0].dtype == (torch.int32 if narrow else torch.int64)
        assert torch.equal(ours[0].to(torch.int64) & 0xFFFFFFFF, theirs[0]) and same_bits(ours[1], theirs[1])

    for k in {0, 1, a.numel() // 2, a.numel(), a.numel() + b.numel()}:
        expected = reference.merge_topk(a, a_values, b, b_values, k)
        capacity = max(k, a.numel() + b.numel())
        for where in (None, room(capacity)):
            check(native.merge_topk(of(a), a_values, of(b), b_values, k, where), expected)
            check(native.merge_topk(of(b), b_values, of(a), a_values, k, where), expected)
        if k <= a.numel():
            check(native.keep_largest(of(a), a_values, k, room(k)), reference.keep_largest(a, a_values, k))
    mask = torch.from_numpy(np.random.default_rng(seed).integers(0, 2, a.numel()).astype(bool))
    check(native.keep_masked(of(a), a_values, mask, room(a.numel())), reference.keep_masked(a, a_values, mask))
    ours, theirs = mask.clone(), mask.clone()
    native.mask_contained(ours, of(a), of(b))
    reference.mask_contained(theirs, a, b)
    assert torch.equal(ours, theirs)
    if numel < 1 << 20:
        x, y = torch.randn(numel, generator=torch.Generator().manual_seed(seed)), torch.empty(a.numel())
        assert torch.equal(native.take_at(x, of(a), y), x[a]) and torch.equal(y, x[a])
        zeroed = x.clone()
        native.zero_at(zeroed, of(a))
        reference.zero_at(x, a)
        assert torch.equal(zeroed, x)


@QUICK
@given(seed=st.integers(0, 2**32 - 1), size=sizes, scale=st.sampled_from([1.0, 1e-44, 1e38, 0.0]), odd=st.booleans())
def test_int8_values_equal_plain_torch(seed: int, size: int, scale: float, odd: bool) -> None:
    values = entries_of(seed, size, 2**31, odd)[1] * scale
    codes, scales = reference.int8_quantize(values)
    ours = native.int8_quantize(values, torch.empty(values.numel(), dtype=torch.int8))
    assert torch.equal(ours[0], codes) and same_bits(ours[1], scales)
    assert same_bits(native.int8_dequantize(codes, scales), reference.int8_dequantize(codes, scales))


@QUICK
@given(seed=st.integers(0, 2**32 - 1), size=sizes, numel=numels)
def test_rice_streams_equal_plain_torch(seed: int, size: int, numel: int) -> None:
    indices, _ = entries_of(seed, size, numel, False)
    for parameter in {0, 3, 30} if numel < 1 << 20 else {17, 30}:
        expected = reference.rice_encode(reference.gaps_between(indices), parameter)
        lengths = reference.rice_unary_bits(reference.gaps_between(indices), range(parameter, parameter + 2))
        for given_ in (indices, library.narrow(indices)):
            low, unary = (torch.full_like(stream, 0xAB) for stream in expected)
            native.rice_write(given_, parameter, low, unary)
            assert torch.equal(low, expected[0]) and torch.equal(unary, expected[1])
            assert native.rice_unary_bits_of(given_, range(parameter, parameter + 2)) == lengths
        filled = torch.nn.functional.pad(expected[1], (0, -expected[1].numel() % 4))
        stream = reference.RiceStream(expected[0], filled, indices.numel(), parameter)
        out = torch.empty(indices.numel(), dtype=torch.int32)
        ((found, fault),) = native.rice_indices([stream], numel, [out])
        assert fault == 0 and torch.equal(found.to(torch.int64) & 0xFFFFFFFF, indices)


@pytest.mark.parametrize("entries", [0, 5, 600, 5000, 10**6])
@pytest.mark.parametrize("kind", ["normal", "equal", "rising", "nan", "zeros"])
def test_select_scopes_is_exact_in_however_little_memory(entries: int, kind: str) -> None:
    x = torch.randn(150_001, generator=torch.Generator().manual_seed(1))
    if kind in ("equal", "zeros"):
        x = torch.full_like(x, 1.0 if kind == "equal" else 0.0)
    elif kind == "rising":
        x = torch.arange(150_001, dtype=torch.float32)
    elif kind == "nan":
        x[::100] = float("nan")
    bounds, ks = [0, 80_000, 80_300, 150_001], [2000, 300, 40_000]
    out, workspace = torch.empty(sum(ks), dtype=torch.int32), torch.empty(entries, dtype=torch.int32)
    ours = native.select_scopes(x, bounds, ks, None, out, workspace)
    theirs = reference.select_scopes(x, bounds, ks, None)
    assert torch.equal(ours[0].to(torch.int64), theirs[0])
    assert kind == "nan" or torch.equal(ours[2], theirs[2])  # plain torch's smallest of a nan and others is the nan


@pytest.mark.parametrize("threads", [1, 3])
def test_accumulate_stops_listing_at_its_capacity(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    monkeypatch.setattr(library, "threads", lambda: threads)
    grad = torch.randn(300_000, generator=torch.Generator().manual_seed(2))
    segments = reference.Segments((0,), (0.0,), (False,), (0.0,), (None,), (0.0,))
    expected = torch.nonzero(grad.abs() >= 2.0).flatten()
    for capacity, fits in ((expected.numel(), True), (expected.numel() - 1, False), (10, False), (300_000, True)):
        listing = torch.empty(native.listing_entries(capacity), dtype=torch.int32)
        places = torch.empty(capacity, dtype=torch.int32)
        found = native.accumulate([grad], segments, None, torch.zeros(300_000), [2.0], capacity, room=(listing, places))
        assert (found is not None) == fits
        assert found is None or (torch.equal(found.to(torch.int64), expected) and found.data_ptr() == places.data_ptr())


def noise(numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def segments(*numels: int) -> reference.Segments:
    starts = tuple(sum(numels[:place]) for place in range(len(numels)))
    zeros = (0.0,) * len(numels)
    return reference.Segments(starts, zeros, (False,) * len(numels), zeros, (None,) * len(numels), zeros)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("numels", [(1,), (127, 130), (300_001, 5, 64)])
@pytest.mark.parametrize("threshold", [0.0, 1.0, 2.5, 50.0])
def test_accumulate_lists_what_reaches_a_threshold(
    threads: int, numels: tuple[int, ...], threshold: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the list just fits, and where it does not."""
    monkeypatch.setattr(library, "threads", lambda: threads)
    parts, limits = [noise(numel, numel) for numel in numels], [threshold] * len(numels)
    wanted = torch.nonzero(torch.cat(parts).abs() >= threshold).flatten()
    for room in (wanted.numel() + 1000, wanted.numel(), wanted.numel() - 1):
        if room >= 0:
            residual = torch.zeros(sum(numels))
            found = native.accumulate(parts, segments(*numels), None, residual, limits, room)
            assert torch.equal(residual, torch.cat(parts))
            assert (found is None) == (room < wanted.numel())
            assert found is None or torch.equal(found, wanted)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("velocity", [False, True])
def test_accumulate_rescales_what_waited_in_the_same_pass(
    threads: int, velocity: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits of a pass of its own before, in both homes, and the list is of what is there afterwards."""
    monkeypatch.setattr(library, "threads", lambda: threads)
    numels, ratios = (1000, 127, 70_001), (1.0, 1.25, 1 / 3)
    parts, rows = [noise(numel, numel) for numel in numels], segments(*numels)
    expected, u = noise(sum(numels), 7), noise(sum(numels), 8) if velocity else None
    for start, numel, ratio in zip(rows.starts, numels, ratios, strict=True):
        expected[start : start + numel] *= ratio
    native.accumulate(parts, rows, u.clone() if u is not None else None, expected, None, 0)
    for home in ("native", "reference"):
        monkeypatch.setitem(CHOSEN, torch.device("cpu"), home)
        residual = noise(sum(numels), 7)
        mine = u.clone() if u is not None else None
        found = kernels.accumulate(parts, rows, mine, residual, [2.5] * 3, 100_000, ratios=ratios)
        assert torch.equal(residual, expected), home
        assert torch.equal(found, torch.nonzero(expected.abs() >= 2.5).flatten()), home


@pytest.mark.parametrize("levels", [1, 3, 1000, 10**9])
@pytest.mark.parametrize("k", [1, 5_000, 19_999])
def test_select_scopes_finds_the_best_of_many_candidates(levels: int, k: int) -> None:
    """With few levels nearly all magnitudes are equal, and the lower index wins."""
    x = (noise(30_000) * levels).round() / levels if levels < 10**9 else noise(30_000)
    candidates = torch.arange(0, 30_000, 3).repeat_interleave(2)[:20_000]
    candidates[1::2] += 1  # rising, two of three
    bounds, ks = [0, 30_000], [k]
    for mine, theirs in zip(
        native.select_scopes(x, bounds, ks, candidates), reference.select_scopes(x, bounds, ks, candidates), strict=True
    ):
        assert torch.equal(torch.as_tensor(mine), torch.as_tensor(theirs))


def test_take_at_equals_plain_torch() -> None:
    x, indices = noise(1000), torch.tensor([0, 3, 4, 998, 999])
    assert torch.equal(native.take_at(x, indices), reference.take_at(x, indices))
    assert native.take_at(x, indices[:0]).numel() == 0
