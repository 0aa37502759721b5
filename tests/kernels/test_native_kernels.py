"""Native kernels against the plain-torch reference, with the vector loops of this machine and without any."""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import ROOT
from torch import Tensor

from thinwire import kernels
from thinwire.codecs import SparseCodec, TernaryCodec
from thinwire.collectives.serving_shards import shards
from thinwire.compressors import Ternarize
from thinwire.engine.context import ExchangeContext, Hyper
from thinwire.engine.layout import Layout
from thinwire.engine.payloads import Sparse, TernaryDraw
from thinwire.errors import FrameError
from thinwire.kernels import native, reference
from thinwire.kernels.dispatch import CHOSEN
from thinwire.kernels.native import library, quantization

QUICK = settings(deadline=None, max_examples=40, derandomize=True)
CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(library.handle() is None, reason=f"no native library here: {library.why_not()}")


@pytest.fixture(scope="session")
def portable(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The library without its vector loops, as a processor without AVX2 runs it."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler here")
    path = tmp_path_factory.mktemp("portable") / "_native.so"
    sources = sorted(str(file) for file in (ROOT / "native").glob("*.cpp") if file.name != "fuzz.cpp")
    flags = ["-O2", "-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-DTHINWIRE_PORTABLE"]
    subprocess.run([compiler, "-shared", "-fPIC", *flags, *sources, "-pthread", "-o", str(path)], check=True)
    loaded = library.load(path)
    assert isinstance(loaded, ctypes.CDLL), loaded
    return loaded


@pytest.fixture(params=["this machine's loops", "portable"])
def loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run a test with both versions of the hot loops."""
    if request.param == "portable":
        monkeypatch.setattr(library, "lib", lambda: request.getfixturevalue("portable"))
        assert library.vectors() == "portable"
    yield


def vector(seed: int, numel: int, size: float = 1.0) -> Tensor:
    return torch.from_numpy((np.random.default_rng(seed).standard_normal(numel) * size).astype(np.float32))


@pytest.mark.parametrize("shift", [0.0, 3.0, -1000.0])
@pytest.mark.parametrize("size", [1e-30, 1e-6, 1.0, 1e25])
def test_moments_are_exact_to_rounding(loops: None, size: float, shift: float) -> None:
    parts = [(vector(n, n) + shift) * size for n in (1, 31, 32, 1000, 1024, 70_001, 200_000)]
    deviations, largest = quantization.moments(parts)
    for part, deviation, most in zip(parts, deviations.tolist(), largest.tolist(), strict=True):
        assert most == float(part.abs().max())
        exact = float(part.double().std(correction=0))
        # Plain torch's own distance from the exact value, and the last place of the result.
        rounding = abs(float(part.std(correction=0)) - exact) + 2.0**-23 * exact
        assert abs(deviation - exact) <= 2 * rounding + 1e-45


def test_moments_do_not_depend_on_threads(loops: None) -> None:
    parts = [vector(1, 300_001), vector(2, 65_536), vector(3, 5)]
    threads = torch.get_num_threads()
    try:
        results = []
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            results.append(torch.stack(quantization.moments(parts)))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_moments_of_what_is_not_finite(loops: None) -> None:
    for bad in (float("nan"), float("inf"), float("-inf")):
        for place in (0, 700, 99_999):
            x = vector(0, 100_000)
            x[place] = bad
            for got, want in zip(
                quantization.moments([x, vector(0, 10)]), reference.moments([x, vector(0, 10)]), strict=True
            ):
                assert torch.allclose(got, want, rtol=1e-6, equal_nan=True)
    assert torch.equal(torch.stack(quantization.moments([torch.zeros(0), torch.zeros(9)])), torch.zeros(2, 2))


@QUICK
@given(
    numels=st.lists(st.sampled_from([0, 1, 2, 4, 5, 7, 31, 319, 320, 321, 5000, 200_003]), max_size=6),
    seed=st.integers(0, 2**32 - 1),
    clipped=st.booleans(),
)
def test_ternarize_packed_equals_the_reference(
    portable: ctypes.CDLL, numels: list[int], seed: int, clipped: bool
) -> None:
    parts = [vector(seed % 1000 + place, numel) for place, numel in enumerate(numels)]
    for part in parts:
        part[::7], part[3::11] = 0.0, -0.0
        if part.numel() > 30:
            part[10], part[20] = float("nan"), float("-inf")
    scales = torch.rand(len(parts), generator=torch.Generator().manual_seed(seed)) * 3
    limits = scales * 0.7 if clipped else None
    keys = [reference.stream_key(seed, place, 1, "w") for place in range(len(parts))]
    expected = reference.ternarize_packed(parts, scales, keys, limits)
    assert torch.equal(native.ternarize_packed(parts, scales, keys, limits), expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "lib", lambda: portable)
        assert torch.equal(native.ternarize_packed(parts, scales, keys, limits), expected)


@QUICK
@given(data=st.data(), numel=st.sampled_from([1, 4, 5, 9, 1000, 400_000]), seed=st.integers(0, 2**32 - 1))
def test_pieces_of_a_draw_are_the_draw_s_pieces(data: st.DataObject, numel: int, seed: int) -> None:
    """A shard is drawn from the gradient anew, and gets the trits that the whole would have there."""
    whole = TernaryDraw((vector(1, numel), vector(2, 77)), torch.tensor([2.0, 1.5]), None, (seed, seed ^ 5), (0, 0))
    pieces = []
    for _ in range(data.draw(st.integers(0, 5))):
        start = data.draw(st.integers(0, numel - 1))
        pieces.append((0, start, data.draw(st.integers(start, numel))))
    pieces.append((1, 7, 70))
    trits = whole.drawn().trits
    expected = [trits[place * numel + start : place * numel + stop] for place, start, stop in pieces]
    for backend in ("native", "reference"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(CHOSEN, CPU, backend)
            assert torch.equal(whole.cut(pieces).drawn().trits, torch.cat(expected))


@pytest.mark.parametrize("whole_model", [False, True])
def test_frame_of_trits_is_the_same_from_both_homes(monkeypatch: pytest.MonkeyPatch, whole_model: bool) -> None:
    """Gradient to packed bytes through compressor and codec, and a shard of it, without a vector of trits between."""
    rows = [("a", 0, 10_007, True), ("b", 1, 3, True), ("c", 2, 70_000, True)]
    context = ExchangeContext(Layout.of(rows), 5, (Hyper(),) * 3)
    x, frames = vector(4, 80_010), []
    for backend in ("native", "reference"):
        monkeypatch.setitem(CHOSEN, CPU, backend)
        monkeypatch.setattr(quantization, "moments", reference.moments)  # a scaler may differ in its last place
        compressor = Ternarize(whole_model=whole_model)
        agreed = compressor.measure(context, x)
        assert agreed is not None and agreed.numel() == (1 if whole_model else 3)
        payload = compressor.compress(context, x, agreed, 2)
        assert payload.scales.unique().numel() == agreed.numel()
        for shard in (None, *shards(context.layout, 3, "sharded")):
            part = payload
            if shard is not None:
                part = payload.cut([(piece.place, piece.start, piece.stop) for piece in shard.pieces])
            frames.append(TernaryCodec().encode(context, part, torch.zeros(3), with_scales=shard is None))
    assert len(frames) == 8
    assert all(torch.equal(a, b) for a, b in zip(frames[:4], frames[4:], strict=True))


def test_moments_are_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(
        "thinwire.compressors.ternary.clipped_scalers",
        lambda parts, sigma: calls.append(1) or reference.clipped_scalers(parts, sigma),
    )
    context, x = ExchangeContext(Layout.of([("a", 0, 100, True)]), 0, (Hyper(),)), vector(0, 100)
    compressor = Ternarize()
    payload = compressor.compress(context, x, compressor.measure(context, x), 0)
    assert len(calls) == 1
    again = compressor.compress(context, x, payload.scales, 0)  # without measure: taken then
    assert len(calls) == 2 and torch.equal(again.drawn().packed, payload.drawn().packed)
    compressor.measure(context, x)
    other = compressor.compress(context, x * 2, payload.scales, 0)  # measured of another vector: of no use
    assert len(calls) == 4 and other.drawn().packed.shape == payload.drawn().packed.shape


@QUICK
@given(data=st.data(), numel=st.sampled_from([1, 9, 1000, 100_000, 2**32 - 1]), threads=st.integers(1, 3))
def test_rice_indices_equal_the_reference(portable: ctypes.CDLL, data: st.DataObject, numel: int, threads: int) -> None:
    """Right and damaged streams: both homes find the same indices and the same thing wrong."""
    streams = []
    for _ in range(data.draw(st.integers(1, 4))):
        generator = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
        k, parameter = (
            data.draw(st.integers(0, min(numel, 400))),
            data.draw(st.integers(0 if numel < 2**20 else 20, 30)),
        )
        indices = np.unique(generator.integers(0, numel, k))
        gaps = torch.from_numpy(np.diff(indices, prepend=-1) - 1)
        low, unary = reference.rice_encode(gaps, parameter)
        unary = torch.nn.functional.pad(unary, (0, -unary.numel() % 4))
        match data.draw(st.sampled_from(["right", "flip", "longer", "shorter", "count"])):
            case "flip" if unary.numel():
                unary[data.draw(st.integers(0, unary.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
            case "longer":
                unary = torch.cat([unary, torch.zeros(4, dtype=torch.uint8)])
            case "shorter":
                unary = unary[:-4]
            case "count":
                indices = indices[:-1]
        low = low[: -(-indices.size * parameter // 8)]
        streams.append(kernels.RiceStream(low, unary, indices.size, parameter))
    limit = data.draw(st.sampled_from([numel, max(1, numel // 2)]))
    expected = reference.rice_indices(streams, limit)
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "threads", lambda: threads)
        results = [native.rice_indices(streams, limit)]
        patch.setattr(library, "lib", lambda: portable)
        results.append(native.rice_indices(streams, limit))
    assert torch.get_num_threads() == before
    for got in results:
        assert [fault for _, fault in got] == [fault for _, fault in expected]
        for (ours, fault), (theirs, _) in zip(got, expected, strict=True):
            assert fault or torch.equal(ours, theirs)


@QUICK
@given(
    numels=st.lists(st.sampled_from([0, 1, 5, 300, 70_000, 140_001]), min_size=1, max_size=5),
    seed=st.integers(0, 2**32 - 1),
    num_lists=st.integers(0, 5),
    threads=st.integers(1, 3),
)
def test_scatter_add_equals_the_reference(numels: list[int], seed: int, num_lists: int, threads: int) -> None:
    """Many lists into parts wherever they lie: bit-equal to adding them one after the other."""
    total, generator = sum(numels), np.random.default_rng(seed)
    starts = np.cumsum([0, *numels[:-1]]).tolist()
    lists = []
    for _ in range(num_lists):
        indices = np.unique(generator.integers(0, total, min(total, 20_000))) if total else np.zeros(0, dtype=np.int64)
        values = generator.standard_normal(indices.size).astype(np.float32)
        lists.append((torch.from_numpy(indices), torch.from_numpy(values)))
    ours, theirs = ([torch.ones(numel) for numel in numels] for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "threads", lambda: threads)
        native.scatter_add(ours, starts, lists, 0.25)
    reference.scatter_add(theirs, starts, lists, 0.25)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_several_frames_are_decoded_like_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames of different codings together; and whichever is bad, its origin and its fault are named."""
    context = ExchangeContext(Layout.of([("a", 0, 5000, True)]), 3, (Hyper(),))
    frames, payloads = [], []
    for rank, coding in enumerate(["rice", "int32", "rice", "delta16"]):
        indices = torch.from_numpy(np.unique(np.random.default_rng(rank).integers(0, 5000, 50)))
        payloads.append(Sparse(indices, vector(rank, indices.numel()), 5000, 50))
        frames.append((SparseCodec("fp32", coding).encode(context, payloads[-1], torch.ones(2)), f"rank {rank}"))
    codec = SparseCodec()
    for payload, (sparse, tail, _) in zip(payloads, codec.decode_all(context, frames, 5000, 50, 2, CPU), strict=True):
        assert torch.equal(sparse.indices, payload.indices) and torch.equal(sparse.values, payload.values)
        assert torch.equal(tail, torch.ones(2))
    assert codec.decode_all(context, [], 5000, 50, 2, CPU) == []
    for bad in range(4):
        damaged = [(frame.clone(), origin) for frame, origin in frames]
        damaged[bad][0][60] ^= 1
        with pytest.raises(FrameError, match=f"from rank {bad}: its checksum"):
            codec.decode_all(context, damaged, 5000, 50, 2, CPU)


@QUICK
@given(
    numels=st.lists(st.sampled_from([0, 1, 5, 300, 70_000, 140_001]), max_size=5),
    seed=st.integers(0, 2**32 - 1),
    threshold=st.sampled_from([None, 0.0, 1.0, 3.0, float("inf")]),
)
def test_select_scopes_equals_the_reference(numels: list[int], seed: int, threshold: float | None) -> None:
    """With enough candidates, with too few and with none: the same choice, and ties to the lower index."""
    bounds = np.cumsum([0, *numels]).tolist()
    x = vector(seed % 1000, bounds[-1])
    x[::3] = x[:1].clone() if x.numel() else 0.0
    ks = [min(numel, max(1, numel // 50)) for numel in numels]
    candidates = None if threshold is None else torch.nonzero(x.abs() >= threshold).flatten()
    ours, theirs = (backend.select_scopes(x, bounds, ks, candidates) for backend in (native, reference))
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[2], theirs[2])
    assert candidates is None or ours[1] == theirs[1]
    everything = [1, *(numel for numel in numels)]
    assert torch.equal(native.select_scopes(x, bounds, everything[1:], None)[0], torch.arange(bounds[-1]))


@pytest.mark.parametrize("kind", ["normal", "heavy", "few", "equal", "rising", "nan"])
@pytest.mark.parametrize("k", [1, 70, 5000, 150_000])
def test_select_topk_of_a_long_vector_equals_the_reference(loops: None, kind: str, k: int) -> None:
    """The sample may be misled: by few large elements, by equal ones, by an order; the choice is exact all the same."""
    x = vector(7, 200_003)
    if kind == "heavy":
        x = x**9
    elif kind == "few":
        x = torch.zeros(200_003)
        x[::401] = vector(8, x[::401].numel())
    elif kind == "equal":
        x = torch.ones(200_003)
    elif kind == "rising":
        x = torch.arange(200_003, dtype=torch.float32)
    elif kind == "nan":
        x[::1000] = float("nan")
    assert torch.equal(native.select_topk(x, k), reference.select_topk(x, k))


@QUICK
@given(seed=st.integers(0, 2**32 - 1), sizes=st.tuples(st.integers(0, 300), st.integers(0, 300)))
def test_union_and_subtraction_equal_the_reference(seed: int, sizes: tuple[int, int]) -> None:
    generator = np.random.default_rng(seed)
    odd = torch.tensor([0.0, -0.0, float("nan"), float("inf"), float("-inf"), 1e38])
    lists = []
    for size in sizes:
        indices = torch.from_numpy(np.unique(generator.integers(0, 400, size)))
        values = torch.from_numpy(generator.standard_normal(indices.numel()).astype(np.float32))
        values[::5] = odd[torch.from_numpy(generator.integers(0, 6, values[::5].numel()))]
        lists.append((indices, values))
    (a, a_values), (b, b_values) = lists
    for backend in (native, reference):  # either order: the same bits
        forth, back = backend.union_add(a, a_values, b, b_values), backend.union_add(b, b_values, a, a_values)
        assert torch.equal(forth[0], back[0]) and same_bits(forth[1], back[1])
    ours, theirs = native.union_add(a, a_values, b, b_values), reference.union_add(a, a_values, b, b_values)
    assert torch.equal(ours[0], theirs[0]) and same_bits(ours[1], theirs[1])
    x = vector(seed % 100, 400)
    x[:6] = odd
    ours_x, theirs_x = x.clone(), x.clone()
    native.subtract_at(ours_x, a, a_values)
    reference.subtract_at(theirs_x, a, a_values)
    assert same_bits(ours_x, theirs_x)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit, but a nan is a nan."""
    return torch.equal(torch.isnan(a), torch.isnan(b)) and torch.equal(
        torch.nan_to_num(a).view(torch.int32), torch.nan_to_num(b).view(torch.int32)
    )


@pytest.mark.parametrize("place", [None, 0, 2])
def test_first_nonfinite_equals_the_reference(place: int | None) -> None:
    parts = [vector(1, 100_000), torch.zeros(0), vector(2, 10), vector(3, 70_000)]
    for odd, limit in ((float("nan"), 4096.0), (float("-inf"), math.inf), (4096.0, 4096.0), (-3e38, 2.0**127)):
        if place is not None:
            parts[place][-1] = odd
        assert native.first_nonfinite(parts, limit) == reference.first_nonfinite(parts, limit) == place


def test_first_nonfinite_lets_pass_what_is_below_the_limit() -> None:
    parts = [torch.tensor([-4095.9, 0.0]), torch.tensor([3.4e38])]
    for backend in (native, reference):
        assert backend.first_nonfinite(parts[:1], 4096.0) is None and backend.first_nonfinite(parts, math.inf) is None
        assert backend.first_nonfinite(parts, 4096.0) == 1


def test_checksum_around_a_hole_equals_the_reference() -> None:
    words = torch.arange(1000, dtype=torch.int32) * 12345
    for hole in (0, 8, 999):
        assert int(native.checksum_around(words, hole)) == int(reference.checksum_around(words, hole))
