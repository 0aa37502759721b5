"""Kernels that pack bits, trits, integers and gaps, and checksums: each home against plain Python."""

from __future__ import annotations

import random
from types import ModuleType

import numpy as np
import plain_wire as plain
import pytest
import torch
from generators import torch_generator_untouched  # noqa: F401  every test of this file
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_backends import every_backend
from tensor_bytes import to_bytes

from thinwire.kernels import reference

QUICK = settings(deadline=None, max_examples=60, derandomize=True)


# -------------------------------------------------------------------------------------------------- bits, trits, uints


@every_backend
@QUICK
@given(bits=st.lists(st.booleans(), max_size=200))
def test_bits_are_packed_as_in_plain_python(home: ModuleType, bits: list[bool]) -> None:
    packed = home.pack_bits(torch.tensor(bits, dtype=torch.bool))
    assert packed.dtype == torch.uint8 and to_bytes(packed) == plain.bits_to_bytes(bits)
    assert home.unpack_bits(packed, len(bits)).tolist() == bits
    longer = torch.cat([packed, torch.full((3,), 255, dtype=torch.uint8)])  # a section may be followed by others
    assert home.unpack_bits(longer, len(bits)).tolist() == bits


@every_backend
@QUICK
@given(trits=st.lists(st.sampled_from([-1, 0, 1]), max_size=200))
def test_trits_are_packed_as_in_plain_python(home: ModuleType, trits: list[int]) -> None:
    packed = home.pack_trits(torch.tensor(trits, dtype=torch.int8))
    assert to_bytes(packed) == plain.pack_trits(trits)
    assert not trits or int(packed.max()) < 243
    back = home.unpack_trits(packed, len(trits))
    assert back.dtype == torch.int8 and back.tolist() == trits


@every_backend
def test_every_byte_of_trits_is_read_and_written_alike(home: ModuleType) -> None:
    packed = torch.arange(243, dtype=torch.uint8)
    trits = home.unpack_trits(packed, 5 * 243)
    assert trits.tolist() == plain.unpack_trits(bytes(range(243)), 5 * 243)
    assert torch.equal(home.pack_trits(trits), packed)


@pytest.mark.parametrize("bits", range(33))
def test_uints_of_every_width_are_packed_as_in_plain_python(bits: int) -> None:
    numbers = random.Random(bits)
    for size in (0, 1, 2, 7, 8, 9, 100):
        values = [numbers.choice([0, 2**bits - 1, numbers.randrange(2**bits)]) for _ in range(size)]
        packed = reference.pack_uints(torch.tensor(values, dtype=torch.int64), bits)
        assert to_bytes(packed) == plain.pack_uints(values, bits) and packed.numel() == -(-size * bits // 8)
        back = reference.unpack_uints(packed, size, bits)
        assert back.dtype == torch.int64 and back.tolist() == values


@every_backend
@pytest.mark.parametrize("size", [0, 1, 7, 1023, 4097, 70_001])
def test_packing_of_many_equals_numpy(home: ModuleType, size: int) -> None:
    """Sizes at which a kernel may split its work."""
    generator = np.random.default_rng(size)
    bits = generator.integers(0, 2, size).astype(bool)
    assert to_bytes(home.pack_bits(torch.from_numpy(bits))) == np.packbits(bits, bitorder="little").tobytes()
    packed = torch.from_numpy(np.packbits(bits, bitorder="little"))
    assert np.array_equal(home.unpack_bits(packed, size).numpy(), bits)
    trits = torch.from_numpy(generator.integers(-1, 2, size).astype(np.int8))
    assert torch.equal(home.unpack_trits(home.pack_trits(trits), size), trits)
    assert home.pack_trits(trits).numel() == -(-size // 5)


# ---------------------------------------------------------------------------------------------------------- Rice codes


@every_backend
@QUICK
@given(gaps=st.lists(st.integers(0, 3000), max_size=60), parameter=st.integers(0, 30))
def test_rice_codes_are_those_of_plain_python_and_miscounts_are_seen(
    home: ModuleType, gaps: list[int], parameter: int
) -> None:
    given_ = torch.tensor(gaps, dtype=torch.int64)
    low, unary = reference.rice_encode(given_, parameter)
    indices = (torch.cumsum(given_ + 1, 0) - 1).tolist()
    assert [to_bytes(low), to_bytes(unary)] == plain.encode_indices("rice", indices, parameter)
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


@every_backend
def test_rice_codes_hold_wide_gaps(home: ModuleType) -> None:
    gaps = torch.tensor([0, 2**31 - 1, 2**32 - 2, 0, 2**32 - 2])
    for parameter in (20, 29, 30):
        low, unary = reference.rice_encode(gaps, parameter)
        filled = torch.nn.functional.pad(unary, (0, -unary.numel() % 4))
        ((found, fault),) = home.rice_indices([reference.RiceStream(low, filled, 5, parameter)], 2**40)
        assert torch.equal(found, torch.cumsum(gaps + 1, 0) - 1) and fault == 0


# ------------------------------------------------------------------------------------------------------------ checksum


@every_backend
@QUICK
@given(words=st.lists(st.integers(0, 2**32 - 1), max_size=60), start=st.integers(0, 100))
def test_checksum_matches_integers(home: ModuleType, words: list[int], start: int) -> None:
    given_ = torch.tensor(words, dtype=torch.int64).to(torch.int32)
    expected = sum(plain.mix(word ^ plain.mix(start + i)) for i, word in enumerate(words)) % 2**32
    assert int(home.checksum(given_, start)) == expected


@every_backend
def test_checksum_finds_every_flipped_bit(home: ModuleType) -> None:
    words = torch.from_numpy(np.random.default_rng(0).integers(-(2**31), 2**31, 40).astype(np.int32))
    good = int(home.checksum(words))
    for place in range(40 * 32):
        words[place // 32] ^= (1 << place % 32) if place % 32 < 31 else -(2**31)
        assert int(home.checksum(words)) != good
        words[place // 32] ^= (1 << place % 32) if place % 32 < 31 else -(2**31)
    assert int(home.checksum(words)) == good


@every_backend
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
