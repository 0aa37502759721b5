"""TernGrad's and dist-EF-blockSGDM's passes over a gradient, segmented: many tensors, one launch a pass."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.gpu.sparse_frames import mix
from thinwire.kernels.gpu.tables import TILE, cached, pointers, tiles_of
from thinwire.kernels.reference import Runs, Segments, pack_bits, stream_salt

_TRIT_WARPS = 4
_BITE = 512
_TRIT_WORDS = 128  # words of packed trits, twenty in each, that one program writes


class Cuts:
    """A flat vector cut into equal tiles and, across them, into blocks: the pieces that lie in one tile and one block.

    Pieces are numbered in order, so the pieces of a tile, and those of a block, follow each other.
    """

    def __init__(self, lengths: tuple[int, ...], tile: int, device: torch.device) -> None:
        ends = torch.tensor(lengths, dtype=torch.int64).cumsum(0)  # (B,)
        self.numel = int(ends[-1]) if lengths else 0
        self.num_tiles = -(-self.numel // tile)
        edges = torch.arange(1, self.num_tiles + 1) * tile
        piece_ends = torch.unique(torch.cat([ends, edges.clamp(max=self.numel)]))  # sorted
        piece_ends = piece_ends[piece_ends > 0]
        blocks = torch.searchsorted(ends, piece_ends)  # (pieces,) the block each piece ends in
        firsts = torch.searchsorted(piece_ends, torch.arange(self.num_tiles + 1) * tile, right=True)  # (tiles + 1,)
        in_block = torch.searchsorted(blocks, torch.arange(len(lengths) + 1))  # (blocks + 1,)
        starts = ends - torch.tensor(lengths, dtype=torch.int64)
        self.num_pieces = piece_ends.numel()
        self.first_piece, self.block_of = firsts.to(torch.int32).to(device), blocks.to(torch.int32).to(device)
        self.first_of_block = in_block.to(torch.int32).to(device)
        self.starts, self.ends = starts.to(torch.int32).to(device), ends.to(torch.int32).to(device)  # (B,)


@lru_cache(maxsize=64)
def _cuts(lengths: tuple[int, ...], tile: int, device: torch.device) -> Cuts:
    return Cuts(lengths, tile, device)


@lru_cache(maxsize=64)
def _cuts_of_runs(runs: Runs, device: torch.device) -> Cuts:
    return Cuts(tuple(length for length, count in runs for _ in range(count)), TILE, device)


# -------------------------------------------------------------------------------------------------------- TernGrad


@triton.jit
def _tile_moments(tile_segment, tile_offset, parts, numels, means, squares, largest, TILE: tl.constexpr):
    tile = tl.program_id(0)
    segment, offset = tl.load(tile_segment + tile), tl.load(tile_offset + tile)
    count = tl.minimum(tl.load(numels + segment) - offset, TILE)
    address = tl.load(parts + segment) + offset.to(tl.int64) * 4
    i = tl.arange(0, TILE)
    if (address % 16 == 0) & (count == TILE):  # without a mask, loads are wide
        x = tl.load(tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16) + i)
    else:
        x = tl.load(address.to(tl.pointer_type(tl.float32)) + i, mask=i < count, other=0.0)
    mean = tl.sum(x, axis=0) / count
    away = tl.where(i < count, x - mean, 0.0)
    tl.store(means + tile, mean)
    tl.store(squares + tile, tl.sum(away * away, axis=0))
    tl.store(largest + tile, tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0))


@triton.jit
def _segment_moments(
    first_tiles, numels, means, squares, largest, deviations, magnitudes, TILE: tl.constexpr, BLOCK: tl.constexpr
):
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
    variance = tl.sum(spread, axis=0) / tl.maximum(numel, 1)
    tl.store(deviations + segment, tl.sqrt(variance).to(tl.float32))
    tl.store(magnitudes + segment, tl.max(most, axis=0).to(tl.float32, bitcast=True))


def moments(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    device, numels = parts[0].device, tuple(part.numel() for part in parts)
    tiles = tiles_of(numels, device)
    means, squares = torch.empty(2, max(tiles.total, 1), device=device).unbind()
    largest = torch.empty(max(tiles.total, 1), dtype=torch.int32, device=device)
    deviations, magnitudes = torch.empty(2, len(parts), device=device).unbind()
    lengths = cached(numels, torch.int32, device)
    if tiles.total:
        _tile_moments[(tiles.total,)](
            tiles.segment,
            tiles.offset,
            pointers(parts, device),
            lengths,
            means,
            squares,
            largest,
            TILE,
            num_warps=8,
        )
    _segment_moments[(len(parts),)](
        cached(tuple(tiles.first), torch.int32, device), lengths, means, squares, largest, deviations, magnitudes,
        TILE, 8192, num_warps=32,
    )  # fmt: skip
    return deviations, magnitudes


@triton.jit
def _trit_digit(x, i, key, salt, scale, limit):
    """trit + 1 of one element: random(key, i) decides (TernGrad, Eq. 1, 3 and 21); a nan is never kept."""
    drawn = mix(mix(i.to(tl.uint32) ^ key) ^ salt) >> 8
    bar = drawn.to(tl.float32) * 5.9604644775390625e-08 * scale
    keep = (bar < tl.abs(x)) & (bar < limit)
    return tl.where(keep, tl.where(x > 0, 2, 0), 1).to(tl.uint32)


@triton.jit
def _trit_words(part, first, count, key, salt, scale, limit, WHOLE: tl.constexpr, WORDS: tl.constexpr):
    """WORDS words of four bytes of five trits each, of the elements from ``first`` on; those outside of the part are 0.

    Every thread takes four neighbouring elements at a time, of the twenty that make up a word.
    """
    row, column = tl.arange(0, WORDS)[:, None] * 20, tl.arange(0, 4)[None, :]
    word = tl.zeros((WORDS,), tl.uint32)
    for group in tl.static_range(5):
        place = column + 4 * group  # of the element inside its word
        i = first + row + 4 * group + column
        if WHOLE:
            x = tl.load(part + i)
            digit = _trit_digit(x, i, key, salt, scale, limit)
        else:
            inside = (i >= 0) & (i < count)
            x = tl.load(part + i, mask=inside, other=0.0)
            digit = tl.where(inside, _trit_digit(x, i, key, salt, scale, limit), 0)
        power = place % 5
        weight = tl.where(power == 0, 1, tl.where(power == 1, 3, tl.where(power == 2, 9, tl.where(power == 3, 27, 81))))
        word += tl.sum(digit * (weight.to(tl.uint32) << (8 * (place // 5)).to(tl.uint32)), axis=1).to(tl.uint32)
    return word


@triton.jit
def _pack_ternary(
    first_piece, block_of, starts, ends, parts, scales, limits, keys, salts, packed, num_words,
    CLIPPED: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    first, last = tl.load(first_piece + tile), tl.load(first_piece + tile + 1)
    element = tile * WORDS * 20
    out = tile * WORDS + tl.arange(0, WORDS)
    segment = tl.load(block_of + first)
    address = tl.load(parts + segment)
    offset = element - tl.load(starts + segment)
    inside_one = (last - first == 1) & (element + WORDS * 20 <= tl.load(ends + segment))
    if inside_one & (address % 16 == 0) & (offset % 4 == 0):
        key, salt = tl.load(keys + segment).to(tl.uint32, bitcast=True), tl.load(salts + segment)
        limit = tl.load(limits + segment) if CLIPPED else float("inf")
        part = tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16)
        word = _trit_words(
            part, offset // 4 * 4, 0, key, salt.to(tl.uint32, bitcast=True), tl.load(scales + segment), limit,
            True, WORDS,
        )  # fmt: skip
        tl.store(packed + out, word.to(tl.int32, bitcast=True))
    else:
        total = tl.zeros((WORDS,), tl.uint32)
        for piece in range(first, last):
            segment = tl.load(block_of + piece)
            start, end = tl.load(starts + segment), tl.load(ends + segment)
            key, salt = tl.load(keys + segment).to(tl.uint32, bitcast=True), tl.load(salts + segment)
            limit = tl.load(limits + segment) if CLIPPED else float("inf")
            part = tl.load(parts + segment).to(tl.pointer_type(tl.float32))
            total += _trit_words(
                part, element - start, end - start, key, salt.to(tl.uint32, bitcast=True), tl.load(scales + segment),
                limit, False, WORDS,
            )  # fmt: skip
        tl.store(packed + out, total.to(tl.int32, bitcast=True), mask=out < num_words)


def ternarize_packed(
    parts: Sequence[Tensor], scales: Tensor, keys: Sequence[int], limits: Tensor | None = None
) -> Tensor:
    device = scales.device
    cuts = _cuts(tuple(part.numel() for part in parts), 20 * _TRIT_WORDS, device)
    num_words = -(-cuts.numel // 20)
    packed = torch.empty(num_words, dtype=torch.int32, device=device)
    if cuts.num_tiles:
        signed = [key - (1 << 32) if key >= 1 << 31 else key for key in keys]
        table = cached((*signed, *(stream_salt(key) for key in keys)), torch.int32, device)
        _pack_ternary[(cuts.num_tiles,)](
            cuts.first_piece, cuts.block_of, cuts.starts, cuts.ends, pointers(parts, device), scales,
            scales if limits is None else limits, table, table[len(keys) :], packed, num_words, limits is not None,
            _TRIT_WORDS, num_warps=_TRIT_WARPS,
        )  # fmt: skip
    return packed.view(torch.uint8)[: -(-cuts.numel // 5)]


@triton.jit
def _watch(tile_segment, tile_offset, parts, numels, flag, TILE: tl.constexpr):
    tile = tl.program_id(0)
    segment, offset = tl.load(tile_segment + tile), tl.load(tile_offset + tile)
    part = (tl.load(parts + segment) + offset.to(tl.int64) * 4).to(tl.pointer_type(tl.int32))
    i = tl.arange(0, TILE)
    word = tl.load(part + i, mask=i < tl.load(numels + segment) - offset, other=0)
    if tl.max(((word & 0x7F800000) == 0x7F800000).to(tl.int32), axis=0) != 0:
        tl.atomic_max(flag, 1)


def watch(parts: Sequence[Tensor], flag: Tensor) -> None:  # T vectors, (1,) int32
    """Raise the flag where an element is not finite."""
    device, numels = flag.device, tuple(part.numel() for part in parts)
    tiles = tiles_of(numels, device)
    if tiles.total:
        _watch[(tiles.total,)](
            tiles.segment, tiles.offset, pointers(parts, device), cached(numels, torch.int32, device), flag, TILE,
            num_warps=8,
        )  # fmt: skip


# ------------------------------------------------------------------------------------------------------- BlockSign


@triton.jit
def _error_step(
    tile_segment, tile_offset, parts, weights, starts, numels, momenta, decays, nesterovs, ratios, velocity, residual,
    flag, MOVED: tl.constexpr, TILE: tl.constexpr, BITE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    segment, offset = tl.load(tile_segment + tile), tl.load(tile_offset + tile)
    grad = tl.load(parts + segment) + offset.to(tl.int64) * 4
    weight = tl.load(weights + segment) + offset.to(tl.int64) * 4
    where = tl.load(starts + segment) + offset
    count = tl.load(numels + segment) - offset
    momentum, decay = tl.load(momenta + segment), tl.load(decays + segment)
    nesterov, ratio = tl.load(nesterovs + segment), tl.load(ratios + segment)
    rest = (count, momentum, decay, nesterov, ratio, velocity, residual, flag)
    if ((grad | weight) % 16 == 0) & (where % 4 == 0) & (count >= TILE):
        g = tl.multiple_of(grad.to(tl.pointer_type(tl.float32)), 16)
        w = tl.multiple_of(weight.to(tl.pointer_type(tl.float32)), 16)
        _error_tile(g, w, where // 4 * 4, *rest, MOVED, True, TILE)
    else:
        for start in range(0, TILE, BITE):  # in small bites: the registers of this path count for the other one, too
            rest = (count - start, momentum, decay, nesterov, ratio, velocity, residual, flag)
            g = (grad + start * 4).to(tl.pointer_type(tl.float32))
            w = (weight + start * 4).to(tl.pointer_type(tl.float32))
            _error_tile(g, w, where + start, *rest, MOVED, False, BITE)


@triton.jit
def _error_tile(
    grad, weight, where, count, momentum, decay, nesterov, ratio, velocity, residual, flag, MOVED: tl.constexpr,
    WHOLE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, SIZE)
    inside = i < SIZE if WHOLE else i < count
    g = tl.load(grad + i, mask=inside, other=0.0)
    e = tl.load(residual + where + i, mask=inside, other=0.0)
    if MOVED:
        m = tl.load(velocity + where + i, mask=inside, other=0.0)
    finite = (g.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000
    g = tl.where(finite, g, 0.0)  # never into the memory
    if decay != 0.0:
        g += decay * tl.load(weight + i, mask=inside, other=0.0)
    if MOVED:
        if momentum != 0.0:
            m = m * momentum + g
            tl.store(velocity + where + i, m, mask=inside)
            g = tl.where(nesterov != 0, g + m * momentum, m)
    tl.store(residual + where + i, e * ratio + g, mask=inside)
    if tl.max(tl.where(finite, 0, 1), axis=0) != 0:
        tl.atomic_max(flag, 1)


def error_step(
    parts: Sequence[Tensor], segments: Segments, ratios: Sequence[float], velocity: Tensor | None, residual: Tensor,
    flag: Tensor | None = None,
) -> None:  # fmt: skip
    device, numels = residual.device, tuple(part.numel() for part in parts)
    tiles = tiles_of(numels, device)
    if flag is None:
        flag = torch.zeros(1, dtype=torch.int32, device=device)
    if tiles.total:
        _error_step[(tiles.total,)](
            tiles.segment, tiles.offset, pointers(parts, device), pointers(segments.weights, device),
            cached(segments.starts, torch.int32, device), cached(numels, torch.int32, device),
            cached(segments.momentum, torch.float32, device), cached(segments.decay, torch.float32, device),
            cached(tuple(map(int, segments.nesterov)), torch.int32, device),
            cached(tuple(ratios), torch.float32, device), velocity if velocity is not None else residual, residual,
            flag, velocity is not None, TILE, _BITE, num_warps=8,
        )  # fmt: skip


@triton.jit
def _signs(x, first_piece, block_of, starts, ends, sums, words, numel, num_words, TILE: tl.constexpr):
    tile = tl.program_id(0)
    first, last = tl.load(first_piece + tile), tl.load(first_piece + tile + 1)
    i = tile * TILE + tl.arange(0, TILE)
    if (tile + 1) * TILE <= numel:
        value = tl.load(x + i)
    else:
        value = tl.load(x + i, mask=i < numel, other=0.0)
    bits = tl.reshape((value < 0).to(tl.uint32), (TILE // 32, 32)) << tl.arange(0, 32)[None, :].to(tl.uint32)
    w = tile * (TILE // 32) + tl.arange(0, TILE // 32)
    tl.store(words + w, tl.sum(bits, axis=1).to(tl.int32, bitcast=True), mask=w < num_words)
    magnitude = tl.abs(value)
    if last - first == 1:
        tl.store(sums + first, tl.sum(magnitude, axis=0))
    else:
        for piece in range(first, last):
            block = tl.load(block_of + piece)
            here = (i >= tl.load(starts + block)) & (i < tl.load(ends + block))
            tl.store(sums + piece, tl.sum(tl.where(here, magnitude, 0.0), axis=0))


@triton.jit
def _block_scales(sums, first_of_block, starts, ends, scales, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    first, last = tl.load(first_of_block + block), tl.load(first_of_block + block + 1)
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(first, last, BLOCK):
        piece = start + tl.arange(0, BLOCK)
        total += tl.load(sums + piece, mask=piece < last, other=0.0).to(tl.float64)
    length = tl.load(ends + block) - tl.load(starts + block)
    tl.store(scales + block, (tl.sum(total, axis=0) / length).to(tl.float32))


def blockwise_sign(x: Tensor, runs: Runs) -> tuple[Tensor, Tensor]:  # (n,) float32 -> (ceil(n/8),) uint8, (B,) float32
    device, cuts = x.device, _cuts_of_runs(runs, x.device)
    num_words = -(-cuts.numel // 32)
    words = torch.empty(num_words, dtype=torch.int32, device=device)
    sums = torch.empty(cuts.num_pieces, device=device)
    num_blocks = cuts.starts.numel()
    scales = torch.empty(num_blocks, device=device)
    if cuts.num_tiles:
        _signs[(cuts.num_tiles,)](
            x, cuts.first_piece, cuts.block_of, cuts.starts, cuts.ends, sums, words, cuts.numel, num_words, TILE,
            num_warps=8,
        )  # fmt: skip
        _block_scales[(num_blocks,)](sums, cuts.first_of_block, cuts.starts, cuts.ends, scales, 8192, num_warps=16)
    return words.view(torch.uint8)[: -(-cuts.numel // 8)], scales


@triton.jit
def _step_of(scales, block_of, starts, ends, first, last, i, factor, SIZE: tl.constexpr):
    """factor * the scale of the block that element i is in."""
    step = tl.zeros((SIZE,), tl.float32)
    for piece in range(first, last):
        block = tl.load(block_of + piece)
        here = (i >= tl.load(starts + block)) & (i < tl.load(ends + block))
        step = tl.where(here, tl.load(scales + block) * factor, step)
    return step


@triton.jit
def _add_signs(
    out, packed, scales, first_piece, block_of, starts, ends, numel, factor, TILE: tl.constexpr, BITE: tl.constexpr
):
    tile = tl.program_id(0)
    first, last = tl.load(first_piece + tile), tl.load(first_piece + tile + 1)
    if ((tile + 1) * TILE <= numel) & (last - first == 1):
        i = tile * TILE + tl.arange(0, TILE)
        step = tl.load(scales + tl.load(block_of + first)) * factor
        byte = tl.load(packed + (i >> 3)).to(tl.int32)
        tl.store(out + i, tl.load(out + i) + tl.where(((byte >> (i & 7)) & 1) != 0, -step, step))
    else:
        for start in range(0, TILE, BITE):
            i = tile * TILE + start + tl.arange(0, BITE)
            steps = _step_of(scales, block_of, starts, ends, first, last, i, factor, BITE)
            inside = i < numel
            byte = tl.load(packed + (i >> 3), mask=inside, other=0).to(tl.int32)
            value = tl.load(out + i, mask=inside, other=0.0) + tl.where(((byte >> (i & 7)) & 1) != 0, -steps, steps)
            tl.store(out + i, value, mask=inside)


def add_signs(out: Tensor, bits: Tensor, scales: Tensor, runs: Runs, factor: float) -> None:
    packed = pack_bits(bits) if bits.dtype == torch.bool else bits
    cuts = _cuts_of_runs(runs, out.device)
    if cuts.num_tiles:
        _add_signs[(cuts.num_tiles,)](
            out, packed, scales, cuts.first_piece, cuts.block_of, cuts.starts, cuts.ends, cuts.numel, factor, TILE,
            _BITE, num_warps=8,
        )  # fmt: skip
