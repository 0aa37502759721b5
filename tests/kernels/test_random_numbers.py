"""Random numbers that depend on seed, step, rank and name alone, and coins, which are worked out in chunks."""

from __future__ import annotations

import zlib

import plain_wire as plain
import pytest
import torch
from allocations import Allocations
from generators import torch_generator_untouched  # noqa: F401  every test of this file
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.kernels import reference
from thinwire.kernels.reference import counters

QUICK = settings(deadline=None, max_examples=60, derandomize=True)
CPU = torch.device("cpu")


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
    expected = [plain.random_word(key, start + i) for i in range(9)]
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


STREAMS = [(7, 0, 100), (2**32 - 1, 2**31 - 3, 9), (0, 5, 0), (3, 2**32 - 5, 10), (11, 12, 70_000)]


@pytest.mark.parametrize("chunk", [1, 7, 109, 70_119, 1 << 20])
def test_coins_in_chunks_are_the_same_bits(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    streams = STREAMS if chunk > 7 else STREAMS[:-1]
    expected = [bool(plain.random_word(key, start + i) & 1) for key, start, count in streams for i in range(count)]
    monkeypatch.setattr(counters, "_COINS_ON_HOST", chunk)
    assert reference.coins(streams, CPU).tolist() == expected


def test_many_coins_take_little_memory() -> None:
    numel = 1 << 21
    with Allocations() as counted:
        flips = reference.coins([(5, 0, numel // 2), (6, 3, numel // 2)], CPU)
    assert flips.shape == (numel,) and counted.peak < 4 * numel
