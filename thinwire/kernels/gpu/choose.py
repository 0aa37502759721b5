"""The k largest of the candidates of every scope, exactly, and what the next step will look for."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _count_reaching(keys, start, count, edge, CHUNK: tl.constexpr):
    total = start * 0
    for chunk in range(0, count, CHUNK):
        i = chunk + tl.arange(0, CHUNK)
        key = tl.load(keys + start + i, mask=i < count, other=-1)
        total += tl.sum((key >= edge).to(tl.int32), axis=0)
    return total


@triton.jit
def choose_edge(
    first_tiles, bases, wanted, histogram_of, bins, needs, list_counts, list_key, list_index, candidate_key,
    candidate_index, thresholds, shares, smallest, scope_counts, edges, last_ties,
    CHUNK: tl.constexpr, BINS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Find every scope's exact threshold among its candidates, and the threshold to carry to the next step."""
    scope = tl.program_id(0)
    k = tl.load(wanted + scope)
    start = tl.load(bases + tl.load(first_tiles + scope))
    count = tl.load(bases + tl.load(first_tiles + scope + 1)) - start
    threshold = tl.load(thresholds + scope)
    row = tl.load(histogram_of + scope)
    i = tl.arange(0, CHUNK)
    # What to look at: all candidates, or those of the bin in which the k-th largest lies; and how many to take of them.
    keys, indices, need = candidate_key, candidate_index, k
    edge, highest = start * 0, start * 0 + 30
    if row >= 0:
        keys, indices = list_key, list_index
        need, count = tl.load(needs + row), tl.load(list_counts + row)
        bin = tl.load(bins + row)
        if (bin > 0) & (bin < BINS - 1):
            # Its keys differ in a few low bits, once the bin's lower edge is taken away.
            edge, highest = threshold.to(tl.int32, bitcast=True) + (bin << SHIFT), start * 0 + SHIFT - 1
    if count == need:  # all of them are taken, and none is tied with one that is not
        edge = start * 0 + 0x7FFFFFFF
        for chunk in range(0, count, CHUNK):
            key = tl.load(keys + start + chunk + i, mask=chunk + i < count, other=0x7FFFFFFF)
            edge = tl.minimum(edge, tl.min(key, axis=0))
        above, ties = start * 0, need
    elif count <= CHUNK:
        key = tl.load(keys + start + i, mask=i < count, other=-1)
        for bit in range(highest, -1, -1):
            trial = edge + (1 << bit)
            edge = tl.where(tl.sum((key >= trial).to(tl.int32), axis=0) >= need, trial, edge)
        above = tl.sum((key > edge).to(tl.int32), axis=0)
        ties = tl.sum((key == edge).to(tl.int32), axis=0)
    else:
        for bit in range(highest, -1, -1):
            trial = edge + (1 << bit)
            edge = tl.where(_count_reaching(keys, start, count, trial, CHUNK) >= need, trial, edge)
        above = _count_reaching(keys, start, count, edge + 1, CHUNK)
        ties = _count_reaching(keys, start, count, edge, CHUNK) - above
    last_tie = start * 0 + 0x7FFFFFFF
    if above + ties > need:  # ties go to the lower index: find the last index that is taken
        last_tie = start * 0
        for bit in range(30, -1, -1):
            trial = last_tie | (1 << bit)
            before = start * 0
            for chunk in range(0, count, CHUNK):
                here = chunk + i < count
                key = tl.load(keys + start + chunk + i, mask=here, other=-1)
                index = tl.load(indices + start + chunk + i, mask=here, other=0x7FFFFFFF)
                before += tl.sum(((key == edge) & (index < trial)).to(tl.int32), axis=0)
            last_tie = tl.where(before < need - above, trial, last_tie)
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
def count_accepted(
    candidate_index, candidate_key, candidate_scope, edges, last_ties, bases, num_tiles, block_counts,
    BLOCK: tl.constexpr,
):  # fmt: skip
    accepted, _ = _accepted(candidate_index, candidate_key, candidate_scope, edges, last_ties, bases, num_tiles, BLOCK)
    tl.store(block_counts + tl.program_id(0), tl.sum(accepted.to(tl.int32), axis=0))


@triton.jit
def write_accepted(
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
