"""A vote's coins are worked out in chunks: the same bits as at once, in a few bytes an element."""

from __future__ import annotations

import pytest
import torch
from test_allocation import Allocations

from thinwire.kernels import reference
from thinwire.kernels.reference import counters

CPU = torch.device("cpu")
STREAMS = [(7, 0, 100), (2**32 - 1, 2**31 - 3, 9), (0, 5, 0), (3, 2**32 - 5, 10), (11, 12, 70_000)]


@pytest.mark.parametrize("chunk", [1, 7, 109, 70_119, 1 << 20])
def test_chunks_change_no_bit(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    streams = STREAMS if chunk > 7 else STREAMS[:-1]
    each = [counters._random(key, start, count, CPU) & 1 for key, start, count in streams]  # mix(mix(i ^ key) ^ salt)
    monkeypatch.setattr(counters, "_COINS_ON_HOST", chunk)
    assert torch.equal(reference.coins(streams, CPU), torch.cat(each).to(torch.bool))


def test_many_coins_take_little_memory() -> None:
    numel = 1 << 21
    with Allocations() as counted:
        flips = reference.coins([(5, 0, numel // 2), (6, 3, numel // 2)], CPU)
    assert flips.shape == (numel,) and counted.peak < 4 * numel
