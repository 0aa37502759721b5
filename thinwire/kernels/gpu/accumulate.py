"""The one pass over a gradient: velocity, residual, and a bit for every element that reaches its threshold."""

from __future__ import annotations

import triton
import triton.language as tl

from thinwire.kernels.gpu.bits import bits_of, pack


@triton.jit
def _pass_over(
    grad_ptr, weight_ptr, velocity, residual, where, count, momentum, decay, applied, nesterov, edge, words,
    MOVED: tl.constexpr, MARKS: tl.constexpr, WHOLE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Update SIZE elements; returns how many are marked, and 2**16 for every one whose gradient is too large."""
    i = tl.arange(0, SIZE)
    inside = i < SIZE if WHOLE else i < count  # a mask that is always true leaves wide loads possible
    g = tl.load(grad_ptr + i, mask=inside, other=0.0)
    v = tl.load(residual + where + i, mask=inside, other=0.0)
    if MOVED:
        u = tl.load(velocity + where + i, mask=inside, other=0.0)
    fits = (g.to(tl.int32, bitcast=True) & 0x7F800000) < 0x5F800000  # 2**64, GRADIENT_LIMIT
    g = tl.where(fits, g, 0.0)  # never into the memory; the flag stops the step
    if MOVED:
        w = tl.zeros_like(g)
        if decay != 0.0:
            w = tl.load(weight_ptr + i, mask=inside, other=0.0)
        g += decay * w
        u = u * momentum + g
        tl.store(velocity + where + i, u, mask=inside)
        v += tl.where(nesterov != 0, g + u * momentum, u) - applied * w
    else:
        v += g
    tl.store(residual + where + i, v, mask=inside)
    counts = tl.where(fits, 0, 65536)
    if MARKS:
        marked = inside & (bits_of(v) >= edge)
        tl.store(words + tl.arange(0, SIZE // 32), pack(marked, SIZE))
        counts += marked.to(tl.int32)
    return tl.sum(counts, axis=0)


@triton.jit
def accumulate_tiles(
    tile_segment, tile_offset, parts, weights, starts, numels, momenta, decays, applieds, nesterovs, scopes, thresholds,
    velocity, residual, words, tile_counts, scope_counts, bad,
    MOVED: tl.constexpr, MARKS: tl.constexpr, TILE: tl.constexpr, BITE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    segment = tl.load(tile_segment + tile)
    offset = tl.load(tile_offset + tile)
    grad = tl.load(parts + segment) + offset.to(tl.int64) * 4
    where = tl.load(starts + segment) + offset
    count = tl.load(numels + segment) - offset
    momentum = tl.load(momenta + segment)
    decay, applied = tl.load(decays + segment), tl.load(applieds + segment)
    nesterov = tl.load(nesterovs + segment)
    weight = tl.load(weights + segment) + offset.to(tl.int64) * 4
    scope = tl.load(scopes + segment)
    searched = scope >= 0  # the dense tail is not: its marks, of which there are none, go behind the others
    threshold = tl.load(thresholds + scope, mask=searched, other=float("inf"))
    edge = tl.where(threshold < float("inf"), threshold.to(tl.int32, bitcast=True), 0x7FFFFFFF)
    if MARKS:
        words += tile * (TILE // 32)
    hyper = (momentum, decay, applied, nesterov, edge)
    if ((grad | weight) % 16 == 0) & (where % 4 == 0) & (count >= TILE):
        g = tl.multiple_of(grad.to(tl.pointer_type(tl.float32)), 16)
        w = tl.multiple_of(weight.to(tl.pointer_type(tl.float32)), 16)
        where = where // 4 * 4
        found = _pass_over(g, w, velocity, residual, where, count, *hyper, words, MOVED, MARKS, True, TILE)
    else:  # in small bites, because the registers of this path count for the other one, too
        found = tile * 0
        for start in range(0, TILE, BITE):
            g = (grad + start * 4).to(tl.pointer_type(tl.float32))
            w = (weight + start * 4).to(tl.pointer_type(tl.float32))
            found += _pass_over(
                g, w, velocity, residual, where + start, count - start, *hyper, words + start // 32, MOVED, MARKS,
                False, BITE,
            )  # fmt: skip
    if found >= 65536:
        tl.atomic_max(bad, 1)
    if MARKS:
        if searched:
            tl.store(tile_counts + tile, found & 0xFFFF)
            tl.atomic_add(scope_counts + scope, found & 0xFFFF)
