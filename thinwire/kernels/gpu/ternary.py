"""TernGrad on the device: one pass for the scalers, one that draws the trits straight into the frame.

Both passes are segmented over the tensors of an exchange. The second one reads the gradient backwards: what the first
one read last is still in the L2 cache. It also adds up the frame's checksum where the words are made, so nothing that
was written is read again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.gpu.bits import bits_of
from thinwire.kernels.gpu.sparse_frames import mix
from thinwire.kernels.gpu.tables import cached, cuts_of, pointers, tiles_of
from thinwire.kernels.reference import ROUNDING, stream_salt

_TILE = 8192  # elements whose moments one program takes
_BITE = 1024
_WORDS = 256  # words of packed trits, twenty in each, that one program writes: one per thread
_HEADER_WORDS = 9
_STEP_WORD = 6


@triton.jit
def _tile_moments(
    tile_segment, tile_offset, parts, numels, means, squares, largest, TILE: tl.constexpr, BITE: tl.constexpr
):
    tile = tl.program_id(0)
    segment, offset = tl.load(tile_segment + tile), tl.load(tile_offset + tile)
    count = tl.minimum(tl.load(numels + segment) - offset, TILE)
    address = tl.load(parts + segment) + offset.to(tl.int64) * 4
    if (address % 16 == 0) & (count == TILE):  # without a mask, loads are wide
        x = tl.load(tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16) + tl.arange(0, TILE))
        mean = tl.sum(x, axis=0) * (1.0 / TILE)
        away = x - mean
        tl.store(means + tile, mean)
        tl.store(squares + tile, tl.sum(away * away, axis=0))
        tl.store(largest + tile, tl.max(bits_of(x), axis=0))
    else:  # in small bites: the registers of this path count for the other one, too
        part, i = address.to(tl.pointer_type(tl.float32)), tl.arange(0, BITE)
        total, most, spread = tl.zeros((BITE,), tl.float32), tl.zeros((BITE,), tl.int32), tl.zeros((BITE,), tl.float32)
        for start in range(0, count, BITE):
            x = tl.load(part + start + i, mask=start + i < count, other=0.0)
            total += x
            most = tl.maximum(most, bits_of(x))
        mean = tl.sum(total, axis=0) / count
        for start in range(0, count, BITE):
            inside = start + i < count
            away = tl.where(inside, tl.load(part + start + i, mask=inside, other=0.0) - mean, 0.0)
            spread += away * away
        tl.store(means + tile, mean)
        tl.store(squares + tile, tl.sum(spread, axis=0))
        tl.store(largest + tile, tl.max(most, axis=0))


@triton.jit
def _segment_scalers(
    first_tiles, numels, means, squares, largest, deviations, magnitudes, scalers, limits, sigma, rounding,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Tiles' means and squares put together in double precision: the deviation has no cancellation in it."""
    segment = tl.program_id(0)
    numel = tl.load(numels + segment)
    first, last = tl.load(first_tiles + segment), tl.load(first_tiles + segment + 1)
    total = tl.zeros((BLOCK,), tl.float64)
    most = tl.zeros((BLOCK,), tl.int32)
    for start in range(first, last, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        inside = tile < last
        count = tl.where(inside, tl.minimum(numel - (tile - first) * TILE, TILE), 0)
        total += tl.load(means + tile, mask=inside, other=0.0).to(tl.float64) * count
        most = tl.maximum(most, tl.load(largest + tile, mask=inside, other=0))
    mean = tl.sum(total, axis=0) / tl.maximum(numel, 1)
    spread = tl.zeros((BLOCK,), tl.float64)
    for start in range(first, last, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        inside = tile < last
        count = tl.where(inside, tl.minimum(numel - (tile - first) * TILE, TILE), 0)
        away = tl.where(inside, tl.load(means + tile, mask=inside, other=0.0).to(tl.float64) - mean, 0.0)
        spread += tl.load(squares + tile, mask=inside, other=0.0).to(tl.float64) + count * away * away
    deviation = tl.sqrt(tl.sum(spread, axis=0) / tl.maximum(numel, 1)).to(tl.float32)
    magnitude = tl.max(most, axis=0).to(tl.float32, bitcast=True)
    limit = sigma * deviation
    limit = tl.where(limit > rounding * magnitude, limit, magnitude)  # also where one of them is a nan
    tl.store(deviations + segment, deviation)
    tl.store(magnitudes + segment, magnitude)
    tl.store(limits + segment, limit)
    tl.store(scalers + segment, tl.where(limit < magnitude, limit, magnitude))


def _measured(parts: Sequence[Tensor], sigma: float) -> Tensor:  # T vectors -> (4, T) float32
    """Deviations, largest magnitudes, scalers and limits."""
    device, numels = parts[0].device, tuple(part.numel() for part in parts)
    tiles = tiles_of(numels, device, _TILE)
    means, squares = torch.empty(2, max(tiles.total, 1), dtype=torch.float32, device=device).unbind()
    largest = torch.empty(max(tiles.total, 1), dtype=torch.int32, device=device)
    measured = torch.empty(4, len(parts), dtype=torch.float32, device=device)
    lengths = cached(numels, torch.int32, device)
    if tiles.total:
        _tile_moments[(tiles.total,)](
            tiles.segment, tiles.offset, pointers(parts, device), lengths, means, squares, largest, _TILE, _BITE,
            num_warps=8,
        )  # fmt: skip
    _segment_scalers[(len(parts),)](
        cached(tuple(tiles.first), torch.int32, device), lengths, means, squares, largest, *measured.unbind(), sigma,
        ROUNDING, _TILE, 4096, num_warps=16,
    )  # fmt: skip
    return measured


def moments(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    deviations, magnitudes, _scalers, _limits = _measured(parts, 0.0).unbind()
    return deviations, magnitudes


def clipped_scalers(parts: Sequence[Tensor], clip_sigma: float | None) -> tuple[Tensor, Tensor | None]:
    _deviations, magnitudes, scalers, limits = _measured(parts, clip_sigma or 0.0).unbind()
    return (magnitudes, None) if clip_sigma is None else (scalers, limits)


@triton.jit
def _trit(x, i, key, salt, small, scale, limit):
    """-1.0, 0.0 or 1.0 for one element: random(key, i) decides (TernGrad, Eq. 1, 3 and 21); a nan is never kept.

    ``small * scale`` is 2**-32 times the tensor's scaler.
    """
    drawn = mix(mix(i.to(tl.uint32) ^ key) ^ salt) & 0xFFFFFF00  # 24 bits: exact as a float
    bar = drawn.to(tl.float32) * small * scale
    magnitude = tl.minimum(tl.abs(x), limit, propagate_nan=tl.PropagateNan.ALL)
    kept = tl.where(bar < magnitude, 1.0, 0.0)
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    return (kept.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def _weight(place):
    """Of the trit at this place of a word, in its half of the word: a power of 3, in the lower or the upper byte."""
    power = place % 5
    weight = tl.where(power == 0, 1, tl.where(power == 1, 3, tl.where(power == 2, 9, tl.where(power == 3, 27, 81))))
    return tl.where((place // 5) % 2 == 0, weight, weight * 256).to(tl.float32)


@triton.jit
def _trit_words(part, first, count, counter, key, salt, scale, limit, WHOLE: tl.constexpr, WORDS: tl.constexpr):
    """WORDS words of four bytes of five trits each, of the elements from ``first`` on; those outside of the part are 0.

    Every thread takes four neighbouring elements at a time, of the twenty that make up a word. Weighted trits are added
    up as floats, a half word each, which is exact: the units that do it have nothing else to do.
    """
    row, column = tl.arange(0, WORDS)[:, None] * 20, tl.arange(0, 4)[None, :]
    low, high = tl.zeros((WORDS, 4), tl.float32), tl.zeros((WORDS, 4), tl.float32)
    if WHOLE:
        for group in tl.static_range(5):
            place = column + 4 * group  # of the element inside its word
            i = first + row + place
            x = tl.load(part + i)
            term = _trit(x, i + counter, key, salt, scale * 2.3283064365386963e-10, 1.0, limit) * _weight(place)
            if group < 2:
                low += term
            elif group > 2:
                high += term
            else:
                low += tl.where(place < 10, term, 0.0)
                high += tl.where(place < 10, 0.0, term)
        halves = 121.0 * 257.0  # a trit of 0 travels as 1
    else:
        for group in range(5):  # no copies of it: the registers of this path count for the other one, too
            place = column + 4 * group
            i = first + row + place
            inside = (i >= 0) & (i < count)
            x = tl.load(part + i, mask=inside, other=0.0)
            term = _trit(x, i + counter, key, salt, 2.3283064365386963e-10, scale, limit) + 1.0
            term = tl.where(inside, term * _weight(place), 0.0)
            low += tl.where(place < 10, term, 0.0)
            high += tl.where(place < 10, 0.0, term)
        halves = 0.0
    low_half, high_half = tl.sum(low, axis=1) + halves, tl.sum(high, axis=1) + halves
    return low_half.to(tl.int32).to(tl.uint32, bitcast=True) | (
        high_half.to(tl.int32).to(tl.uint32, bitcast=True) << 16
    )


@triton.jit
def _tile_words(
    tile, first_piece, block_of, starts, ends, parts, scales, limits, keys, salts, counters, CLIPPED: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    first, last = tl.load(first_piece + tile), tl.load(first_piece + tile + 1)
    element = tile * WORDS * 20
    segment = tl.load(block_of + first)
    address = tl.load(parts + segment)
    offset = element - tl.load(starts + segment)
    inside_one = (last - first == 1) & (tl.load(ends + segment) - element >= WORDS * 20)
    scale = tl.load(scales + segment)
    exact = (scale >= 1e-27) | (scale == 0.0)  # so that 2**-32 times it is, too
    if inside_one & (address % 16 == 0) & (offset % 4 == 0) & exact:
        key, salt = tl.load(keys + segment), tl.load(salts + segment)
        limit = tl.load(limits + segment) if CLIPPED else float("inf")
        word = _trit_words(
            tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16), offset // 4 * 4, 0,
            tl.load(counters + segment), key.to(tl.uint32, bitcast=True), salt.to(tl.uint32, bitcast=True),
            scale, limit, True, WORDS,
        )  # fmt: skip
    else:
        word = tl.zeros((WORDS,), tl.uint32)
        for piece in range(first, last):
            segment = tl.load(block_of + piece)
            start, end = tl.load(starts + segment), tl.load(ends + segment)
            key, salt = tl.load(keys + segment), tl.load(salts + segment)
            limit = tl.load(limits + segment) if CLIPPED else float("inf")
            word += _trit_words(
                tl.load(parts + segment).to(tl.pointer_type(tl.float32)), element - start, end - start,
                tl.load(counters + segment), key.to(tl.uint32, bitcast=True), salt.to(tl.uint32, bitcast=True),
                tl.load(scales + segment), limit, False, WORDS,
            )  # fmt: skip
    return word


@triton.jit
def _draw(
    first_piece, block_of, starts, ends, parts, scales, limits, keys, salts, counters, words, num_words, num_tiles,
    CLIPPED: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    tile = num_tiles - 1 - tl.program_id(0)
    out = tile * WORDS + tl.arange(0, WORDS)
    word = _tile_words(
        tile, first_piece, block_of, starts, ends, parts, scales, limits, keys, salts, counters, CLIPPED, WORDS
    )
    tl.store(words + out, word.to(tl.int32, bitcast=True), mask=out < num_words)


@triton.jit(do_not_specialize=["step"])
def _draw_frame(
    first_piece, block_of, starts, ends, parts, scales, limits, keys, salts, counters, frame, num_words, num_tiles,
    header, tail, num_tail, num_scales, flag, step, sums, CLIPPED: tl.constexpr, FLAGGED: tl.constexpr,
    WORDS: tl.constexpr, HEADER: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The programs after the tiles' write what stands in front of the trits: header, dense tail and scales."""
    tile = num_tiles - 1 - tl.program_id(0)
    front = HEADER + num_tail + num_scales
    if tile >= 0:
        out = tile * WORDS + tl.arange(0, WORDS)
        counted = out < num_words
        out += front
        word = _tile_words(
            tile, first_piece, block_of, starts, ends, parts, scales, limits, keys, salts, counters, CLIPPED, WORDS
        )
    else:
        out = (-1 - tile) * WORDS + tl.arange(0, WORDS)
        counted = (out < front) & (out != HEADER - 1)
        fields = tl.load(header + out, mask=out < HEADER, other=0)
        fields = tl.where(out == STEP, step, fields)  # the only field that changes from step to step
        if FLAGGED:
            fields = tl.where(out == 3, fields | (tl.load(flag) != 0).to(tl.int32) << 24, fields)
        in_tail = (out >= HEADER) & (out < HEADER + num_tail)
        in_scales = (out >= HEADER + num_tail) & (out < front)
        floats = tl.load(tail.to(tl.pointer_type(tl.int32)) + out - HEADER, mask=in_tail, other=0)
        scale = tl.load(scales.to(tl.pointer_type(tl.int32)) + out - HEADER - num_tail, mask=in_scales, other=0)
        word = (fields | floats | scale).to(tl.uint32, bitcast=True)
    tl.store(frame + out, word.to(tl.int32, bitcast=True), mask=counted)
    position = tl.where(out < HEADER, out, out - 1).to(tl.uint32)
    own = tl.sum(tl.where(counted, mix(mix(position) ^ word), 0).to(tl.uint32), axis=0).to(tl.uint32)
    # The sum lies above the number of programs that added to it; whoever comes last writes it.
    before = tl.atomic_add(sums, (own.to(tl.int64) << 32) + 1, sem="relaxed")
    if (before & 0xFFFFFFFF) == tl.num_programs(0) - 1:
        tl.store(frame + HEADER - 1, (before >> 32).to(tl.int32) + own.to(tl.int32, bitcast=True))


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


class _Drawing:
    """The arguments that say which trits are drawn."""

    def __init__(
        self,
        parts: Sequence[Tensor],
        scales: Tensor,
        keys: Sequence[int],
        limits: Tensor | None,
        counters: Sequence[int] | None,
    ) -> None:
        device, number = scales.device, len(parts)
        self.cuts = cuts_of(tuple(part.numel() for part in parts), 20 * _WORDS, device)
        self.num_words = -(-self.cuts.numel // 20)
        table = cached((*map(_signed, keys), *map(stream_salt, keys)), torch.int32, device)
        places = cached(tuple(map(_signed, counters or (0,) * number)), torch.int32, device)
        self.arguments = (
            self.cuts.first_piece, self.cuts.block_of, self.cuts.starts, self.cuts.ends, pointers(parts, device),
            scales, scales if limits is None else limits, table, table[number:], places,
        )  # fmt: skip


def ternarize_packed(
    parts: Sequence[Tensor],
    scales: Tensor,
    keys: Sequence[int],
    limits: Tensor | None = None,
    counters: Sequence[int] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    drawing = _Drawing(parts, scales, keys, limits, counters)
    nbytes, num_tiles = -(-drawing.cuts.numel // 5), drawing.cuts.num_tiles
    words = torch.empty(drawing.num_words, dtype=torch.int32, device=scales.device)
    if num_tiles:
        _draw[(num_tiles,)](
            *drawing.arguments, words, drawing.num_words, num_tiles, limits is not None, _WORDS, num_warps=_WORDS // 32
        )
    packed = words.view(torch.uint8)[:nbytes]
    return packed if out is None else out.copy_(packed)


def encode_ternary_frame(
    fields: tuple[int, ...],
    tail: Tensor,
    num_scales: int,
    parts: Sequence[Tensor],
    scales: Tensor,
    keys: Sequence[int],
    limits: Tensor | None,
    counters: Sequence[int],
    flag: Tensor | None,
) -> Tensor:  # (t,) float32, T vectors, (T,) float32 -> (B,) uint8
    device, drawing = scales.device, _Drawing(parts, scales, keys, limits, counters)
    front = _HEADER_WORDS + tail.numel() + num_scales
    words = torch.empty(front + drawing.num_words, dtype=torch.int32, device=device)
    sums = torch.zeros(1, dtype=torch.int64, device=device)
    step = fields[_STEP_WORD]
    constant = tuple(0 if place == _STEP_WORD else _signed(field) for place, field in enumerate(fields))
    _draw_frame[(drawing.cuts.num_tiles + triton.cdiv(front, _WORDS),)](
        *drawing.arguments, words, drawing.num_words, drawing.cuts.num_tiles,
        cached((*constant, 0), torch.int32, device), tail if tail.numel() else scales, tail.numel(), num_scales,
        flag if flag is not None else words, _signed(step), sums, limits is not None, flag is not None, _WORDS,
        _HEADER_WORDS, _STEP_WORD, num_warps=_WORDS // 32,
    )  # fmt: skip
    return words.view(torch.uint8)
