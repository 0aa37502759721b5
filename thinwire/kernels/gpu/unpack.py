"""From received frames to the gradient: parallel Golomb-Rice decoding, addition, and clearing of what was sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.gpu.bits import popcount
from thinwire.kernels.gpu.sparse_frames import mix
from thinwire.kernels.gpu.tables import cached, pointers
from thinwire.kernels.reference import RiceStream, checked_indices

_BLOCK = 512
_LONGEST = 1 << 20  # entries; every program adds up all blocks before its own


@triton.jit
def _low(low, j, parameter, inside):
    """The low bits of entry j: they may lie in two words."""
    bit = j.to(tl.int64) * parameter
    shift = (bit & 31).to(tl.uint32)
    some = inside & (parameter > 0)
    first = tl.load(low + (bit >> 5), mask=some, other=0).to(tl.uint32, bitcast=True) >> shift
    spills = some & (shift.to(tl.int32) + parameter > 32)
    second = tl.load(low + (bit >> 5) + 1, mask=spills, other=0).to(tl.uint32, bitcast=True)
    both = first | tl.where(spills, second << ((32 - shift.to(tl.int32)) & 31).to(tl.uint32), 0)
    return both.to(tl.int64) & ((tl.full((), 1, tl.int64) << parameter) - 1)


@triton.jit
def _stream(table, rank):
    """Of one stream: count, parameter, low bits, quotients and the words of these."""
    row = table + rank * 5
    low = tl.load(row + 2).to(tl.pointer_type(tl.int32))
    unary = tl.load(row + 3).to(tl.pointer_type(tl.int32))
    return tl.load(row).to(tl.int32), tl.load(row + 1).to(tl.int32), low, unary, tl.load(row + 4).to(tl.int32)


@triton.jit
def _sum_blocks(table, ones, lows, num_blocks, BLOCK: tl.constexpr):
    rank, block = tl.program_id(0), tl.program_id(1)
    count, parameter, low, unary, unary_words = _stream(table, rank)
    i = block * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(unary + i, mask=i < unary_words, other=0)
    tl.store(ones + rank * num_blocks + block, tl.sum(popcount(word), axis=0))
    tl.store(lows + rank * num_blocks + block, tl.sum(_low(low, i, parameter, i < count), axis=0))


@triton.jit
def _place_ones(table, ones, places, num_blocks, longest, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """places[j] = the bit at which the quotient of entry j ends."""
    rank, block = tl.program_id(0), tl.program_id(1)
    count, _parameter, _low_bits, unary, unary_words = _stream(table, rank)
    b = tl.arange(0, BLOCKS)
    before = tl.sum(tl.load(ones + rank * num_blocks + b, mask=b < tl.minimum(block, num_blocks), other=0), axis=0)
    i = block * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(unary + i, mask=i < unary_words, other=0)
    number = popcount(word)
    j = before + tl.cumsum(number, axis=0) - number
    while tl.max((word != 0).to(tl.int32), axis=0) != 0:
        some = (word != 0) & (j < count)
        tl.store(places + rank.to(tl.int64) * longest + j, i * 32 + popcount((word & -word) - 1), mask=some)
        j += (word != 0).to(tl.int32)
        word = word & (word - 1)


@triton.jit
def _rebuild(
    table, ones, lows, places, indices, faults, num_blocks, longest, numel, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):
    """index_j = (zeros before the j-th one) << parameter, and all low bits up to j, and j itself."""
    rank, block = tl.program_id(0), tl.program_id(1)
    count, parameter, low, _unary, unary_words = _stream(table, rank)
    b = tl.arange(0, BLOCKS)
    known = b < num_blocks
    total_ones = tl.sum(tl.load(ones + rank * num_blocks + b, mask=known, other=0), axis=0)
    low_before = tl.sum(tl.load(lows + rank * num_blocks + b, mask=known & (b < block), other=0), axis=0)
    right = total_ones == count
    j = block * BLOCK + tl.arange(0, BLOCK)
    inside = (j < count) & right
    place = tl.load(places + rank.to(tl.int64) * longest + j, mask=inside, other=0).to(tl.int64)
    own = _low(low, j, parameter, inside)
    index = ((place - j) << parameter) + low_before + tl.cumsum(own, axis=0) + j
    wrong = tl.max((inside & ((index < 0) | (index >= numel))).to(tl.int32), axis=0)
    # The word of the last one must be the last of the section: nothing may hide behind it.
    last = tl.max(tl.where(inside & (j == count - 1), place, -1), axis=0)
    hidden = ((last >= 0) & ((last >> 5) + 1 != unary_words)) | ((count == 0) & (unary_words != 0))
    if (wrong != 0) | hidden | (right == 0):
        tl.store(faults + rank, 1)
    tl.store(indices + rank.to(tl.int64) * longest + j, tl.minimum(tl.maximum(index, 0), numel - 1), mask=inside)


def rice_indices(
    streams: Sequence[RiceStream], numel: int, outs: Sequence[Tensor] | None = None
) -> list[tuple[Tensor, int]]:
    """All streams at once. One that is not right is decoded again by the reference, which says what is wrong."""
    if max(stream.count for stream in streams) > _LONGEST:
        return [checked_indices(stream, numel) for stream in streams]
    indices, faults = launch_rice_indices(streams, numel)
    return [
        checked_indices(stream, numel) if wrong else (found[: stream.count], 0)
        for stream, found, wrong in zip(streams, indices, faults.tolist(), strict=True)
    ]


def launch_rice_indices(streams: Sequence[RiceStream], numel: int) -> tuple[Tensor, Tensor]:
    device, ranks = streams[0].low.device, len(streams)
    longest = max(1, *(stream.count for stream in streams))
    unary_words = [stream.unary.numel() // 4 for stream in streams]
    num_blocks = -(-max(longest, *unary_words) // _BLOCK)
    rows: list[float] = []
    for stream, words in zip(streams, unary_words, strict=True):
        rows += [stream.count, stream.parameter, stream.low.data_ptr(), stream.unary.data_ptr(), words]
    table = cached(tuple(rows), torch.int64, device)
    ones = torch.empty(ranks * num_blocks, dtype=torch.int32, device=device)
    lows = torch.empty(ranks * num_blocks, dtype=torch.int64, device=device)
    places = torch.empty(ranks * longest, dtype=torch.int32, device=device)
    indices = torch.empty(ranks, longest, dtype=torch.int64, device=device)
    faults = torch.zeros(ranks, dtype=torch.int32, device=device)
    blocks = triton.next_power_of_2(num_blocks)
    _sum_blocks[(ranks, num_blocks)](table, ones, lows, num_blocks, _BLOCK)
    _place_ones[(ranks, max(1, -(-max(unary_words) // _BLOCK)))](
        table, ones, places, num_blocks, longest, _BLOCK, blocks
    )
    _rebuild[(ranks, -(-longest // _BLOCK))](
        table, ones, lows, places, indices, faults, num_blocks, longest, numel, _BLOCK, blocks
    )
    return indices, faults


@triton.jit
def _frame_heads(frames, num_words, heads, BLOCK: tl.constexpr):
    frame = tl.load(frames + tl.program_id(1)).to(tl.pointer_type(tl.int32))
    head = heads + tl.program_id(1) * 10
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    counted = (i < num_words) & (i != 8)
    word = tl.load(frame + i, mask=i < num_words, other=0)
    mixed = mix(mix(tl.where(i < 8, i, i - 1).to(tl.uint32)) ^ word.to(tl.uint32, bitcast=True))
    tl.atomic_add(head + 9, tl.sum(tl.where(counted, mixed, 0), axis=0).to(tl.int32, bitcast=True))
    tl.store(head + i, word, mask=i < 9)


def frame_heads(frames: Sequence[Tensor]) -> Tensor:  # P of (B,) uint8 -> (P, 10) int32
    device, num_words = frames[0].device, frames[0].numel() // 4
    heads = torch.zeros(len(frames), 10, dtype=torch.int32, device=device)
    table = pointers(frames, device)
    _frame_heads[(triton.cdiv(num_words, 4096), len(frames))](table, num_words, heads, 4096)
    return heads


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


def scatter_add(
    parts: Sequence[Tensor], starts: Sequence[int], lists: Sequence[tuple[Tensor, Tensor]], scale: float
) -> None:
    """One launch a list, in their order; no index comes twice in a list, so every sum has one order."""
    device = parts[0].device
    addresses, offsets = pointers(parts, device), cached(tuple(starts), torch.int64, device)
    for indices, values in lists:
        if indices.numel():
            _scatter_add[(triton.cdiv(indices.numel(), _BLOCK),)](
                indices, values, indices.numel(), addresses, offsets, len(parts), scale,
                max(0, (len(parts) - 1).bit_length()), _BLOCK,
            )  # fmt: skip


@triton.jit
def _subtract_at(x, indices, sent, count, BLOCK: tl.constexpr):
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


def subtract_at(x: Tensor, indices: Tensor, values: Tensor) -> None:
    if indices.numel():
        _subtract_at[(triton.cdiv(indices.numel(), _BLOCK),)](x, indices, values, indices.numel(), _BLOCK)
