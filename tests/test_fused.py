"""Fused native kernels against the plain-torch reference, with the vector loops of this machine and without any."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire import kernels
from thinwire.codecs import TernaryCodec
from thinwire.collectives.shards import shards
from thinwire.compressors import Ternarize
from thinwire.kernels import cpu, reference
from thinwire.layout import Hyper, Layout, Turn

ROOT = Path(__file__).parents[1]
QUICK = settings(deadline=None, max_examples=40, derandomize=True)
CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(cpu.library() is None, reason=f"no native library here: {cpu.why_not()}")


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
    loaded = cpu.load(path)
    assert isinstance(loaded, ctypes.CDLL), loaded
    return loaded


@pytest.fixture(params=["this machine's loops", "portable"])
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run a test with both versions of the hot loops."""
    if request.param == "portable":
        monkeypatch.setattr(cpu, "_lib", lambda: request.getfixturevalue("portable"))
        assert cpu.vectors() == "portable"
    yield


def vector(seed: int, numel: int, size: float = 1.0) -> Tensor:
    return torch.from_numpy((np.random.default_rng(seed).standard_normal(numel) * size).astype(np.float32))


def test_a_library_that_does_not_load_says_why(tmp_path: Path) -> None:
    assert "was not built" in str(cpu.load(tmp_path / "_native.so"))
    (tmp_path / "_native.so").write_bytes(b"no library")
    reason = cpu.load(tmp_path / "_native.so")
    assert isinstance(reason, str) and "could not be loaded" in reason and "_native.so" in reason


def test_info_says_which_loops_run() -> None:
    assert cpu.vectors() in ("AVX-512", "AVX2", "portable")
    if kernels.home_name(CPU) == "native":
        assert cpu.vectors() in kernels.describe()


# ------------------------------------------------------------------------------------------------------------ TernGrad


@pytest.mark.parametrize("shift", [0.0, 3.0, -1000.0])
@pytest.mark.parametrize("size", [1e-30, 1e-6, 1.0, 1e25])
def test_moments(native: None, size: float, shift: float) -> None:
    parts = [(vector(n, n) + shift) * size for n in (1, 31, 32, 1000, 1024, 70_001, 200_000)]
    deviations, largest = cpu.moments(parts)
    for part, deviation, most in zip(parts, deviations.tolist(), largest.tolist(), strict=True):
        assert most == float(part.abs().max())
        exact = float(part.double().std(correction=0))
        # Plain torch's own distance from the exact value, and the last place of the result.
        rounding = abs(float(part.std(correction=0)) - exact) + 2.0**-23 * exact
        assert abs(deviation - exact) <= 2 * rounding + 1e-45


def test_moments_do_not_depend_on_threads(native: None) -> None:
    parts = [vector(1, 300_001), vector(2, 65_536), vector(3, 5)]
    threads = torch.get_num_threads()
    try:
        results = []
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            results.append(torch.stack(cpu.moments(parts)))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_moments_of_what_is_not_finite(native: None) -> None:
    for bad in (float("nan"), float("inf"), float("-inf")):
        for place in (0, 700, 99_999):
            x = vector(0, 100_000)
            x[place] = bad
            for got, want in zip(cpu.moments([x, vector(0, 10)]), reference.moments([x, vector(0, 10)]), strict=True):
                assert torch.allclose(got, want, rtol=1e-6, equal_nan=True)
    assert torch.equal(torch.stack(cpu.moments([torch.zeros(0), torch.zeros(9)])), torch.zeros(2, 2))


@QUICK
@given(
    numels=st.lists(st.sampled_from([0, 1, 2, 4, 5, 7, 31, 319, 320, 321, 5000, 200_003]), max_size=6),
    seed=st.integers(0, 2**32 - 1),
    clipped=st.booleans(),
)
def test_ternarize_packed(portable: ctypes.CDLL, numels: list[int], seed: int, clipped: bool) -> None:
    parts = [vector(seed % 1000 + place, numel) for place, numel in enumerate(numels)]
    for part in parts:
        part[::7], part[3::11] = 0.0, -0.0
        if part.numel() > 30:
            part[10], part[20] = float("nan"), float("-inf")
    scales = torch.rand(len(parts), generator=torch.Generator().manual_seed(seed)) * 3
    limits = scales * 0.7 if clipped else None
    keys = [reference.stream_key(seed, place, 1, "w") for place in range(len(parts))]
    expected = reference.ternarize_packed(parts, scales, keys, limits)
    assert torch.equal(cpu.ternarize_packed(parts, scales, keys, limits), expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "_lib", lambda: portable)
        assert torch.equal(cpu.ternarize_packed(parts, scales, keys, limits), expected)


@QUICK
@given(data=st.data(), numel=st.sampled_from([1, 4, 5, 9, 1000, 400_000]))
def test_gather_trits(data: st.DataObject, numel: int) -> None:
    packed = reference.pack_trits(torch.from_numpy(np.random.default_rng(numel).integers(-1, 2, numel, dtype=np.int8)))
    spans = []
    for _ in range(data.draw(st.integers(0, 5))):
        start = data.draw(st.integers(0, numel - 1))
        spans.append(slice(start, data.draw(st.integers(start, numel))))
    assert torch.equal(cpu.gather_trits(packed, spans), reference.gather_trits(packed, spans))


def test_a_frame_of_trits_is_the_same_from_both_homes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradient to packed bytes through compressor and codec, and a shard of it, without a vector of trits between."""
    rows = [("a", 0, 10_007, True), ("b", 1, 3, True), ("c", 2, 70_000, True)]
    turn = Turn(Layout.of(rows), 5, (Hyper(),) * 3)
    x, frames = vector(4, 80_010), []
    for home in (cpu, reference):
        monkeypatch.setattr(kernels, "_home", lambda tensor, home=home: home)
        monkeypatch.setattr(cpu, "moments", reference.moments)  # a scaler may differ in its last place
        compressor = Ternarize()
        payload = compressor.compress(turn, x, compressor.measure(turn, x), 2)
        for shard in (None, *shards(turn.layout, 3, "sharded")):
            part = payload
            if shard is not None:
                spans = [piece.span for piece in shard.pieces]
                part = type(payload)(kernels.gather_trits(payload.packed, spans), payload.scales, shard.piece_runs())
            frames.append(TernaryCodec().encode(turn, part, torch.zeros(3), with_scales=shard is None))
    assert len(frames) == 8
    assert all(torch.equal(a, b) for a, b in zip(frames[:4], frames[4:], strict=True))


def test_moments_are_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(
        "thinwire.compressors.ternary.moments", lambda parts: calls.append(1) or reference.moments(parts)
    )
    turn, x = Turn(Layout.of([("a", 0, 100, True)]), 0, (Hyper(),)), vector(0, 100)
    compressor = Ternarize()
    payload = compressor.compress(turn, x, compressor.measure(turn, x), 0)
    assert len(calls) == 1
    again = compressor.compress(turn, x, payload.scales, 0)  # without measure: taken then
    assert len(calls) == 2 and torch.equal(again.packed, payload.packed)
    compressor.measure(turn, x)
    other = compressor.compress(turn, x * 2, payload.scales, 0)  # measured of another vector: of no use
    assert len(calls) == 4 and other.packed.shape == payload.packed.shape
