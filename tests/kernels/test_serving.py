"""What servers do with signs and trits: the native kernels equal plain torch, bit for bit where that is defined."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire.kernels import native, reference
from thinwire.kernels.native import library
from thinwire.kernels.reference import Runs

pytestmark = pytest.mark.skipif(library.handle() is None, reason=f"no native library here: {library.why_not()}")
QUICK = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
LENGTHS = st.lists(st.sampled_from([1, 3, 7, 8, 40, 4095, 4096, 4097, 70_001]), min_size=1, max_size=5)


def vectors(numels: list[int], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(numel + 1, generator=generator)[1:] for numel in numels]
    for part in parts:
        part[::7], part[3::11] = 0.0, -0.0
    return parts


def blocks_of(numels: list[int], block: int | None) -> Runs:
    runs: list[tuple[int, int]] = []
    for numel in numels:
        whole, rest = divmod(numel, block or numel)
        runs += [(block or numel, whole)] * (whole > 0) + [(rest, 1)] * (rest > 0)
    return tuple(runs)


@QUICK
@given(numels=LENGTHS, block=st.sampled_from([None, 1, 5, 64, 4096]), seed=st.integers(0, 2**31))
def test_sign_servers_equal_plain_torch(numels: list[int], block: int | None, seed: int) -> None:
    runs, total = blocks_of(numels, block), sum(numels)
    x = torch.cat(vectors(numels, seed))
    scales = native.sign_scales(x, runs)
    torch.testing.assert_close(scales, reference.sign_scales(x, runs), rtol=1e-6, atol=0)
    frames = []
    for place in range(3):
        parts = vectors(numels, seed + place)
        ours, plain = torch.full((-(-total // 8),), 255, dtype=torch.uint8), torch.zeros(-(-total // 8)).to(torch.uint8)
        native.pack_signs(parts, ours)
        reference.pack_signs(parts, plain)
        assert torch.equal(ours, plain)
        frames.append((ours, scales * (1 + place)))
    mine, theirs = x.clone(), x.clone()
    native.add_mean_of_signs(mine, frames, runs)
    reference.add_mean_of_signs(theirs, frames, runs)
    assert torch.equal(mine, theirs)
    native.subtract_own_signs(mine, scales, runs)
    reference.subtract_own_signs(theirs, scales, runs)
    assert torch.equal(mine, theirs)
    mine, theirs = torch.full((total,), 9.0), torch.full((total,), 9.0)
    # What is written lies elsewhere than the blocks: other cuts of the same elements.
    cuts = [total] if total < 10 else [3, total - 10, 7]
    native.write_signs(mine.split(cuts), *frames[1], runs)
    reference.write_signs(theirs.split(cuts), *frames[1], runs)
    assert torch.equal(mine, theirs)


@QUICK
@given(numels=LENGTHS, ranks=st.sampled_from([1, 2, 3, 4, 8, 200]), seed=st.integers(0, 2**31))
def test_trit_servers_equal_plain_torch(numels: list[int], ranks: int, seed: int) -> None:
    total, bits = sum(numels), (2 * ranks).bit_length()
    generator = torch.Generator().manual_seed(seed)
    trits = [torch.randint(-1, 2, (total,), generator=generator, dtype=torch.int8) for _ in range(ranks)]
    frames = [reference.pack_trits(own) for own in trits]
    ours, plain = torch.full((2, -(-total * bits // 8)), 255, dtype=torch.uint8).unbind()
    native.sum_trits(frames, total, bits, ours)
    reference.sum_trits(frames, total, bits, plain)
    assert torch.equal(ours, plain)
    scales = torch.rand(len(numels), generator=generator)
    mine, theirs = torch.full((2, total), 9.0).unbind()
    assert native.write_levels(mine.split(numels), scales, ours, bits, ranks)
    assert reference.write_levels(theirs.split(numels), scales, ours, bits, ranks)
    assert torch.equal(mine, theirs)
    sums = torch.stack(trits).sum(dim=0)
    assert torch.equal(mine, reference.block_expand(scales, blocks_of(numels, None)) * sums / ranks)


def test_level_that_no_sum_has_is_seen() -> None:
    for backend in (native, reference):
        for place in (0, 99_999):
            levels = torch.full((100_000,), 6)
            levels[place] = 7
            packed = reference.pack_uints(levels, 3)
            assert not backend.write_levels([torch.zeros(100_000)], torch.ones(1), packed, 3, 3)
            levels[place] = 0
            assert backend.write_levels([torch.zeros(100_000)], torch.ones(1), reference.pack_uints(levels, 3), 3, 3)
