"""Lists of entries in the native library equal plain torch bit for bit; the memory that exchanges share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire import kernels
from thinwire.codecs import SparseCodec
from thinwire.compressors import TopK
from thinwire.engine.context import ExchangeContext, Hyper
from thinwire.engine.layout import Layout
from thinwire.engine.payloads import Sparse
from thinwire.engine.workspace import BACK, Workspace
from thinwire.kernels import cpu, cpu_lists, lists, native, reference
from thinwire.kernels.lists import Entries
from thinwire.memory import ErrorFeedback

pytestmark = pytest.mark.skipif(native.library() is None, reason=f"no native library here: {native.why_not()}")
QUICK = settings(deadline=None, max_examples=40, derandomize=True)
CPU = torch.device("cpu")
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
def test_merging_and_keeping(seed: int, size: int, other: int, numel: int, odd: bool, narrow: bool) -> None:
    (a, a_values), (b, b_values) = entries_of(seed, size, numel, odd), entries_of(seed + 1, other, numel, odd)
    of: Callable[[Tensor], Tensor] = native.narrow if narrow else lambda indices: indices

    def check(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> None:
        assert ours[0].dtype == (torch.int32 if narrow else torch.int64)
        assert torch.equal(ours[0].to(torch.int64) & 0xFFFFFFFF, theirs[0]) and same_bits(ours[1], theirs[1])

    for k in {0, 1, a.numel() // 2, a.numel(), a.numel() + b.numel()}:
        expected = lists.merge_topk(a, a_values, b, b_values, k)
        capacity = max(k, a.numel() + b.numel())
        for where in (None, room(capacity)):
            check(cpu_lists.merge_topk(of(a), a_values, of(b), b_values, k, where), expected)
            check(cpu_lists.merge_topk(of(b), b_values, of(a), a_values, k, where), expected)
        if k <= a.numel():
            check(cpu_lists.keep_largest(of(a), a_values, k, room(k)), lists.keep_largest(a, a_values, k))
    mask = torch.from_numpy(np.random.default_rng(seed).integers(0, 2, a.numel()).astype(bool))
    check(cpu_lists.keep_masked(of(a), a_values, mask, room(a.numel())), lists.keep_masked(a, a_values, mask))
    ours, theirs = mask.clone(), mask.clone()
    cpu_lists.mask_contained(ours, of(a), of(b))
    lists.mask_contained(theirs, a, b)
    assert torch.equal(ours, theirs)
    if numel < 1 << 20:
        x, y = torch.randn(numel, generator=torch.Generator().manual_seed(seed)), torch.empty(a.numel())
        assert torch.equal(cpu_lists.take_at(x, of(a), y), x[a]) and torch.equal(y, x[a])
        zeroed = x.clone()
        cpu.zero_at(zeroed, of(a))
        reference.zero_at(x, a)
        assert torch.equal(zeroed, x)


@QUICK
@given(seed=st.integers(0, 2**32 - 1), size=sizes, scale=st.sampled_from([1.0, 1e-44, 1e38, 0.0]), odd=st.booleans())
def test_8_bit_values(seed: int, size: int, scale: float, odd: bool) -> None:
    values = entries_of(seed, size, 2**31, odd)[1] * scale
    codes, scales = reference.int8_quantize(values)
    ours = cpu_lists.int8_quantize(values, torch.empty(values.numel(), dtype=torch.int8))
    assert torch.equal(ours[0], codes) and same_bits(ours[1], scales)
    assert same_bits(cpu_lists.int8_dequantize(codes, scales), reference.int8_dequantize(codes, scales))


@QUICK
@given(seed=st.integers(0, 2**32 - 1), size=sizes, numel=numels)
def test_rice_streams_of_indices(seed: int, size: int, numel: int) -> None:
    indices, _ = entries_of(seed, size, numel, False)
    for parameter in {0, 3, 30} if numel < 1 << 20 else {17, 30}:
        expected = reference.rice_encode(lists.gaps_between(indices), parameter)
        lengths = reference.rice_unary_bits(lists.gaps_between(indices), range(parameter, parameter + 2))
        for given_ in (indices, native.narrow(indices)):
            low, unary = (torch.full_like(stream, 0xAB) for stream in expected)
            cpu_lists.rice_write(given_, parameter, low, unary)
            assert torch.equal(low, expected[0]) and torch.equal(unary, expected[1])
            assert cpu_lists.rice_unary_bits_of(given_, range(parameter, parameter + 2)) == lengths
        filled = torch.nn.functional.pad(expected[1], (0, -expected[1].numel() % 4))
        stream = reference.RiceStream(expected[0], filled, indices.numel(), parameter)
        out = torch.empty(indices.numel(), dtype=torch.int32)
        ((found, fault),) = cpu.rice_indices([stream], numel, [out])
        assert fault == 0 and torch.equal(found.to(torch.int64) & 0xFFFFFFFF, indices)


@pytest.mark.parametrize("entries", [0, 5, 600, 5000, 10**6])
@pytest.mark.parametrize("kind", ["normal", "equal", "rising", "nan", "zeros"])
def test_a_search_is_exact_in_however_little_memory(entries: int, kind: str) -> None:
    x = torch.randn(150_001, generator=torch.Generator().manual_seed(1))
    if kind in ("equal", "zeros"):
        x = torch.full_like(x, 1.0 if kind == "equal" else 0.0)
    elif kind == "rising":
        x = torch.arange(150_001, dtype=torch.float32)
    elif kind == "nan":
        x[::100] = float("nan")
    bounds, ks = [0, 80_000, 80_300, 150_001], [2000, 300, 40_000]
    out, workspace = torch.empty(sum(ks), dtype=torch.int32), torch.empty(entries, dtype=torch.int32)
    ours = cpu.select_scopes(x, bounds, ks, None, out, workspace)
    theirs = reference.select_scopes(x, bounds, ks, None)
    assert torch.equal(ours[0].to(torch.int64), theirs[0])
    assert kind == "nan" or torch.equal(ours[2], theirs[2])  # plain torch's smallest of a nan and others is the nan


@pytest.mark.parametrize("threads", [1, 3])
def test_listing_stops_at_its_capacity(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    monkeypatch.setattr(native, "threads", lambda: threads)
    grad = torch.randn(300_000, generator=torch.Generator().manual_seed(2))
    segments = reference.Segments((0,), (0.0,), (False,), (0.0,), (None,), (0.0,))
    expected = torch.nonzero(grad.abs() >= 2.0).flatten()
    for capacity, fits in ((expected.numel(), True), (expected.numel() - 1, False), (10, False), (300_000, True)):
        listing = torch.empty(cpu.listing_entries(capacity), dtype=torch.int32)
        places = torch.empty(capacity, dtype=torch.int32)
        found = cpu.accumulate([grad], segments, None, torch.zeros(300_000), [2.0], capacity, room=(listing, places))
        assert (found is not None) == fits
        assert found is None or (torch.equal(found.to(torch.int64), expected) and found.data_ptr() == places.data_ptr())


# ------------------------------------------------------------------------------------------------------- shared memory


def test_scratch_grows_once_is_used_again_and_shrinks() -> None:
    workspace = Workspace()

    def exchange(count: int) -> set[int]:
        workspace.begin()
        front = workspace.take(count, torch.float32, CPU)
        mark = workspace.mark()
        more = workspace.take(count, torch.int32, CPU)
        back = workspace.take(3 * count, torch.uint8, CPU, BACK)
        assert front is not None and more is not None and back is not None
        front.fill_(1.0), more.fill_(2), back.fill_(3)
        assert front.eq(1).all() and more.eq(2).all() and back.eq(3).all(), "they overlap"
        workspace.release(mark)
        again = workspace.take(count, torch.float32, CPU)
        assert again is not None
        again.fill_(4.0)
        assert front.eq(1).all() and back.eq(3).all()
        return {front.data_ptr(), more.data_ptr(), again.data_ptr(), back.data_ptr()}

    exchange(1000)
    assert workspace.nbytes == 0
    assert exchange(1000) == exchange(1000) and 11_000 <= workspace.nbytes <= 11_200
    exchange(5000)
    exchange(1000)
    assert workspace.nbytes >= 55_000, "as long as the longest so far"
    for _ in range(201):
        exchange(1000)
    assert workspace.nbytes <= 11_200, "given back when nobody needs it"


def test_without_a_beginning_everything_is_allocated() -> None:
    workspace = Workspace()
    a, b = workspace.take(10, torch.float32, CPU), workspace.take(10, torch.float32, CPU)
    assert a is not None and b is not None and a.data_ptr() != b.data_ptr() and workspace.nbytes == 0


def test_scratch_is_for_the_native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.engine.workspace.home_name", lambda device: "reference")
    assert Workspace().take(10, torch.float32, CPU) is None
    monkeypatch.undo()
    assert Workspace().entries(10, 1 << 31, CPU) is None, "32 bits are too few for its indices"


@pytest.mark.parametrize("density", [0.001, 0.02, 0.25, 1.0])
@pytest.mark.parametrize("values", ["fp32", "int8", "bf16"])
def test_frames_do_not_depend_on_the_memory_they_are_made_in(density: float, values: str) -> None:
    """Selection and coding in kept memory give the frames that plain torch gives, step after step."""
    layout = Layout.of([("a", 0, 70_001, True), ("b", 1, 5, True), ("c", 2, 900, True), ("d", 3, 30, False)])
    workspace, codec = Workspace(), SparseCodec(values)
    lean, plain = TopK(density, workspace=workspace), TopK(density)
    memory, tail = ErrorFeedback(), torch.ones(30)
    generator = torch.Generator().manual_seed(3)
    for step in range(8):
        context = ExchangeContext(layout, step, (Hyper(),) * 4)
        grad = torch.randn(layout.numel, generator=generator)
        if step % 3 == 2:
            grad[:7000] *= 40  # clustered: some entries do not fit into the frame
        workspace.begin()
        hint = lean.hint(context, CPU)
        x = memory.compensate(context, grad, hint)[: layout.coded_numel]
        chosen = reference.select_scopes(
            x, [0, 70_001, 70_006, 70_906], [max(1, round(density * n)) for n in (70_001, 5, 900)], None
        )[0]
        expected = codec.encode(context, Sparse(chosen, x[chosen], x.numel(), plain.num_entries(context)), tail)
        payload = lean.compress(context, x, None, 0, hint)
        assert torch.equal(payload.indices.to(torch.int64), chosen) and payload.indices.dtype == torch.int32
        frame = codec.encode(context, payload, tail, workspace=workspace)
        assert torch.equal(frame, expected)
        entries = workspace.entries(payload.capacity, x.numel(), CPU)
        assert entries is not None
        read: Any = codec.decode(
            context, frame, x.numel(), payload.capacity, 30, CPU, "x", (entries.indices, entries.values)
        )
        again: Any = codec.decode(context, frame, x.numel(), payload.capacity, 30, CPU, "x")
        assert torch.equal(read[0].indices.to(torch.int64), again[0].indices)
        assert torch.equal(read[0].values, again[0].values) and torch.equal(read[1], tail)
        kernels.subtract_at(x, read[0].indices, read[0].values)
