"""The largest elements of every chunk: how many is known beforehand, so one launch writes them where they belong."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.gpu.tables import cached, tiles_of


@triton.jit
def _choose(
    x, tile_scope, tile_offset, starts, numels, lasts, firsts, k, out, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    tile = tl.program_id(0)
    scope, offset = tl.load(tile_scope + tile), tl.load(tile_offset + tile)
    count = tl.minimum(tl.load(numels + scope) - offset, CHUNK)
    wanted = tl.where(count == CHUNK, k, tl.load(lasts + scope))
    first = tl.load(starts + scope) + offset
    i = tl.arange(0, BLOCK)
    word = tl.load(x + first + i, mask=i < count, other=0).to(tl.int32, bitcast=True)
    key = tl.where(i < count, tl.minimum(word & 0x7FFFFFFF, 0x7F800000), -1)  # a nan counts like an infinity
    edge = offset * 0
    for bit in range(30, -1, -1):
        trial = edge + (1 << bit)
        edge = tl.where(tl.sum((key >= trial).to(tl.int32), axis=0) >= wanted, trial, edge)
    level = (key == edge).to(tl.int32)
    missing = wanted - tl.sum((key > edge).to(tl.int32), axis=0)
    taken = ((key > edge) | ((level != 0) & (tl.cumsum(level, axis=0) <= missing))) & (wanted > 0)
    place = tl.load(firsts + scope) + offset // CHUNK * k + tl.cumsum(taken.to(tl.int32), axis=0) - 1
    tl.store(out + place, first + i, mask=taken)


def select_chunks(
    x: Tensor, bounds: Sequence[int], chunk: int, k: int, lasts: Sequence[int], out: Tensor | None = None
) -> Tensor:  # (n,) float32 -> (c,) int64, rising
    device, k = x.device, min(k, chunk)
    numels = tuple(stop - start for start, stop in pairwise(bounds))
    lasts = tuple(min(last, numel % chunk) for last, numel in zip(lasts, numels, strict=True))
    firsts = [0]
    for numel, last in zip(numels, lasts, strict=True):
        firsts.append(firsts[-1] + numel // chunk * k + last)
    tiles = tiles_of(numels, device, chunk)
    chosen = torch.empty(firsts[-1], dtype=torch.int64, device=device)
    if tiles.total:
        tables = (tuple(bounds[:-1]), numels, lasts, tuple(firsts[:-1]))
        _choose[(tiles.total,)](
            x.contiguous(), tiles.segment, tiles.offset, *(cached(table, torch.int32, device) for table in tables), k,
            chosen, chunk, triton.next_power_of_2(chunk), num_warps=8,
        )  # fmt: skip
    return chosen
