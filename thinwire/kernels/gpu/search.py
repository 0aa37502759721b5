"""Accumulation and exact top-k of many segments in one pass over memory, without a word to the host.

The pass that adds the gradient marks every element that reaches the threshold carried over from the last step: one bit
an element. A segment whose marks are too few or too many is searched as a whole; otherwise the marked ones, about twice
as many as wanted, are gathered in order and the k largest of them are chosen. The choice is exact in either case.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.gpu.tables import TILE, WORDS, Tiles, cached, pointers, tiles_of
from thinwire.kernels.reference import Segments

_CHUNK = 4096  # candidates that one program holds in registers
_BLOCK = 1024  # candidates that one program passes over when it writes the chosen ones
_GROUP = 8  # tiles whose marks one program gathers
_BINS = 1024
_BIN_SHIFT = 14  # a bin is 2**14 neighbouring floats wide: all of them together span a factor of four


@triton.jit
def _bits_of(x):
    """The magnitude as an integer that is ordered in the same way; a nan is the largest."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def popcount(w):
    w = w.to(tl.uint32, bitcast=True)
    w = w - ((w >> 1) & 0x55555555)
    w = (w & 0x33333333) + ((w >> 2) & 0x33333333)
    w = (w + (w >> 4)) & 0x0F0F0F0F
    return ((w * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _pack(mask, TILE: tl.constexpr):
    bits = tl.reshape(mask.to(tl.uint32), (TILE // 32, 32)) << tl.arange(0, 32)[None, :].to(tl.uint32)
    return tl.sum(bits, axis=1).to(tl.int32, bitcast=True)


@triton.jit
def _accumulate_tile(
    grad_ptr, weight_ptr, velocity, residual, where, count, momentum, decay, nesterov, threshold,
    words, tile_counts, counter, searched, bad, tile, MOVED: tl.constexpr, MARKS: tl.constexpr,
    ALIGNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, TILE)
    inside = i < count
    if ALIGNED:
        grad_ptr = tl.multiple_of(grad_ptr, 16)
        where = tl.multiple_of(where, 4)
    g = tl.load(grad_ptr + i, mask=inside, other=0.0)
    v = tl.load(residual + where + i, mask=inside, other=0.0)
    finite = (g.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000
    g = tl.where(finite, g, 0.0)  # never into the memory; the flag stops the step
    if MOVED:
        u = tl.load(velocity + where + i, mask=inside, other=0.0)
        if decay != 0.0:
            g += decay * tl.load(weight_ptr + i, mask=inside, other=0.0)
        u = u * momentum + g
        tl.store(velocity + where + i, u, mask=inside)
        if nesterov != 0:
            v = v + g + u * momentum
        else:
            v = v + u
    else:
        v = v + g
    tl.store(residual + where + i, v, mask=inside)
    if tl.max((inside & (finite == 0)).to(tl.int32), axis=0) != 0:
        tl.atomic_max(bad, 1)
    if MARKS:
        if searched:
            edge = tl.where(threshold < float("inf"), threshold.to(tl.int32, bitcast=True), 0x7FFFFFFF)
            marked = inside & (_bits_of(v) >= edge)
            tl.store(words + tile * (TILE // 32) + tl.arange(0, TILE // 32), _pack(marked, TILE))
            found = tl.sum(marked.to(tl.int32), axis=0)
            tl.store(tile_counts + tile, found)
            tl.atomic_add(counter, found)


@triton.jit
def _accumulate(
    tile_segment, tile_offset, parts, weights, starts, numels, momenta, decays, nesterovs, scopes, thresholds,
    velocity, residual, words, tile_counts, scope_counts, bad,
    MOVED: tl.constexpr, MARKS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    segment = tl.load(tile_segment + tile)
    offset = tl.load(tile_offset + tile)
    grad = tl.load(parts + segment) + offset.to(tl.int64) * 4
    where = tl.load(starts + segment) + offset
    count = tl.load(numels + segment) - offset
    momentum = tl.load(momenta + segment)
    decay = tl.load(decays + segment)
    nesterov = tl.load(nesterovs + segment)
    weight = tl.load(weights + segment) + offset.to(tl.int64) * 4
    scope = tl.load(scopes + segment)
    searched = scope >= 0  # the dense tail is not
    threshold = tl.load(thresholds + scope, mask=searched, other=float("inf"))
    aligned = ((grad | weight) % 16 == 0) & (where % 4 == 0) & (residual.to(tl.int64) % 16 == 0)
    grad_ptr = grad.to(tl.pointer_type(tl.float32))
    weight_ptr = weight.to(tl.pointer_type(tl.float32))
    counter = scope_counts + tl.where(searched, scope, 0)
    if aligned:
        _accumulate_tile(
            grad_ptr, weight_ptr, velocity, residual, where, count, momentum, decay, nesterov, threshold,
            words, tile_counts, counter, searched, bad, tile, MOVED, MARKS, True, TILE,
        )  # fmt: skip
    else:
        _accumulate_tile(
            grad_ptr, weight_ptr, velocity, residual, where, count, momentum, decay, nesterov, threshold,
            words, tile_counts, counter, searched, bad, tile, MOVED, MARKS, False, TILE,
        )  # fmt: skip


@triton.jit
def _rescue(
    first_tiles, wanted, capacities, scope_counts, tile_segment, tile_offset, starts, numels, residual, words,
    tile_counts, TILE: tl.constexpr,
):  # fmt: skip
    """Search a whole scope whose marks do not help: four rounds of eight bits find the exact threshold."""
    scope = tl.program_id(0)
    k = tl.load(wanted + scope)
    found = tl.load(scope_counts + scope)
    if (found >= k) & (found <= tl.load(capacities + scope)):
        return
    first, last = tl.load(first_tiles + scope), tl.load(first_tiles + scope + 1)
    i = tl.arange(0, TILE)
    edge = tl.zeros((), tl.int32)  # the threshold as far as it is known
    need = k  # entries still to take at or above it
    for round in tl.static_range(4):
        histogram = tl.zeros((256,), tl.int32)
        for tile in range(first, last):
            segment, offset = tl.load(tile_segment + tile), tl.load(tile_offset + tile)
            inside = i < tl.load(numels + segment) - offset
            key = _bits_of(tl.load(residual + tl.load(starts + segment) + offset + i, mask=inside, other=0.0))
            if round > 0:
                inside = inside & ((key >> (32 - 8 * round)) == (edge >> (32 - 8 * round)))
            histogram += tl.histogram((key >> (24 - 8 * round)) & 255, 256, mask=inside)
        reaching = tl.sum(histogram, axis=0) - tl.cumsum(histogram, axis=0) + histogram  # entries in this bin or above
        bin = tl.sum((reaching >= need).to(tl.int32), axis=0) - 1
        at = tl.arange(0, 256) == bin
        need -= tl.sum(tl.where(at, reaching - histogram, 0), axis=0)
        edge += bin << (24 - 8 * round)
    ties = tl.zeros((), tl.int32)
    for tile in range(first, last):
        segment, offset = tl.load(tile_segment + tile), tl.load(tile_offset + tile)
        inside = i < tl.load(numels + segment) - offset
        key = _bits_of(tl.load(residual + tl.load(starts + segment) + offset + i, mask=inside, other=0.0))
        tie = inside & (key == edge)
        marked = (inside & (key > edge)) | (tie & (ties + tl.cumsum(tie.to(tl.int32), axis=0) <= need))
        ties += tl.sum(tie.to(tl.int32), axis=0)
        tl.store(words + tile * (TILE // 32) + tl.arange(0, TILE // 32), _pack(marked, TILE))
        tl.store(tile_counts + tile, tl.sum(marked.to(tl.int32), axis=0))


@triton.jit
def _running_sums(counts, bases, total, BLOCK: tl.constexpr):
    """bases[i] = sum of counts before i; bases[total] = the sum of all."""
    before = tl.zeros((), tl.int32)
    for start in range(0, total, BLOCK):
        i = start + tl.arange(0, BLOCK)
        count = tl.load(counts + i, mask=i < total, other=0)
        tl.store(bases + i, before + tl.cumsum(count, axis=0) - count, mask=i < total)
        before += tl.sum(count, axis=0)
    tl.store(bases + total, before)


@triton.jit
def _gather_marked(
    words, bases, tile_segment, tile_offset, starts, scopes, histogram_of, thresholds, residual,
    candidate_index, candidate_key, candidate_scope, histograms, num_tiles,
    GROUP: tl.constexpr, WORDS: tl.constexpr, BINS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) * GROUP + tl.arange(0, GROUP)  # (GROUP,)
    inside = tile < num_tiles
    word = tl.load(words + tile[:, None] * WORDS + tl.arange(0, WORDS)[None, :], mask=inside[:, None], other=0)
    segment = tl.load(tile_segment + tile, mask=inside, other=0)
    scope = tl.load(scopes + segment, mask=inside, other=0)
    flat = tl.load(starts + segment, mask=inside, other=0) + tl.load(tile_offset + tile, mask=inside, other=0)
    base = tl.load(bases + tile, mask=inside, other=0)
    row = tl.load(histogram_of + scope, mask=inside, other=-1)
    floor = tl.load(thresholds + scope, mask=inside, other=0.0).to(tl.int32, bitcast=True)
    count = popcount(word)
    place = base[:, None] + tl.cumsum(count, axis=1) - count  # (GROUP, WORDS)
    left = flat[:, None] + tl.arange(0, WORDS)[None, :] * 32
    scope2 = tl.broadcast_to(scope[:, None], (GROUP, WORDS))
    row2 = tl.broadcast_to(row[:, None], (GROUP, WORDS))
    floor2 = tl.broadcast_to(floor[:, None], (GROUP, WORDS))
    while tl.max(tl.max((word != 0).to(tl.int32), axis=1), axis=0) != 0:
        some = word != 0
        lowest = word & -word
        index = left + popcount(lowest - 1)
        key = _bits_of(tl.load(residual + index, mask=some, other=0.0))
        tl.store(candidate_index + place, index, mask=some)
        tl.store(candidate_key + place, key, mask=some)
        tl.store(candidate_scope + place, scope2, mask=some)
        bin = tl.minimum(tl.maximum(key - floor2, 0) >> SHIFT, BINS - 1)
        tl.atomic_add(histograms + row2 * BINS + bin, 1, mask=some & (row2 >= 0))
        place += some.to(tl.int32)
        word = word & (word - 1)


@triton.jit
def _largest(keys, inside, k):
    """The k-th largest of the keys, bit by bit."""
    edge = tl.zeros((), tl.int32)
    for bit in tl.static_range(30, -1, -1):
        trial = edge | (1 << bit)
        edge = tl.where(tl.sum((inside & (keys >= trial)).to(tl.int32), axis=0) >= k, trial, edge)
    return edge


@triton.jit
def _choose_edge(
    first_tiles, bases, wanted, histogram_of, histograms, candidate_index, candidate_key, scratch,
    thresholds, shares, smallest, scope_counts, edges, last_ties,
    CHUNK: tl.constexpr, BINS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Find every scope's exact threshold among its candidates, and the threshold to carry to the next step."""
    scope = tl.program_id(0)
    k = tl.load(wanted + scope)
    start = tl.load(bases + tl.load(first_tiles + scope))
    stop = tl.load(bases + tl.load(first_tiles + scope + 1))
    i = tl.arange(0, CHUNK)
    threshold = tl.load(thresholds + scope)
    row = tl.load(histogram_of + scope)
    list_start, list_count, need = start, stop - start, k
    source = candidate_key
    exact = stop - start == k  # all are taken: the edge is the smallest of them
    if (stop - start > CHUNK) & (row >= 0) & (exact == 0):
        # Only the bin in which the k-th largest lies has to be looked at closely.
        histogram = tl.load(histograms + row * BINS + tl.arange(0, BINS))
        reaching = tl.sum(histogram, axis=0) - tl.cumsum(histogram, axis=0) + histogram
        bin = tl.sum((reaching >= k).to(tl.int32), axis=0) - 1
        at = tl.arange(0, BINS) == bin
        need = k - tl.sum(tl.where(at, reaching - histogram, 0), axis=0)
        floor = threshold.to(tl.int32, bitcast=True)
        list_count = start * 0
        for chunk in range(start, stop, CHUNK):
            key = tl.load(candidate_key + chunk + i, mask=chunk + i < stop, other=-1)
            here = (key >= 0) & (tl.minimum(tl.maximum(key - floor, 0) >> SHIFT, BINS - 1) == bin)
            place = list_count + tl.cumsum(here.to(tl.int32), axis=0) - 1
            tl.store(scratch + start + place, key, mask=here)
            list_count += tl.sum(here.to(tl.int32), axis=0)
        tl.debug_barrier()
        source = scratch
    if exact:
        edge = start * 0 + 0x7FFFFFFF
        for chunk in range(start, stop, CHUNK):
            key = tl.load(candidate_key + chunk + i, mask=chunk + i < stop, other=0x7FFFFFFF)
            edge = tl.minimum(edge, tl.min(key, axis=0))
    elif list_count <= CHUNK:
        keys = tl.load(source + list_start + i, mask=i < list_count, other=-1)
        edge = _largest(keys, i < list_count, need)
    else:
        edge = start * 0
        for step in range(31):
            trial = edge | (1 << (30 - step))
            reach = start * 0
            for chunk in range(list_start, list_start + list_count, CHUNK):
                key = tl.load(source + chunk + i, mask=chunk + i < list_start + list_count, other=-1)
                reach += tl.sum((key >= trial).to(tl.int32), axis=0)
            edge = tl.where(reach >= need, trial, edge)
    above, ties = start * 0, start * 0
    for chunk in range(start, stop, CHUNK):
        key = tl.load(candidate_key + chunk + i, mask=chunk + i < stop, other=-1)
        above += tl.sum((key > edge).to(tl.int32), axis=0)
        ties += tl.sum((key == edge).to(tl.int32), axis=0)
    last_tie = start * 0 + 0x7FFFFFFF
    if above + ties > k:  # ties go to the lower index: find the last index that is taken
        last_tie = start * 0
        for step in range(31):
            trial = last_tie | (1 << (30 - step))
            before = start * 0
            for chunk in range(start, stop, CHUNK):
                key = tl.load(candidate_key + chunk + i, mask=chunk + i < stop, other=-1)
                index = tl.load(candidate_index + chunk + i, mask=chunk + i < stop, other=0x7FFFFFFF)
                before += tl.sum(((key == edge) & (index < trial)).to(tl.int32), axis=0)
            last_tie = tl.where(before < k - above, trial, last_tie)
    tl.store(edges + scope, edge)
    tl.store(last_ties + scope, last_tie)
    # The rule of thinwire.compressors.topk: a little below what the next step is expected to choose.
    found = tl.load(scope_counts + scope)
    share = tl.load(shares + scope)
    before = tl.load(smallest + scope)
    now = edge.to(tl.float32, bitcast=True)
    if threshold < float("inf"):
        if found > 2.5 * k:
            share += 0.2 * (1.0 - share)
        if found < k:
            share *= 0.98
    growth = tl.minimum(tl.maximum(now - before, 0.0), now)
    growth = tl.where(before > 0, growth, 0.0)
    usable = (now > 0) & (now < float("inf"))
    tl.store(shares + scope, share)
    tl.store(smallest + scope, tl.where(usable, now, 0.0))
    tl.store(thresholds + scope, tl.where(usable, (now + growth) * share, float("inf")))


@triton.jit
def _accepted(candidate_index, candidate_key, candidate_scope, edges, last_ties, bases, num_tiles, BLOCK: tl.constexpr):
    total = tl.load(bases + num_tiles)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < total
    scope = tl.load(candidate_scope + i, mask=inside, other=0)
    key = tl.load(candidate_key + i, mask=inside, other=-1)
    index = tl.load(candidate_index + i, mask=inside, other=0)
    edge = tl.load(edges + scope, mask=inside, other=0)
    return inside & (
        (key > edge) | ((key == edge) & (index <= tl.load(last_ties + scope, mask=inside, other=0)))
    ), index


@triton.jit
def _count_accepted(
    candidate_index, candidate_key, candidate_scope, edges, last_ties, bases, num_tiles, block_counts,
    BLOCK: tl.constexpr,
):  # fmt: skip
    accepted, _ = _accepted(candidate_index, candidate_key, candidate_scope, edges, last_ties, bases, num_tiles, BLOCK)
    tl.store(block_counts + tl.program_id(0), tl.sum(accepted.to(tl.int32), axis=0))


@triton.jit
def _write_accepted(
    candidate_index, candidate_key, candidate_scope, edges, last_ties, bases, num_tiles, block_counts, residual,
    indices, values, capacity, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    accepted, index = _accepted(
        candidate_index, candidate_key, candidate_scope, edges, last_ties, bases, num_tiles, BLOCK
    )
    b = tl.arange(0, BLOCKS)
    before = tl.sum(tl.load(block_counts + b, mask=b < block, other=0), axis=0)
    place = before + tl.cumsum(accepted.to(tl.int32), axis=0) - 1
    accepted = accepted & (place < capacity)
    tl.store(indices + place, index.to(tl.int64), mask=accepted)
    tl.store(values + place, tl.load(residual + index, mask=accepted, other=0.0), mask=accepted)


class Search:
    """The exact top-k of the scopes of one layout, and the thresholds that are carried from step to step.

    A scope is a run of coded segments: every one of them alone (DGC) or all together (gTop-k). ``wanted`` holds k of
    each scope. The scopes lie one after the other at the front of the flat vector.
    """

    def __init__(
        self,
        starts: Sequence[int],
        numels: Sequence[int],
        scope_of: Sequence[int],
        wanted: Sequence[int],
        device: torch.device,
    ) -> None:
        scopes = len(wanted)
        self.device, self.num_scopes, self.total = device, scopes, sum(wanted)
        self.tiles = tiles_of(tuple(numels), device)
        self.num_tiles = self.tiles.first[sum(scope >= 0 for scope in scope_of)]  # those of coded segments
        sizes = [0] * scopes
        for numel, scope in zip(numels, scope_of, strict=True):
            if scope >= 0:
                sizes[scope] += numel
        capacities = [min(size, 4 * k + 64) for size, k in zip(sizes, wanted, strict=True)]
        firsts = [self.tiles.first[scope_of.index(scope)] for scope in range(scopes)] + [self.num_tiles]
        large = [scope for scope in range(scopes) if capacities[scope] > _CHUNK]
        rows = {scope: row for row, scope in enumerate(large)}
        self.starts = cached(tuple(starts), torch.int32, device)  # (segments,)
        self.numels = cached(tuple(numels), torch.int32, device)
        self.scopes = cached(tuple(scope_of), torch.int32, device)  # (segments,)
        self.wanted = cached(tuple(wanted), torch.int32, device)  # (scopes,)
        self.capacities = cached(tuple(capacities), torch.int32, device)
        self.first_tiles = cached(tuple(firsts), torch.int32, device)  # (scopes + 1,)
        self.histogram_of = cached(tuple(rows.get(s, -1) for s in range(scopes)), torch.int32, device)
        self.capacity = sum(capacities)
        self.num_blocks = max(1, -(-self.capacity // _BLOCK))
        self.thresholds = torch.full((scopes,), float("inf"), device=device)
        self.shares = torch.full((scopes,), 0.95, device=device)
        self.smallest = torch.zeros(scopes, device=device)

        def ints(count: int) -> Tensor:
            return torch.zeros(max(count, 1), dtype=torch.int32, device=device)

        # Cleared together at the start of a step: counts of marks a scope, histograms.
        self.cleared = ints(scopes + _BINS * len(large))
        self.scope_counts, self.histograms = self.cleared[:scopes], self.cleared[scopes:]
        self.words = ints(self.num_tiles * WORDS)
        self.tile_counts, self.bases = ints(self.num_tiles), ints(self.num_tiles + 1)
        self.edges, self.last_ties, self.block_counts = ints(scopes), ints(scopes), ints(self.num_blocks)
        self.index, self.key, self.scope, self.scratch = (ints(self.capacity) for _ in range(4))
        self.indices = torch.zeros(self.total, dtype=torch.int64, device=device)
        self.values = torch.zeros(self.total, device=device)

    def select(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the chosen indices, rising, and their values: (K,) each, overwritten by the next step."""
        tiles, scopes = self.tiles, self.num_scopes
        if not scopes:
            return self.indices, self.values
        _rescue[(scopes,)](
            self.first_tiles, self.wanted, self.capacities, self.scope_counts, tiles.segment, tiles.offset,
            self.starts, self.numels, x, self.words, self.tile_counts, TILE, num_warps=8,
        )  # fmt: skip
        _running_sums[(1,)](self.tile_counts, self.bases, self.num_tiles, 4096, num_warps=16)
        _gather_marked[(triton.cdiv(self.num_tiles, _GROUP),)](
            self.words, self.bases, tiles.segment, tiles.offset, self.starts, self.scopes, self.histogram_of,
            self.thresholds, x, self.index, self.key, self.scope, self.histograms, self.num_tiles, _GROUP, WORDS, _BINS,
            _BIN_SHIFT,
        )  # fmt: skip
        _choose_edge[(scopes,)](
            self.first_tiles, self.bases, self.wanted, self.histogram_of, self.histograms, self.index, self.key,
            self.scratch, self.thresholds, self.shares, self.smallest, self.scope_counts, self.edges, self.last_ties,
            _CHUNK, _BINS, _BIN_SHIFT, num_warps=8,
        )  # fmt: skip
        chosen = (self.index, self.key, self.scope, self.edges, self.last_ties, self.bases, self.num_tiles)
        _count_accepted[(self.num_blocks,)](*chosen, self.block_counts, _BLOCK)
        _write_accepted[(self.num_blocks,)](
            *chosen, self.block_counts, x, self.indices, self.values, self.total, _BLOCK,
            triton.next_power_of_2(self.num_blocks),
        )  # fmt: skip
        return self.indices, self.values


def accumulate(
    parts: Sequence[Tensor],
    segments: Segments,
    velocity: Tensor | None,
    residual: Tensor,
    search: Search | None,
    capacity: int = 0,
    flag: Tensor | None = None,
) -> Search | None:
    """The reference's accumulate in one pass, which marks what the search will need and returns it.

    An element that is not finite counts as zero, so that it never enters the memory, and raises the flag.
    """
    device = residual.device
    numels = tuple(part.numel() for part in parts)
    tiles: Tiles = tiles_of(numels, device)
    if search is not None:
        search.cleared.zero_()
    if flag is None:
        flag = torch.zeros(1, dtype=torch.int32, device=device)
    nothing = cached((0,) * len(parts), torch.int32, device)
    _accumulate[(tiles.total,)](
        tiles.segment, tiles.offset, pointers(parts, device), pointers(segments.weights, device),
        cached(segments.starts, torch.int32, device), cached(numels, torch.int32, device),
        cached(segments.momentum, torch.float32, device), cached(segments.decay, torch.float32, device),
        cached(tuple(map(int, segments.nesterov)), torch.int32, device),
        search.scopes if search else nothing, search.thresholds if search else residual,
        velocity if velocity is not None else residual, residual, search.words if search else nothing,
        search.tile_counts if search else nothing, search.scope_counts if search else nothing, flag,
        velocity is not None, search is not None, TILE, num_warps=8,
    )  # fmt: skip
    return search
