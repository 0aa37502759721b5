"""Ternary values and signs: each home against plain Python, and what a coin must be worth on average."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import plain_wire as plain
import pytest
import torch
from generators import torch_generator_untouched  # noqa: F401  every test of this file
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_backends import BACKENDS, every_backend
from torch import Tensor

from thinwire.kernels import reference

QUICK = settings(deadline=None, max_examples=60, derandomize=True)
SIZES = [0, 1, 7, 1023, 4097]
LARGEST, SMALLEST = struct.unpack("<ff", bytes.fromhex("ffff7f7f01000000"))  # of float32; the second is denormal


def ternarized(home: ModuleType, x: Tensor, scale: Tensor, key: int) -> Tensor:  # (n,) -> (n,) int8
    return home.unpack_trits(home.ternarize_packed([x], scale[None], [key]), x.numel())


@every_backend
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
        keep = np.float32((plain.random_word(key, i) >> 8) * 2.0**-24) * scale < abs(values[i])
        assert trits[i] == np.sign(values[i]) * keep
    assert torch.equal(trits, ternarized(home, torch.from_numpy(values), torch.tensor(scale), key))


@every_backend
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


@every_backend
def test_ternarize_gives_zeros_for_zeros_and_nothing_for_nothing(home: ModuleType) -> None:
    assert ternarized(home, torch.zeros(5), torch.tensor(0.0), 1).tolist() == [0] * 5
    assert ternarized(home, torch.zeros(0), torch.tensor(0.0), 1).numel() == 0


@every_backend
def test_ternarize_gives_trits_whatever_comes(home: ModuleType) -> None:
    """inf and nan show through the scale; the trits themselves stay packable."""
    x = torch.tensor([float("nan"), float("inf"), float("-inf"), -float("nan"), 1.0, -1.0, 0.0, -0.0] * 40)
    for scale in (1.0, 0.0, float("inf"), float("nan")):
        trits = ternarized(home, x, torch.tensor(scale), 5)
        assert set(trits.tolist()) <= {-1, 0, 1}
        assert torch.equal(trits, reference.ternarize(x, torch.tensor(scale), 5))


@every_backend
@QUICK
@given(data=st.data(), numel=st.sampled_from(SIZES), block=st.sampled_from([1, 2, 7, 100, 1000, None]))
def test_blockwise_sign_scales_are_the_means_of_blocks(
    home: ModuleType, data: st.DataObject, numel: int, block: int | None
) -> None:
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


CPU = torch.device("cpu")


def test_kernels_leave_the_generators_alone() -> None:
    """Whatever a kernel draws, it draws from counters: torch's and NumPy's and Python's generators stay as they are."""
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    x = torch.linspace(-1, 1, 5000)
    work: list[Callable[[], Any]] = []
    for home in BACKENDS:
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
