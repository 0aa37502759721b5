"""Values in frames: what every coding rounds to, and what it does with what is not finite."""

from __future__ import annotations

import math
import struct

import numpy as np
import plain_wire as plain
import pytest
import torch
from generators import torch_generator_untouched  # noqa: F401  every test of this file
from hypothesis import given, settings
from hypothesis import strategies as st
from tensor_bytes import to_bytes, to_tensor
from torch import Tensor

from thinwire.codecs.frame import Body
from thinwire.codecs.values import decode_values, encode_values, saturating_half, value_sections_nbytes
from thinwire.kernels import reference

QUICK = settings(deadline=None, max_examples=60, derandomize=True)
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
LARGEST, SMALLEST = struct.unpack("<ff", bytes.fromhex("ffff7f7f01000000"))  # of float32; the second is denormal
SPECIAL = [0.0, -0.0, 1.0, -1.0, SMALLEST, -SMALLEST, 1e-40, 2.0**-126, LARGEST, -LARGEST, 65504.0, 65519.99, 65520.0,
           -65536.0, 3.3895314e38, 3.4e38, 6e-8, 5.96e-8, 2.98e-8, 1.0009766, 1.00048828125, math.pi]  # fmt: skip


def read_values(coding: str, values: Tensor) -> Tensor:
    sections = encode_values(coding, values)
    assert [section.numel() for section in sections] == value_sections_nbytes(coding, values.numel())
    content = b"".join(to_bytes(section) + bytes(-section.numel() % 4) for section in sections)
    return decode_values(coding, values.numel(), Body(to_tensor(content), "x"))


@pytest.mark.parametrize("coding", ["fp32", "fp16", "bf16", "int8", "int4", "int2"])
@QUICK
@given(values=st.lists(st.one_of(finite, st.sampled_from(SPECIAL)), max_size=40))
def test_rounding_is_bounded_and_finite(coding: str, values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    back = read_values(coding, x)
    assert back.dtype == torch.float32 and bool(torch.isfinite(back).all())
    exact, got = x.double(), back.double()
    error = (exact - got).abs()
    if coding == "fp32":
        assert to_bytes(back) == to_bytes(x)  # -0.0 and denormals too
    elif coding == "int8":
        top = float(exact.abs().max()) if values else 0.0
        # Half a step; near the smallest denormals the step itself is rounded and the codes saturate.
        assert bool((error <= top / 127 * 0.5001 + 127 * SMALLEST).all())
    elif coding == "int4":
        top, least = (float(exact.abs().max()), float(exact.abs().min())) if values else (0.0, 0.0)
        # Half of the widest gap between levels, 16/64 of the way between ends that are themselves rounded to bfloat16.
        assert bool((error <= (top - least) / 8 + top * 2.0**-7 + 2.0**-133).all())
        assert bool((error <= exact.abs() * (1 + 2.0**-7) + 2.0**-133).all())  # never farther away than zero is
    elif coding == "int2":
        # A class of one chunk's magnitudes becomes their mean, so squares never grow but by bfloat16's rounding.
        top = exact.abs().max() if values else exact.sum()
        assert (
            float((error / (top + 2.0**-149)).square().sum())
            <= float((exact / (top + 2.0**-149)).square().sum()) * (1 + 2.0**-6)
            + len(values) * (2.0**-133 / float(top + 2.0**-149)) ** 2
        )
        assert bool((torch.signbit(back) == (x < 0)).all())
    else:
        relative, tiny, limit = (
            (2.0**-11, 2.0**-25, 65504.0) if coding == "fp16" else (2.0**-8, 2.0**-134, 3.3895314e38)
        )
        inside = exact.abs() <= limit
        assert bool((error <= exact.abs() * relative + tiny)[inside].all())
        assert bool((got.abs() >= limit * (1 - 1e-7))[~inside].all()) and bool(
            (got.sign() == exact.sign())[~inside].all()
        )
        assert bool(torch.equal(torch.signbit(back), torch.signbit(x)))


@QUICK
@given(x=st.one_of(finite, st.sampled_from(SPECIAL)))
def test_halves_equal_the_second_implementation(x: float) -> None:
    one = torch.tensor([x], dtype=torch.float32)
    assert to_bytes(saturating_half(one, torch.float16)) == plain.to_half(float(one))
    assert to_bytes(saturating_half(one, torch.bfloat16)) == plain.to_bfloat(float(one))


@pytest.mark.parametrize("coding", ["fp32", "fp16", "bf16", "int8", "int4", "int2"])
def test_infinities_and_nans_are_seen(coding: str) -> None:
    x = torch.ones(600)
    x[3], x[4], x[300] = float("inf"), float("-inf"), float("nan")
    back = read_values(coding, x)
    if coding == "int8":
        assert bool(torch.isnan(back[:512]).all()) and torch.equal(back[512:], torch.ones(88))
    elif coding == "int4":
        assert bool(torch.isnan(torch.cat([back[:128], back[256:384]])).all())
        assert bool((torch.cat([back[128:256], back[384:]]) == 1).all())
    elif coding == "int2":
        assert bool(torch.isnan(torch.cat([back[:64], back[256:320]])).all())
        assert bool((torch.cat([back[64:256], back[320:]]) == 1).all())
    else:
        assert back[3] == float("inf") and back[4] == float("-inf") and bool(torch.isnan(back[300]))
        assert bool((back[5:300] == 1).all())


@pytest.mark.parametrize("size", [0, 1, 7, 255, 256, 257, 1023, 4097])
def test_int8_chunk_is_rounded_to_half_a_step(size: int) -> None:
    generator = np.random.default_rng(size)
    values = (generator.standard_normal(size) * 10.0 ** generator.integers(-8, 8, size)).astype(np.float32)
    codes, scales = reference.int8_quantize(torch.from_numpy(values))
    assert codes.shape == (size,) and scales.shape == (-(-size // 256),)
    back = reference.int8_dequantize(codes, scales).numpy()
    for chunk in range(scales.numel()):
        part = slice(256 * chunk, min(size, 256 * chunk + 256))
        top = float(np.abs(values[part]).max())
        assert float(scales[chunk]) == float(np.float32(top) / np.float32(127))
        assert np.abs(values[part] - back[part]).max() <= 0.5001 * top / 127
        assert int(codes[part].abs().max()) == 127
    assert reference.int8_quantize(torch.zeros(size))[0].tolist() == [0] * size


def test_int8_does_not_overflow() -> None:
    """The largest finite numbers stay finite, as in the other codings: an inf would never leave the residual."""
    for ulps in range(300):
        x = torch.tensor([0x7F7FFFFF - ulps], dtype=torch.int32).view(torch.float32)
        assert bool(torch.isfinite(reference.int8_dequantize(*reference.int8_quantize(x))).all()), ulps


@pytest.mark.parametrize("size", [0, 1, 2, 127, 128, 129, 1023])
def test_int4_equals_the_second_implementation(size: int) -> None:
    generator = np.random.default_rng(size)
    for spread in (0, 3, 30):
        values = (generator.laplace(size=size) * 10.0 ** generator.integers(-spread, spread + 1, size)).astype(
            np.float32
        )
        values[generator.random(size) < 0.1] = 0.0
        sections = [to_bytes(section) for section in encode_values("int4", torch.from_numpy(values))]
        assert sections == plain.encode_four_bits(values.tolist())
        assert read_values("int4", torch.from_numpy(values)).tolist() == plain.decode_four_bits(*sections, size)


def test_int4_is_made_for_what_top_k_chooses() -> None:
    """The shares of the norm that are lost, as the module says them: with ends, and with levels that start at zero."""
    values = np.random.default_rng(0).laplace(size=2_000_000).astype(np.float32)
    chosen = torch.from_numpy(values[np.abs(values) > np.log(1000)])

    def lost(back: Tensor) -> float:
        return float((back - chosen).norm() / chosen.norm())

    assert 0.015 < lost(read_values("int4", chosen)) < 0.021
    chunks = chosen[: chosen.numel() // 128 * 128].view(-1, 128)
    scale = chunks.abs().amax(dim=1, keepdim=True) / 7
    around_zero = torch.cat([((chunks / scale).round() * scale).flatten(), chosen[chunks.numel() :]])
    assert lost(around_zero) > 2.5 * lost(read_values("int4", chosen))
    assert lost(read_values("int8", chosen)) < 0.004


@pytest.mark.parametrize("size", [0, 1, 2, 3, 63, 64, 65, 129, 1023])
def test_int2_equals_the_second_implementation(size: int) -> None:
    generator = np.random.default_rng(size)
    for spread in (0, 3, 30):
        values = (generator.laplace(size=size) * 10.0 ** generator.integers(-spread, spread + 1, size)).astype(
            np.float32
        )
        values[generator.random(size) < 0.1] = 0.0
        sections = [to_bytes(section) for section in encode_values("int2", torch.from_numpy(values))]
        assert sections == plain.encode_two_bits(values.tolist())
        assert read_values("int2", torch.from_numpy(values)).tolist() == plain.decode_two_bits(*sections, size)


def lost_in_two_bits(values: np.ndarray) -> float:
    """The relative squared error, from the definition: every chunk's mean parts it, and each part becomes its mean."""
    error = 0.0
    for start in range(0, values.size, 64):
        magnitude = np.abs(values[start : start + 64]).astype(np.float64)
        reaches = magnitude >= np.float32(magnitude.mean())
        for members in (magnitude[reaches], magnitude[~reaches]):
            error += float(((members - members.mean()) ** 2).sum()) if members.size else 0.0
    return error / float((values.astype(np.float64) ** 2).sum())


def lost_in_four_bins(values: np.ndarray) -> float:
    """The published quantiser: bins around -3, -1.5, 0 and 1.5 standard deviations, each becomes its mean."""
    away = values.astype(np.float64) - values.mean()
    bins = np.clip(np.round(away / (1.5 * away.std(ddof=1))), -2, 1)
    means = {place: values[bins == place].mean() for place in np.unique(bins)}
    back = np.array([means[place] for place in bins])
    return float(((values - back) ** 2).sum() / (values.astype(np.float64) ** 2).sum())


def chosen_of_chunks(x: np.ndarray) -> np.ndarray:
    """The 64 largest of every 4,096, in their order."""
    rows = x.reshape(-1, 4096)
    places = np.sort(np.argsort(-np.abs(rows), axis=1, kind="stable")[:, :64], axis=1)
    return np.take_along_axis(rows, places, axis=1).ravel().astype(np.float32)


@pytest.mark.parametrize(
    ("kind", "least", "most", "times"),
    [("gaussian", 0.004, 0.005, 2.5), ("laplace", 0.013, 0.016, 2.4), ("of all sizes", 0.003, 0.006, 20)],
)
def test_int2_loses_less_than_the_published_two_bits(kind: str, least: float, most: float, times: float) -> None:
    generator = np.random.default_rng(0)
    x = (generator.laplace if kind == "laplace" else generator.normal)(size=64 * 4096)
    if kind == "of all sizes":
        x = x.reshape(64, 4096) * 10.0 ** generator.uniform(-2, 2, (64, 1))
    values = chosen_of_chunks(x)
    back = read_values("int2", torch.from_numpy(values)).numpy().astype(np.float64)
    lost = float(((values - back) ** 2).sum() / (values.astype(np.float64) ** 2).sum())
    assert lost == pytest.approx(lost_in_two_bits(values), rel=0.01)  # levels are rounded to bfloat16
    assert least < lost < most and lost_in_four_bins(values) > times * lost


def test_int2_of_a_chunk_whose_magnitudes_are_equal_is_exact() -> None:
    for size in (1, 3, 64, 100):
        x = torch.full((size,), -0.75)
        assert torch.equal(read_values("int2", x), x)
    assert read_values("int2", torch.zeros(70)).tolist() == [0.0] * 70
