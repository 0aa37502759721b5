"""Kernels that count, pack, round and check: each home against plain Python, property by property."""

from __future__ import annotations

import math
import random
import struct
import zlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import plain_wire as plain
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire.codecs import SparseCodec
from thinwire.codecs.frame import Body
from thinwire.codecs.indices import IndexPlan, RiceSections, decode_indices, index_budget
from thinwire.codecs.values import decode_values, encode_values, saturating_half, value_sections_nbytes
from thinwire.engine.context import ExchangeContext
from thinwire.engine.layout import Layout
from thinwire.engine.payloads import Sparse
from thinwire.kernels import cpu, native, reference

QUICK = settings(deadline=None, max_examples=60, derandomize=True)
CPU = torch.device("cpu")
SIZES = [0, 1, 7, 1023, 4097]
HOMES = [reference] + ([cpu] if native.library() is not None else [])
every_home = pytest.mark.parametrize("home", HOMES, ids=lambda home: home.__name__.split(".")[-1])
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
LARGEST, SMALLEST = struct.unpack("<ff", bytes.fromhex("ffff7f7f01000000"))  # of float32; the second is denormal


def as_bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())


def tensor_of(data: bytes) -> Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


@pytest.fixture(autouse=True)
def _torch_generator_untouched() -> Any:
    """Nothing in this file may draw from the user's generator."""
    before = torch.get_rng_state()
    yield
    assert torch.equal(before, torch.get_rng_state())


# -------------------------------------------------------------------------------------------------- bits, trits, uints


@every_home
@QUICK
@given(bits=st.lists(st.booleans(), max_size=200))
def test_bits(home: ModuleType, bits: list[bool]) -> None:
    packed = home.pack_bits(torch.tensor(bits, dtype=torch.bool))
    assert packed.dtype == torch.uint8 and as_bytes(packed) == plain.bits_to_bytes(bits)
    assert home.unpack_bits(packed, len(bits)).tolist() == bits
    longer = torch.cat([packed, torch.full((3,), 255, dtype=torch.uint8)])  # a section may be followed by others
    assert home.unpack_bits(longer, len(bits)).tolist() == bits


@every_home
@QUICK
@given(trits=st.lists(st.sampled_from([-1, 0, 1]), max_size=200))
def test_trits(home: ModuleType, trits: list[int]) -> None:
    packed = home.pack_trits(torch.tensor(trits, dtype=torch.int8))
    assert as_bytes(packed) == plain.pack_trits(trits)
    assert not trits or int(packed.max()) < 243
    back = home.unpack_trits(packed, len(trits))
    assert back.dtype == torch.int8 and back.tolist() == trits


@every_home
def test_every_byte_of_trits(home: ModuleType) -> None:
    packed = torch.arange(243, dtype=torch.uint8)
    trits = home.unpack_trits(packed, 5 * 243)
    assert trits.tolist() == plain.unpack_trits(bytes(range(243)), 5 * 243)
    assert torch.equal(home.pack_trits(trits), packed)


@pytest.mark.parametrize("bits", range(33))
def test_uints_of_every_width(bits: int) -> None:
    numbers = random.Random(bits)
    for size in (0, 1, 2, 7, 8, 9, 100):
        values = [numbers.choice([0, 2**bits - 1, numbers.randrange(2**bits)]) for _ in range(size)]
        packed = reference.pack_uints(torch.tensor(values, dtype=torch.int64), bits)
        assert as_bytes(packed) == plain.pack_uints(values, bits) and packed.numel() == -(-size * bits // 8)
        back = reference.unpack_uints(packed, size, bits)
        assert back.dtype == torch.int64 and back.tolist() == values


@every_home
@pytest.mark.parametrize("size", [0, 1, 7, 1023, 4097, 70_001])
def test_packing_of_many(home: ModuleType, size: int) -> None:
    """Sizes at which a kernel may split its work."""
    generator = np.random.default_rng(size)
    bits = generator.integers(0, 2, size).astype(bool)
    assert as_bytes(home.pack_bits(torch.from_numpy(bits))) == np.packbits(bits, bitorder="little").tobytes()
    packed = torch.from_numpy(np.packbits(bits, bitorder="little"))
    assert np.array_equal(home.unpack_bits(packed, size).numpy(), bits)
    trits = torch.from_numpy(generator.integers(-1, 2, size).astype(np.int8))
    assert torch.equal(home.unpack_trits(home.pack_trits(trits), size), trits)
    assert home.pack_trits(trits).numel() == -(-size // 5)


# ------------------------------------------------------------------------------------------------------------- indices


@every_home
@QUICK
@given(gaps=st.lists(st.integers(0, 3000), max_size=60), parameter=st.integers(0, 30))
def test_rice(home: ModuleType, gaps: list[int], parameter: int) -> None:
    given_ = torch.tensor(gaps, dtype=torch.int64)
    low, unary = reference.rice_encode(given_, parameter)
    indices = (torch.cumsum(given_ + 1, 0) - 1).tolist()
    assert [as_bytes(low), as_bytes(unary)] == plain.encode_indices("rice", indices, parameter)
    lengths = [sum((gap >> p) + 1 for gap in gaps) for p in range(parameter, parameter + 3)]
    assert reference.rice_unary_bits(given_, range(parameter, parameter + 3)) == lengths
    filled = torch.nn.functional.pad(unary, (0, -unary.numel() % 4))
    numel = indices[-1] + 1 if gaps else 1
    streams = [reference.RiceStream(low, filled, len(gaps) + more, parameter) for more in (0, 1, -1)[: 2 + bool(gaps)]]
    (found, fault), *others = home.rice_indices(streams, numel)
    assert found.tolist() == indices and fault == 0
    assert all(fault == reference.RICE_COUNT for _, fault in others)
    too_long = reference.RiceStream(low, torch.nn.functional.pad(filled, (0, 4)), len(gaps), parameter)
    assert home.rice_indices([too_long], numel)[0][1] == reference.RICE_REST


@every_home
def test_rice_with_wide_gaps(home: ModuleType) -> None:
    gaps = torch.tensor([0, 2**31 - 1, 2**32 - 2, 0, 2**32 - 2])
    for parameter in (20, 29, 30):
        low, unary = reference.rice_encode(gaps, parameter)
        filled = torch.nn.functional.pad(unary, (0, -unary.numel() % 4))
        ((found, fault),) = home.rice_indices([reference.RiceStream(low, filled, 5, parameter)], 2**40)
        assert torch.equal(found, torch.cumsum(gaps + 1, 0) - 1) and fault == 0


@st.composite
def index_sets(draw: st.DrawFn) -> tuple[list[int], int]:
    numel = draw(st.sampled_from([1, 7, 1023, 4097, 65535, 65536, 65537, 200_000, 2**31 - 1]))
    starts = draw(st.lists(st.integers(0, numel - 1), max_size=40))
    lengths = draw(st.lists(st.integers(1, 20), min_size=len(starts), max_size=len(starts)))
    chosen = {i for s, n in zip(starts, lengths, strict=True) for i in range(s, min(numel, s + n))}
    edges = {0, numel - 1} if draw(st.booleans()) else set()
    return sorted(chosen | edges), numel


def written_by(section: RiceSections) -> torch.Tensor:
    """What a section writes, into memory that holds something else before."""
    out = torch.full((section.nbytes,), 0xAB, dtype=torch.uint8)
    section.write(out)
    return out


@pytest.mark.parametrize("coding", ["int32", "delta16", "rice"])
@QUICK
@given(case=index_sets())
def test_index_codings(coding: str, case: tuple[list[int], int]) -> None:
    indices, numel = case
    given_ = torch.tensor(indices, dtype=torch.int64)
    plan = IndexPlan(coding, given_, numel)
    parameter = plan.parameter
    written = [section if isinstance(section, torch.Tensor) else written_by(section) for section in plan.sections()]
    content = b"".join(as_bytes(section) + bytes(-section.numel() % 4) for section in written)
    expected = plain.encode_indices(coding, indices, parameter)
    assert content == b"".join(section + bytes(-len(section) % 4) for section in expected)
    body = Body(tensor_of(content), "x")
    assert decode_indices(coding, len(indices), numel, parameter, body).tolist() == indices
    body.finish()
    # The budget is a function of (numel, k); up to 4096 entries, Rice coding fits whatever they are.
    budget = index_budget(coding, numel, len(indices))
    assert budget == plain.index_budget(coding, numel, len(indices)) and budget % 4 == 0
    assert len(content) == -(-plan.nbytes // 4) * 4
    excess = plan.excess(budget)
    assert (excess == 0) == (len(content) <= budget)
    if coding != "delta16" or numel < 8 * 65535:
        assert excess == 0


@pytest.mark.parametrize("numel", [1, 7, 1023, 4097, 10**6, 25_557_032, 2**31 - 1, 2**32 - 1])
@pytest.mark.parametrize("coding", ["int32", "delta16", "rice"])
def test_index_budgets_of_the_document(coding: str, numel: int) -> None:
    for k in {0, 1, 2, 255, 256, 4095, 4096, 4097, 25_557, numel // 1000, numel // 4, numel // 2, numel - 1, numel}:
        if 0 <= k <= numel:
            for any_ in (False, True):
                assert index_budget(coding, numel, k, any_) == plain.index_budget(coding, numel, k, any_)


@pytest.mark.parametrize("fewer", [0, 1, 100, 4000])
def test_fewer_entries_than_room_always_fit(fewer: int) -> None:
    """Sampled selection may find less than k: the budget of k holds any smaller set too."""
    generator = np.random.default_rng(fewer)
    for numel in (4096, 5000, 10**6, 2**31 - 1):
        budget = index_budget("rice", numel, 4096)
        for _ in range(3):
            indices = np.unique(generator.integers(0, numel, 4096 - fewer))
            worst = np.arange(4096 - fewer) * (numel // 4096) + numel % 4096
            for chosen in (indices, worst):
                assert IndexPlan("rice", torch.from_numpy(chosen), numel).excess(budget) == 0


# -------------------------------------------------------------------------------------------------------------- values

SPECIAL = [0.0, -0.0, 1.0, -1.0, SMALLEST, -SMALLEST, 1e-40, 2.0**-126, LARGEST, -LARGEST, 65504.0, 65519.99, 65520.0,
           -65536.0, 3.3895314e38, 3.4e38, 6e-8, 5.96e-8, 2.98e-8, 1.0009766, 1.00048828125, math.pi]  # fmt: skip


def read_values(coding: str, values: Tensor) -> Tensor:
    sections = encode_values(coding, values)
    assert [section.numel() for section in sections] == value_sections_nbytes(coding, values.numel())
    content = b"".join(as_bytes(section) + bytes(-section.numel() % 4) for section in sections)
    return decode_values(coding, values.numel(), Body(tensor_of(content), "x"))


@pytest.mark.parametrize("coding", ["fp32", "fp16", "bf16", "int8", "int4"])
@QUICK
@given(values=st.lists(st.one_of(finite, st.sampled_from(SPECIAL)), max_size=40))
def test_rounding_is_bounded_and_finite(coding: str, values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    back = read_values(coding, x)
    assert back.dtype == torch.float32 and bool(torch.isfinite(back).all())
    exact, got = x.double(), back.double()
    error = (exact - got).abs()
    if coding == "fp32":
        assert as_bytes(back) == as_bytes(x)  # -0.0 and denormals too
    elif coding == "int8":
        top = float(exact.abs().max()) if values else 0.0
        # Half a step; near the smallest denormals the step itself is rounded and the codes saturate.
        assert bool((error <= top / 127 * 0.5001 + 127 * SMALLEST).all())
    elif coding == "int4":
        top, least = (float(exact.abs().max()), float(exact.abs().min())) if values else (0.0, 0.0)
        # Half of the widest gap between levels, 16/64 of the way between ends that are themselves rounded to bfloat16.
        assert bool((error <= (top - least) / 8 + top * 2.0**-7 + 2.0**-133).all())
        assert bool((error <= exact.abs() * (1 + 2.0**-7) + 2.0**-133).all())  # never farther away than zero is
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
    assert as_bytes(saturating_half(one, torch.float16)) == plain.to_half(float(one))
    assert as_bytes(saturating_half(one, torch.bfloat16)) == plain.to_bfloat(float(one))


@pytest.mark.parametrize("coding", ["fp32", "fp16", "bf16", "int8", "int4"])
def test_infinities_and_nans_are_seen(coding: str) -> None:
    x = torch.ones(600)
    x[3], x[4], x[300] = float("inf"), float("-inf"), float("nan")
    back = read_values(coding, x)
    if coding == "int8":
        assert bool(torch.isnan(back[:512]).all()) and torch.equal(back[512:], torch.ones(88))
    elif coding == "int4":
        assert bool(torch.isnan(torch.cat([back[:128], back[256:384]])).all())
        assert bool((torch.cat([back[128:256], back[384:]]) == 1).all())
    else:
        assert back[3] == float("inf") and back[4] == float("-inf") and bool(torch.isnan(back[300]))
        assert bool((back[5:300] == 1).all())


@pytest.mark.parametrize("size", [0, 1, 7, 255, 256, 257, 1023, 4097])
def test_int8_chunks(size: int) -> None:
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
        sections = [as_bytes(section) for section in encode_values("int4", torch.from_numpy(values))]
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


# ------------------------------------------------------------------------------------------------------ random numbers


def pure_random(key: int, i: int) -> int:
    return plain.mix(plain.mix((i ^ key) % 2**32) ^ plain.mix((key + 0x9E3779B9) % 2**32))


@QUICK
@given(
    seed=st.integers(0, 2**40), step=st.integers(0, 2**33), rank=st.integers(0, 2**32 - 1), name=st.text(max_size=12),
    start=st.sampled_from([0, 1, 1000, 2**31 - 3, 2**32 - 5]),
)  # fmt: skip
def test_counter_random_numbers_match_integers(seed: int, step: int, rank: int, name: str, start: int) -> None:
    key = plain.mix((seed ^ 0x9E3779B9) % 2**32)
    key = plain.mix((key ^ step) % 2**32)
    key = plain.mix(key ^ rank)
    key = plain.mix(key ^ zlib.crc32(name.encode()))
    assert reference.stream_key(seed, step, rank, name) == key
    expected = [pure_random(key, start + i) for i in range(9)]
    assert reference.uniform(key, 9, CPU, start).tolist() == [(number >> 8) * 2.0**-24 for number in expected]
    assert reference.coins([(key, start, 9)], CPU).tolist() == [bool(number & 1) for number in expected]


def test_coins_of_many_streams_are_those_of_each() -> None:
    streams = [(7, 0, 100), (2**32 - 1, 2**31 - 3, 9), (0, 5, 0), (3, 2**32 - 5, 1)]
    together = reference.coins(streams, CPU)
    assert torch.equal(together, torch.cat([reference.coins([stream], CPU) for stream in streams]))
    assert reference.coins([], CPU).shape == (0,)


def test_random_numbers_are_even() -> None:
    """Mean, variance, and neighbours in element, step, rank and name are unrelated; 4 sigma of 65536 numbers."""
    n = 65536
    base = reference.uniform(reference.stream_key(0, 0, 0, "w"), n, CPU).double() - 0.5
    assert abs(float(base.mean())) < 4 * (1 / 12) ** 0.5 / n**0.5
    assert abs(float(base.square().mean()) - 1 / 12) < 4 * 0.075 / n**0.5
    assert abs(float((base[1:] * base[:-1]).mean())) < 4 / 12 / n**0.5
    for other in [(1, 0, 0, "w"), (0, 1, 0, "w"), (0, 0, 1, "w"), (0, 0, 0, "v")]:
        near = reference.uniform(reference.stream_key(*other), n, CPU).double() - 0.5
        assert abs(float((base * near).mean())) < 4 / 12 / n**0.5
    flips = reference.coins([(reference.stream_key(0, 0, 0, "w"), 0, n)], CPU)
    assert abs(float(flips.double().mean()) - 0.5) < 4 * 0.5 / n**0.5


# -------------------------------------------------------------------------------------------------------- quantisation


def ternarized(home: ModuleType, x: Tensor, scale: Tensor, key: int) -> Tensor:  # (n,) -> (n,) int8
    return home.unpack_trits(home.ternarize_packed([x], scale[None], [key]), x.numel())


@every_home
@pytest.mark.parametrize("size", SIZES)
def test_ternarize_matches_integers(home: ModuleType, size: int) -> None:
    values = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    values[::5] = 0.0
    if size > 3:
        values[1], values[2] = SMALLEST, -1e-40
    scale, key = np.float32(np.abs(values).max()) if size else np.float32(0), reference.stream_key(3, size, 2, "w")
    trits = ternarized(home, torch.from_numpy(values), torch.tensor(scale), key)
    assert trits.dtype == torch.int8 and trits.shape == (size,)
    for i in range(size):
        keep = np.float32((pure_random(key, i) >> 8) * 2.0**-24) * scale < abs(values[i])
        assert trits[i] == np.sign(values[i]) * keep
    assert torch.equal(trits, ternarized(home, torch.from_numpy(values), torch.tensor(scale), key))


@every_home
def test_ternarize_is_unbiased(home: ModuleType) -> None:
    """The mean over many steps is the value itself, within five standard errors, for every element."""
    x = torch.tensor([0.0, 1.0, -1.0, 0.5, -0.25, 0.01, -0.99, 1e-3])
    steps = 3000
    total = torch.zeros(8, dtype=torch.float64)
    for step in range(steps):
        total += ternarized(home, x, torch.tensor(1.0), reference.stream_key(0, step, 0, "w")).double()
    deviation = (x.abs() * (1 - x.abs()) / steps).sqrt().double()
    assert bool(((total / steps - x.double()).abs() <= 5 * deviation).all())
    assert total[0] == 0 and total[1] == steps and total[2] == -steps


@every_home
def test_ternarize_of_nothing_and_of_zeros(home: ModuleType) -> None:
    assert ternarized(home, torch.zeros(5), torch.tensor(0.0), 1).tolist() == [0] * 5
    assert ternarized(home, torch.zeros(0), torch.tensor(0.0), 1).numel() == 0


@every_home
def test_ternarize_gives_trits_whatever_comes(home: ModuleType) -> None:
    """inf and nan show through the scale; the trits themselves stay packable."""
    x = torch.tensor([float("nan"), float("inf"), float("-inf"), -float("nan"), 1.0, -1.0, 0.0, -0.0] * 40)
    for scale in (1.0, 0.0, float("inf"), float("nan")):
        trits = ternarized(home, x, torch.tensor(scale), 5)
        assert set(trits.tolist()) <= {-1, 0, 1}
        assert torch.equal(trits, reference.ternarize(x, torch.tensor(scale), 5))


@every_home
@QUICK
@given(data=st.data(), numel=st.sampled_from(SIZES), block=st.sampled_from([1, 2, 7, 100, 1000, None]))
def test_blockwise_sign(home: ModuleType, data: st.DataObject, numel: int, block: int | None) -> None:
    seed = data.draw(st.integers(0, 2**32 - 1))
    values = np.random.default_rng(seed).standard_normal(numel).astype(np.float32)
    values[::11], values[1::11] = 0.0, -0.0
    length = block or max(1, numel)
    whole, rest = divmod(numel, length)
    runs = tuple(run for run in ((length, whole), (rest, 1)) if run[0] and run[1])
    negative, scales = home.blockwise_sign(torch.from_numpy(values), runs)
    assert negative.tolist() == (values < 0).tolist()  # sign(0) = +1, and -0.0 is a zero
    expected = [np.abs(values[i : i + length].astype(np.float64)).mean() for i in range(0, numel, length)]
    assert np.allclose(scales.numpy(), expected, rtol=1e-6, atol=0)
    expanded = reference.block_expand(scales, runs)
    assert expanded.shape == (numel,)
    assert all(expanded[i] == scales[i // length] for i in range(0, numel, 37))


# ------------------------------------------------------------------------------------------------------------ checksum


@every_home
@QUICK
@given(words=st.lists(st.integers(0, 2**32 - 1), max_size=60), start=st.integers(0, 100))
def test_checksum_matches_integers(home: ModuleType, words: list[int], start: int) -> None:
    given_ = torch.tensor(words, dtype=torch.int64).to(torch.int32)
    expected = sum(plain.mix(word ^ plain.mix(start + i)) for i, word in enumerate(words)) % 2**32
    assert int(home.checksum(given_, start)) == expected


@every_home
def test_checksum_finds_every_flipped_bit(home: ModuleType) -> None:
    words = torch.from_numpy(np.random.default_rng(0).integers(-(2**31), 2**31, 40).astype(np.int32))
    good = int(home.checksum(words))
    for place in range(40 * 32):
        words[place // 32] ^= (1 << place % 32) if place % 32 < 31 else -(2**31)
        assert int(home.checksum(words)) != good
        words[place // 32] ^= (1 << place % 32) if place % 32 < 31 else -(2**31)
    assert int(home.checksum(words)) == good


@every_home
def test_checksum_finds_moved_words(home: ModuleType) -> None:
    words = torch.from_numpy(np.random.default_rng(1).integers(-(2**31), 2**31, 40).astype(np.int32))
    sums = {int(home.checksum(words))}
    for shift in range(1, 40):
        sums.add(int(home.checksum(words.roll(shift))))
    for i in range(39):
        swapped = words.clone()
        swapped[i], swapped[i + 1] = words[i + 1], words[i]
        sums.add(int(home.checksum(swapped)))
    for zeros in range(1, 20):
        sums.add(int(home.checksum(torch.nn.functional.pad(words, (0, zeros)))))
    assert len(sums) == 1 + 39 + 39 + 19


# --------------------------------------------------------------------------------------------------------- over budget


def clustered(numel: int, k: int, runs: int) -> Tensor:
    """k indices in ``runs`` runs of neighbours, spread so that the gaps between them are as expensive as possible."""
    lengths = [k // runs + (i < k % runs) for i in range(runs)]
    starts = [(numel - k) * (i + 1) // runs for i in range(runs)]
    before, parts = 0, []
    for start, length in zip(starts, lengths, strict=True):
        parts.append(torch.arange(start + before, start + before + length))
        before += length
    return torch.cat(parts)


@pytest.mark.parametrize(
    ("coding", "numel", "k", "runs"),
    [("delta16", 25_557_032, 25_557, 3), ("delta16", 4_000_000, 300, 10), ("rice", 2_000_000, 20_000, 500)],
)
def test_what_does_not_fit_is_the_smallest(coding: str, numel: int, k: int, runs: int) -> None:
    indices = clustered(numel, k, runs)
    assert indices.numel() == k and bool((indices[1:] > indices[:-1]).all()) and int(indices[-1]) < numel
    values = torch.from_numpy(np.random.default_rng(0).permutation(k).astype(np.float32)) - k / 3
    layout = Layout.of([("w", 0, numel, True)])
    context, codec = ExchangeContext(layout, 0, ()), SparseCodec("fp32", coding)
    frame = codec.encode(context, Sparse(indices, values, numel, k), torch.zeros(0))
    assert frame.numel() == codec.nbytes(numel, k, 0)
    back, _ = codec.decode(context, frame, numel, k, 0, CPU, "x")
    left_out = k - back.indices.numel()
    assert 0 < left_out < k // 2, "the case is meant to overflow, and not to lose most of it"
    kept = torch.isin(indices, back.indices)
    assert torch.equal(indices[kept], back.indices) and torch.equal(values[kept], back.values)
    assert float(values[~kept].abs().max()) <= float(values[kept].abs().min())


@pytest.mark.parametrize("coding", ["delta16", "rice"])
def test_of_equal_entries_the_last_are_left_out(coding: str) -> None:
    numel, k = 4_000_000, 20_000 if coding == "rice" else 300
    indices = clustered(numel, k, 500 if coding == "rice" else 10)
    context, codec = ExchangeContext(Layout.of([("w", 0, numel, True)]), 0, ()), SparseCodec("fp32", coding)
    frame = codec.encode(context, Sparse(indices, torch.ones(k), numel, k), torch.zeros(0))
    back, _ = codec.decode(context, frame, numel, k, 0, CPU, "x")
    assert torch.equal(back.indices, indices[: back.indices.numel()])


def test_every_function_leaves_the_generator_alone() -> None:
    """Whatever a kernel draws, it draws from counters: torch's and NumPy's and Python's generators stay as they are."""
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    x = torch.linspace(-1, 1, 5000)
    work: list[Callable[[], Any]] = []
    for home in HOMES:
        work += [
            lambda home=home: home.select_topk(x, 50),
            lambda home=home: ternarized(home, x, torch.tensor(1.0), 3),
            lambda home=home: home.blockwise_sign(x, ((5000, 1),)),
            lambda home=home: home.checksum(x.view(torch.int32)),
        ]
    work += [
        lambda: reference.select_sampled(x, 50, 7),
        lambda: reference.uniform(1, 100, CPU),
        lambda: reference.coins([(1, 0, 100)], CPU),
        lambda: reference.int8_quantize(x),
    ]
    for call in work:
        call()
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == np.random.get_state()[1].tolist() and before[2] == random.getstate()
