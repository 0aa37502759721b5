"""From received frames to the gradient: parallel Golomb-Rice decoding, addition, and clearing of what was sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.gpu.bits import popcount
from thinwire.kernels.gpu.tables import cached, pointers, upload

_BLOCK = 512


@dataclass(frozen=True)
class RiceBody:
    """Where the sections of one checked header's body lie, in 32-bit words of the frame."""

    count: int
    parameter: int
    value_code: int
    value_start: int
    low_start: int
    unary_start: int
    unary_words: int


@triton.jit
def _low(frame, low_start, j, parameter, inside):
    """The low bits of entry j: they may lie in two words."""
    bit = j.to(tl.int64) * parameter
    shift = (bit & 31).to(tl.uint32)
    some = inside & (parameter > 0)
    first = tl.load(frame + low_start + (bit >> 5), mask=some, other=0).to(tl.uint32, bitcast=True) >> shift
    spills = some & (shift.to(tl.int32) + parameter > 32)
    second = tl.load(frame + low_start + (bit >> 5) + 1, mask=spills, other=0).to(tl.uint32, bitcast=True)
    both = first | tl.where(spills, second << ((32 - shift.to(tl.int32)) & 31).to(tl.uint32), 0)
    return both.to(tl.int64) & ((tl.full((), 1, tl.int64) << parameter) - 1)


@triton.jit
def _sum_blocks(frames, table, words_per_frame, ones, lows, num_blocks, BLOCK: tl.constexpr):
    rank, block = tl.program_id(0), tl.program_id(1)
    row = table + rank * 8
    count, parameter = tl.load(row), tl.load(row + 1)
    low_start, unary_start, unary_words = tl.load(row + 4), tl.load(row + 5), tl.load(row + 6)
    frame = frames + rank.to(tl.int64) * words_per_frame
    i = block * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(frame + unary_start + i, mask=i < unary_words, other=0)
    tl.store(ones + rank * num_blocks + block, tl.sum(popcount(word), axis=0))
    tl.store(lows + rank * num_blocks + block, tl.sum(_low(frame, low_start, i, parameter, i < count), axis=0))


@triton.jit
def _place_ones(
    frames, table, words_per_frame, ones, places, num_blocks, capacity, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):
    """places[j] = the bit at which the quotient of entry j ends."""
    rank, block = tl.program_id(0), tl.program_id(1)
    row = table + rank * 8
    count, unary_start, unary_words = tl.load(row), tl.load(row + 5), tl.load(row + 6)
    frame = frames + rank.to(tl.int64) * words_per_frame
    b = tl.arange(0, BLOCKS)
    before = tl.sum(tl.load(ones + rank * num_blocks + b, mask=b < tl.minimum(block, num_blocks), other=0), axis=0)
    i = block * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(frame + unary_start + i, mask=i < unary_words, other=0)
    number = popcount(word)
    j = before + tl.cumsum(number, axis=0) - number
    while tl.max((word != 0).to(tl.int32), axis=0) != 0:
        some = (word != 0) & (j < count)
        tl.store(places + rank.to(tl.int64) * capacity + j, i * 32 + popcount((word & -word) - 1), mask=some)
        j += (word != 0).to(tl.int32)
        word = word & (word - 1)


@triton.jit
def _rebuild(
    frames, table, words_per_frame, ones, lows, places, indices, values, faults, num_blocks, capacity, numel,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """index_j = (zeros before the j-th one) << parameter, and all low bits up to j, and j itself."""
    rank, block = tl.program_id(0), tl.program_id(1)
    row = table + rank * 8
    count, parameter, code, value_start = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    low_start, unary_words = tl.load(row + 4), tl.load(row + 6)
    frame = frames + rank.to(tl.int64) * words_per_frame
    b = tl.arange(0, BLOCKS)
    known = b < num_blocks
    total_ones = tl.sum(tl.load(ones + rank * num_blocks + b, mask=known, other=0), axis=0)
    low_before = tl.sum(tl.load(lows + rank * num_blocks + b, mask=known & (b < block), other=0), axis=0)
    right = total_ones == count
    j = block * BLOCK + tl.arange(0, BLOCK)
    inside = (j < count) & right
    place = tl.load(places + rank.to(tl.int64) * capacity + j, mask=inside, other=0).to(tl.int64)
    low = _low(frame, low_start, j, parameter, inside)
    index = ((place - j) << parameter) + low_before + tl.cumsum(low, axis=0) + j
    wrong = tl.max((inside & ((index < 0) | (index >= numel))).to(tl.int32), axis=0)
    # The word of the last one must be the last of the section: nothing may hide behind it.
    last = tl.max(tl.where(inside & (j == count - 1), place, -1), axis=0)
    hidden = ((last >= 0) & ((last >> 5) + 1 != unary_words)) | ((count == 0) & (unary_words != 0))
    if (wrong != 0) | hidden | (right == 0):
        tl.atomic_or(faults, 1 << tl.minimum(rank, 30))
    out = rank.to(tl.int64) * capacity + j
    tl.store(indices + out, tl.minimum(tl.maximum(index, 0), numel - 1), mask=inside)
    value = tl.zeros((BLOCK,), tl.float32)
    halves = frame.to(tl.pointer_type(tl.int16)) + 2 * value_start
    if code == 0:
        value = tl.load(frame + value_start + j, mask=inside, other=0).to(tl.float32, bitcast=True)
    elif code == 1:
        value = tl.load(halves + j, mask=inside, other=0).to(tl.float16, bitcast=True).to(tl.float32)
    elif code == 2:
        value = (tl.load(halves + j, mask=inside, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        scale = tl.load(frame + value_start + j // 256, mask=inside, other=0).to(tl.float32, bitcast=True)
        codes = frame.to(tl.pointer_type(tl.int8)) + 4 * (value_start + (count + 255) // 256)
        value = tl.load(codes + j, mask=inside, other=0).to(tl.float32) * scale
    tl.store(values + out, value, mask=inside)


def decode_rice_bodies(
    frames: Tensor, bodies: Sequence[RiceBody], numel: int, capacity: int
) -> tuple[Tensor, Tensor, Tensor]:  # (P, B) uint8 -> (P, capacity) int64, (P, capacity) float32, () int32
    """Decode the entries of all frames at once.

    The third result is 0 where all is well, else one bit a rank whose indices are not right; nothing outside of the
    buffers is touched in that case either.
    """
    ranks, device = frames.shape[0], frames.device
    words = frames.view(torch.int32)
    unary_words = max((body.unary_words for body in bodies), default=0)
    num_blocks = max(1, -(-max(capacity, unary_words) // _BLOCK))
    rows: list[float] = []
    for body in bodies:
        rows += [body.count, body.parameter, body.value_code, body.value_start, body.low_start, body.unary_start]
        rows += [body.unary_words, 0]
    table = upload(rows, torch.int32, device)
    ones = torch.empty(ranks * num_blocks, dtype=torch.int32, device=device)
    lows = torch.empty(ranks * num_blocks, dtype=torch.int64, device=device)
    places = torch.empty(ranks * capacity, dtype=torch.int32, device=device)
    indices = torch.empty(ranks, capacity, dtype=torch.int64, device=device)
    values = torch.empty(ranks, capacity, dtype=torch.float32, device=device)
    faults = torch.zeros((), dtype=torch.int32, device=device)
    blocks = triton.next_power_of_2(num_blocks)
    _sum_blocks[(ranks, num_blocks)](words, table, words.shape[1], ones, lows, num_blocks, _BLOCK)
    _place_ones[(ranks, max(1, -(-unary_words // _BLOCK)))](
        words, table, words.shape[1], ones, places, num_blocks, capacity, _BLOCK, blocks
    )
    _rebuild[(ranks, max(1, -(-capacity // _BLOCK)))](
        words, table, words.shape[1], ones, lows, places, indices, values, faults, num_blocks, capacity, numel, _BLOCK,
        blocks,
    )  # fmt: skip
    return indices, values, faults


@triton.jit
def _scatter_add(indices, values, count, parts, starts, num_parts, scale, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    index = tl.load(indices + i, mask=inside, other=0)
    part = tl.zeros((BLOCK,), tl.int32)  # the last part that starts at or before the index
    for step in tl.static_range(STEPS):
        trial = part + (1 << (STEPS - 1 - step))
        reached = trial < num_parts
        start = tl.load(starts + trial, mask=inside & reached, other=0)
        part = tl.where(reached & (start <= index), trial, part)
    place = (index - tl.load(starts + part, mask=inside, other=0)) * 4 + tl.load(parts + part, mask=inside, other=0)
    out = place.to(tl.pointer_type(tl.float32))
    value = tl.load(values + i, mask=inside, other=0.0) * scale
    tl.store(out, tl.load(out, mask=inside, other=0.0) + value, mask=inside)


def scatter_add(parts: Sequence[Tensor], starts: Sequence[int], indices: Tensor, values: Tensor, scale: float) -> None:
    """One launch for all parts; no index comes twice, so nothing is added out of order."""
    if not indices.numel():
        return
    device = indices.device
    _scatter_add[(triton.cdiv(indices.numel(), _BLOCK),)](
        indices, values, indices.numel(), pointers(parts, device), cached(tuple(starts), torch.int64, device),
        len(parts), scale, max(0, (len(parts) - 1).bit_length()), _BLOCK,
    )  # fmt: skip


@triton.jit
def _clear_sent(x, indices, sent, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    index = tl.load(indices + i, mask=inside, other=0)
    before = tl.load(x + index, mask=inside, other=0.0)
    rest = before - tl.load(sent + i, mask=inside, other=0.0)
    finite = (rest.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000
    was_finite = (before.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000
    tl.store(x + index, tl.where(finite, rest, tl.where(was_finite, before, 0.0)), mask=inside)


@triton.jit
def _zero_at(x, indices, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(indices + i, mask=i < count, other=0)
    tl.store(x + index, tl.zeros((BLOCK,), tl.float32), mask=i < count)


def zero_at(x: Tensor, indices: Tensor) -> None:
    if indices.numel():
        _zero_at[(triton.cdiv(indices.numel(), _BLOCK),)](x, indices, indices.numel(), _BLOCK)


def clear_sent(x: Tensor, indices: Tensor, sent: Tensor) -> None:
    if indices.numel():
        _clear_sent[(triton.cdiv(indices.numel(), _BLOCK),)](x, indices, sent, indices.numel(), _BLOCK)
