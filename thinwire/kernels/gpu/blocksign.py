"""dist-EF-blockSGDM's passes over a gradient, segmented: many tensors, one launch a pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.gpu.tables import TILE, Cuts, cached, pointers, tiles_of
from thinwire.kernels.reference import Runs, Segments, pack_bits
from thinwire.kernels.uploads import once_a_thread

_BITE = 512


@once_a_thread(most=64)
def _cuts_of_runs(runs: Runs, device: torch.device) -> Cuts:
    return Cuts(tuple(length for length, count in runs for _ in range(count)), TILE, device)


@triton.jit
def _watch(tile_segment, tile_offset, parts, numels, flag, TILE: tl.constexpr):
    tile = tl.program_id(0)
    segment, offset = tl.load(tile_segment + tile), tl.load(tile_offset + tile)
    part = (tl.load(parts + segment) + offset.to(tl.int64) * 4).to(tl.pointer_type(tl.int32))
    i = tl.arange(0, TILE)
    word = tl.load(part + i, mask=i < tl.load(numels + segment) - offset, other=0)
    if tl.max(((word & 0x7F800000) >= 0x5F800000).to(tl.int32), axis=0) != 0:  # 2**64, GRADIENT_LIMIT
        tl.atomic_max(flag, 1)


def watch(parts: Sequence[Tensor], flag: Tensor) -> None:  # T vectors, (1,) int32
    """Raise the flag where an element is not below GRADIENT_LIMIT."""
    device, numels = flag.device, tuple(part.numel() for part in parts)
    tiles = tiles_of(numels, device)
    if tiles.total:
        _watch[(tiles.total,)](
            tiles.segment, tiles.offset, pointers(parts, device), cached(numels, torch.int32, device), flag, TILE,
            num_warps=8,
        )  # fmt: skip


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
    fits = (g.to(tl.int32, bitcast=True) & 0x7F800000) < 0x5F800000  # 2**64, GRADIENT_LIMIT
    g = tl.where(fits, g, 0.0)  # never into the memory
    if decay != 0.0:
        g += decay * tl.load(weight + i, mask=inside, other=0.0)
    if MOVED:
        if momentum != 0.0:
            m = m * momentum + g
            tl.store(velocity + where + i, m, mask=inside)
            g = tl.where(nesterov != 0, g + m * momentum, m)
    tl.store(residual + where + i, e * ratio + g, mask=inside)
    if tl.max(tl.where(fits, 0, 1), axis=0) != 0:
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
    sums = torch.empty(cuts.num_pieces, dtype=torch.float32, device=device)
    num_blocks = cuts.starts.numel()
    scales = torch.empty(num_blocks, dtype=torch.float32, device=device)
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


def add_mean_of_signs(out: Tensor, frames: Sequence[tuple[Tensor, Tensor]], runs: Runs) -> None:
    total = torch.zeros_like(out)
    for packed, scales in frames:
        add_signs(total, packed, scales, runs, 1.0)
    out.add_(total.div_(len(frames)))
