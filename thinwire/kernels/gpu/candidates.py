"""From marks to candidates: whole scopes are searched where marks do not help, the rest is gathered in order."""

from __future__ import annotations

import triton
import triton.language as tl

from thinwire.kernels.gpu.bits import bits_of, pack, popcount


@triton.jit
def _is_lost(scope, wanted, capacities, scope_counts):
    found = tl.load(scope_counts + scope)
    return (found < tl.load(wanted + scope)) | (found > tl.load(capacities + scope))


@triton.jit
def tally_lost(
    large, first_tiles, tile_segment, tile_offset, starts, numels, wanted, capacities, scope_counts, residual, tallies,
    TILE: tl.constexpr,
):  # fmt: skip
    """Count the magnitudes of large scopes whose marks do not help, in 2,048 bins of an eighth of a power of two."""
    row = tl.program_id(0)
    scope = tl.load(large + row)
    if not _is_lost(scope, wanted, capacities, scope_counts):
        return
    i = tl.arange(0, TILE)
    count = tl.zeros((2048,), tl.int32)
    first, last = tl.load(first_tiles + scope), tl.load(first_tiles + scope + 1)
    for tile in range(first + tl.program_id(1), last, tl.num_programs(1)):
        segment, offset = tl.load(tile_segment + tile), tl.load(tile_offset + tile)
        inside = i < tl.load(numels + segment) - offset
        key = bits_of(tl.load(residual + tl.load(starts + segment) + offset + i, mask=inside, other=0.0))
        count += tl.histogram(key >> 20, 2048, mask=inside)
    tl.atomic_add(tallies + row * 2048 + tl.arange(0, 2048), count, mask=count > 0)


@triton.jit
def lower_thresholds(large, wanted, capacities, scope_counts, tallies, new_thresholds, new_counts):
    """The lower edge of the bin in which the k-th largest lies: a threshold that enough elements reach."""
    row = tl.program_id(0)
    scope = tl.load(large + row)
    k = tl.load(wanted + scope)
    if not _is_lost(scope, wanted, capacities, scope_counts):
        return
    bins = tl.arange(0, 2048)
    count = tl.load(tallies + row * 2048 + bins)
    reaching = tl.sum(count, axis=0) - tl.cumsum(count, axis=0) + count
    bin = tl.sum((reaching >= k).to(tl.int32), axis=0) - 1
    tl.store(new_thresholds + row, bin << 20)
    tl.store(new_counts + row, tl.sum(tl.where(bins == bin, reaching, 0), axis=0))


@triton.jit
def mark_again(
    large, first_tiles, tile_segment, tile_offset, starts, numels, wanted, capacities, scope_counts, residual,
    new_thresholds, new_counts, words, tile_counts, TILE: tl.constexpr,
):  # fmt: skip
    """Mark what reaches the lower threshold, where that is not too much."""
    row = tl.program_id(0)
    scope = tl.load(large + row)
    if not _is_lost(scope, wanted, capacities, scope_counts):
        return
    if tl.load(new_counts + row) > tl.load(capacities + scope):
        return
    i = tl.arange(0, TILE)
    edge = tl.load(new_thresholds + row)
    first, last = tl.load(first_tiles + scope), tl.load(first_tiles + scope + 1)
    for tile in range(first + tl.program_id(1), last, tl.num_programs(1)):
        segment, offset = tl.load(tile_segment + tile), tl.load(tile_offset + tile)
        inside = i < tl.load(numels + segment) - offset
        key = bits_of(tl.load(residual + tl.load(starts + segment) + offset + i, mask=inside, other=0.0))
        marked = inside & (key >= edge)
        tl.store(words + tile * (TILE // 32) + tl.arange(0, TILE // 32), pack(marked, TILE))
        tl.store(tile_counts + tile, tl.sum(marked.to(tl.int32), axis=0))


@triton.jit
def rescue(
    first_tiles, wanted, capacities, scope_counts, histogram_of, new_counts, tile_segment, tile_offset, starts, numels,
    residual, words, tile_counts, TILE: tl.constexpr,
):  # fmt: skip
    """Search a whole scope whose marks do not help: four rounds of eight bits find the exact threshold.

    One program does it alone, so this is for small scopes, and for large ones with more ties than there is room for.
    """
    scope = tl.program_id(0)
    k = tl.load(wanted + scope)
    row = tl.load(histogram_of + scope)
    if not _is_lost(scope, wanted, capacities, scope_counts):
        return
    if row >= 0:
        if tl.load(new_counts + row) <= tl.load(capacities + scope):
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
            key = bits_of(tl.load(residual + tl.load(starts + segment) + offset + i, mask=inside, other=0.0))
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
        key = bits_of(tl.load(residual + tl.load(starts + segment) + offset + i, mask=inside, other=0.0))
        tie = inside & (key == edge)
        marked = (inside & (key > edge)) | (tie & (ties + tl.cumsum(tie.to(tl.int32), axis=0) <= need))
        ties += tl.sum(tie.to(tl.int32), axis=0)
        tl.store(words + tile * (TILE // 32) + tl.arange(0, TILE // 32), pack(marked, TILE))
        tl.store(tile_counts + tile, tl.sum(marked.to(tl.int32), axis=0))


@triton.jit
def running_sums(counts, bases, total, BLOCK: tl.constexpr):
    """bases[i] = sum of counts before i; bases[total] = the sum of all."""
    before = tl.zeros((), tl.int32)
    for start in range(0, total, BLOCK):
        i = start + tl.arange(0, BLOCK)
        count = tl.load(counts + i, mask=i < total, other=0)
        tl.store(bases + i, before + tl.cumsum(count, axis=0) - count, mask=i < total)
        before += tl.sum(count, axis=0)
    tl.store(bases + total, before)


@triton.jit
def gather_marked(
    words, bases, tile_segment, tile_offset, starts, scopes, candidate_index, candidate_scope, num_tiles,
    GROUP: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Write the flat index and the scope of every marked element, in order."""
    tile = tl.program_id(0) * GROUP + tl.arange(0, GROUP)  # (GROUP,)
    inside = tile < num_tiles
    word = tl.load(words + tile[:, None] * WORDS + tl.arange(0, WORDS)[None, :], mask=inside[:, None], other=0)
    segment = tl.load(tile_segment + tile, mask=inside, other=0)
    scope = tl.load(scopes + segment, mask=inside, other=0)
    flat = tl.load(starts + segment, mask=inside, other=0) + tl.load(tile_offset + tile, mask=inside, other=0)
    base = tl.load(bases + tile, mask=inside, other=0)
    count = popcount(word)
    place = base[:, None] + tl.cumsum(count, axis=1) - count  # (GROUP, WORDS)
    left = flat[:, None] + tl.arange(0, WORDS)[None, :] * 32
    scope2 = tl.broadcast_to(scope[:, None], (GROUP, WORDS))
    while tl.max(tl.max((word != 0).to(tl.int32), axis=1), axis=0) != 0:
        some = word != 0
        tl.store(candidate_index + place, left + popcount((word & -word) - 1), mask=some)
        tl.store(candidate_scope + place, scope2, mask=some)
        place += some.to(tl.int32)
        word = word & (word - 1)


@triton.jit
def read_keys(
    candidate_index, candidate_scope, candidate_key, bases, num_tiles, histogram_of, thresholds, residual, histograms,
    BLOCK: tl.constexpr, BINS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Fetch the candidates' magnitudes; those of large scopes are counted in bins above the scope's threshold."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < tl.load(bases + num_tiles)
    index = tl.load(candidate_index + i, mask=inside, other=0)
    scope = tl.load(candidate_scope + i, mask=inside, other=0)
    key = bits_of(tl.load(residual + index, mask=inside, other=0.0))
    tl.store(candidate_key + i, key, mask=inside)
    row = tl.load(histogram_of + scope, mask=inside, other=-1)
    bin = _bin_of(key, tl.load(thresholds + scope, mask=inside, other=0.0), BINS, SHIFT)
    tl.atomic_add(histograms + row * BINS + _slot(bin, BINS), 1, mask=inside & (row >= 0))


@triton.jit
def _bin_of(key, threshold, BINS: tl.constexpr, SHIFT: tl.constexpr):
    return tl.minimum(tl.maximum(key - threshold.to(tl.int32, bitcast=True), 0) >> SHIFT, BINS - 1)


@triton.jit
def _slot(bin, BINS: tl.constexpr):
    """Where a bin is counted: neighbours, the busy ones, in different lines of the cache."""
    return (bin * 2531) & (BINS - 1)


@triton.jit
def find_bins(large, wanted, histograms, bins, needs, BINS: tl.constexpr):
    """In which bin of a large scope the k-th largest lies, and how many of that bin are wanted."""
    row = tl.program_id(0)
    k = tl.load(wanted + tl.load(large + row))
    histogram = tl.load(histograms + row * BINS + _slot(tl.arange(0, BINS), BINS))
    reaching = tl.sum(histogram, axis=0) - tl.cumsum(histogram, axis=0) + histogram  # in this bin or above
    bin = tl.sum((reaching >= k).to(tl.int32), axis=0) - 1
    at = tl.arange(0, BINS) == bin
    tl.store(bins + row, bin)
    tl.store(needs + row, k - tl.sum(tl.where(at, reaching - histogram, 0), axis=0))


@triton.jit
def collect_bins(
    candidate_index, candidate_scope, candidate_key, bases, num_tiles, first_tiles, histogram_of, thresholds, bins,
    list_counts, list_key, list_index, BLOCK: tl.constexpr, BINS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Copy the candidates in their scope's bin to the front of that scope's stretch, in any order."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < tl.load(bases + num_tiles)
    scope = tl.load(candidate_scope + i, mask=inside, other=0)
    row = tl.load(histogram_of + scope, mask=inside, other=-1)
    here = inside & (row >= 0)
    key = tl.load(candidate_key + i, mask=here, other=0)
    bin = _bin_of(key, tl.load(thresholds + scope, mask=here, other=0.0), BINS, SHIFT)
    here = here & (bin == tl.load(bins + row, mask=here, other=-1))
    place = tl.atomic_add(list_counts + row, 1, mask=here)
    place += tl.load(bases + tl.load(first_tiles + scope, mask=here, other=0), mask=here, other=0)
    tl.store(list_key + place, key, mask=here)
    tl.store(list_index + place, tl.load(candidate_index + i, mask=here, other=0), mask=here)
