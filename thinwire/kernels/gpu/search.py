"""Accumulation and exact top-k of many segments in one pass over memory, without a word to the host.

The pass that adds the gradient marks every element that reaches the threshold carried over from the last step: one bit
an element. A segment whose marks are too few or too many is searched as a whole; otherwise the marked ones, about twice
as many as wanted, are gathered in order and the k largest of them are chosen. The choice is exact in either case.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from thinwire.kernels.gpu.accumulate import accumulate_tiles
from thinwire.kernels.gpu.candidates import (
    collect_bins,
    find_bins,
    gather_marked,
    lower_thresholds,
    mark_again,
    read_keys,
    rescue,
    running_sums,
    tally_lost,
)
from thinwire.kernels.gpu.choose import choose_edge, count_accepted, write_accepted
from thinwire.kernels.gpu.cuda_graphs import Recorder
from thinwire.kernels.gpu.tables import TILE, WORDS, Tiles, cached, pointers, tiles_of
from thinwire.kernels.reference import Segments, rescale

_CHUNK = 4096  # candidates that one program holds in registers
_BLOCK = 1024  # candidates that one program passes over
_GROUP = 8  # tiles whose marks one program gathers
_BINS = 8192
_BIN_SHIFT = 11  # a bin is 2**11 neighbouring floats wide: all of them together span a factor of four
_TALLIES = 2048  # coarse bins over all magnitudes
_HELPERS = 64  # programs that search one large scope together
_BITE = 512


class Search:
    """The exact top-k of the scopes of one layout, and the thresholds that are carried from step to step.

    A scope is a run of coded segments: every one of them alone (DGC) or all together (gTop-k). ``wanted`` holds k of
    each scope. The scopes lie one after the other at the front of the flat vector. After ``accumulate``, ``indices``,
    rising, and ``values`` hold what was chosen, until the next step.
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
        self.large = cached(tuple(large) or (0,), torch.int32, device)
        self.num_large = len(large)
        self.histogram_of = cached(tuple(rows.get(s, -1) for s in range(scopes)), torch.int32, device)
        self.capacity = sum(capacities)
        self.num_blocks = max(1, -(-self.capacity // _BLOCK))
        self.sums_block = min(32768, max(1024, triton.next_power_of_2(self.num_tiles)))
        self.thresholds = torch.full((scopes,), float("inf"), dtype=torch.float32, device=device)
        self.shares = torch.full((scopes,), 0.95, dtype=torch.float32, device=device)
        self.smallest = torch.zeros(scopes, dtype=torch.float32, device=device)

        def ints(count: int) -> Tensor:
            return torch.zeros(max(count, 1), dtype=torch.int32, device=device)

        # Cleared together at the start of a step: the flag, counts of marks a scope, lengths of lists, histograms.
        number = len(large)
        self.cleared = ints(1 + scopes + number + (_BINS + _TALLIES) * number)
        self.flag, self.scope_counts = self.cleared[:1], self.cleared[1 : 1 + scopes]
        self.list_counts = self.cleared[1 + scopes : 1 + scopes + number]
        self.histograms = self.cleared[1 + scopes + number :][: _BINS * number]
        self.tallies = self.cleared[1 + scopes + number + _BINS * number :]
        self.new_thresholds, self.new_counts = ints(number), ints(number)
        self.bins, self.needs = ints(number), ints(number)
        self.words = ints(self.tiles.total * WORDS)  # with those of the dense tail, which stay empty
        self.tile_counts, self.bases = ints(self.num_tiles), ints(self.num_tiles + 1)
        self.edges, self.last_ties, self.block_counts = ints(scopes), ints(scopes), ints(self.num_blocks)
        self.index, self.key, self.scope = (ints(self.capacity) for _ in range(3))
        self.list_key, self.list_index = (ints(self.capacity if large else 0) for _ in range(2))
        self.recorder: Recorder[Search] = Recorder(device)
        self.indices = torch.zeros(self.total, dtype=torch.int64, device=device)
        self.values = torch.zeros(self.total, dtype=torch.float32, device=device)

    def choose(self, x: Tensor) -> None:
        """Launch everything between the marks and the chosen entries."""
        tiles, scopes, grid = self.tiles, self.num_scopes, (self.num_blocks,)
        where = (tiles.segment, tiles.offset, self.starts, self.numels)
        lost = (self.wanted, self.capacities, self.scope_counts)
        if self.num_large:
            sharing = (self.num_large, _HELPERS)
            tally_lost[sharing](self.large, self.first_tiles, *where, *lost, x, self.tallies, TILE, num_warps=8)
            lower_thresholds[(self.num_large,)](self.large, *lost, self.tallies, self.new_thresholds, self.new_counts)
            mark_again[sharing](
                self.large, self.first_tiles, *where, *lost, x, self.new_thresholds, self.new_counts, self.words,
                self.tile_counts, TILE, num_warps=8,
            )  # fmt: skip
        rescue[(scopes,)](
            self.first_tiles, *lost, self.histogram_of, self.new_counts, *where, x, self.words, self.tile_counts, TILE,
            num_warps=8,
        )  # fmt: skip
        running_sums[(1,)](self.tile_counts, self.bases, self.num_tiles, self.sums_block, num_warps=32)
        gather_marked[(triton.cdiv(self.num_tiles, _GROUP),)](
            self.words, self.bases, tiles.segment, tiles.offset, self.starts, self.scopes, self.index, self.scope,
            self.num_tiles, _GROUP, WORDS,
        )  # fmt: skip
        read_keys[grid](
            self.index, self.scope, self.key, self.bases, self.num_tiles, self.histogram_of, self.thresholds, x,
            self.histograms, _BLOCK, _BINS, _BIN_SHIFT,
        )  # fmt: skip
        if self.num_large:
            find_bins[(self.num_large,)](self.large, self.wanted, self.histograms, self.bins, self.needs, _BINS)
            collect_bins[grid](
                self.index, self.scope, self.key, self.bases, self.num_tiles, self.first_tiles, self.histogram_of,
                self.thresholds, self.bins, self.list_counts, self.list_key, self.list_index, _BLOCK, _BINS, _BIN_SHIFT,
            )  # fmt: skip
        choose_edge[(scopes,)](
            self.first_tiles, self.bases, self.wanted, self.histogram_of, self.bins, self.needs, self.list_counts,
            self.list_key, self.list_index, self.key, self.index, self.thresholds, self.shares, self.smallest,
            self.scope_counts, self.edges, self.last_ties, _CHUNK, _BINS, _BIN_SHIFT, num_warps=8,
        )  # fmt: skip
        chosen = (self.index, self.key, self.scope, self.edges, self.last_ties, self.bases, self.num_tiles)
        count_accepted[grid](*chosen, self.block_counts, _BLOCK)
        write_accepted[grid](
            *chosen, self.block_counts, x, self.indices, self.values, self.total, _BLOCK,
            triton.next_power_of_2(self.num_blocks),
        )  # fmt: skip


def device_topk(
    starts: Sequence[int], numels: Sequence[int], scope_of: Sequence[int], wanted: Sequence[int], device: torch.device
) -> Search:
    return Search(starts, numels, scope_of, wanted, device)


def accumulate(
    parts: Sequence[Tensor],
    segments: Segments,
    velocity: Tensor | None,
    residual: Tensor,
    thresholds: Search | None,
    capacity: int = 0,
    flag: Tensor | None = None,
    ratios: Sequence[float] | None = None,
    room: None = None,
) -> Search | None:
    """The reference's accumulate in one pass (rescaling is a pass of its own); with a search, what it wants is chosen
    at once and lies in it.

    An element that is not finite counts as zero, so that it never enters the memory, and raises the flag: the search's
    own where there is one.
    """
    if ratios is not None:
        rescale(parts, segments, residual, ratios)
    search, device, numels = thresholds, residual.device, tuple(part.numel() for part in parts)
    tiles: Tiles = tiles_of(numels, device)
    if search is not None:
        flag = search.flag
    elif flag is None:
        flag = torch.zeros(1, dtype=torch.int32, device=device)
    nothing = cached((0,) * len(parts), torch.int32, device)
    arguments = (
        tiles.segment, tiles.offset, pointers(parts, device), pointers(segments.weights, device),
        cached(segments.starts, torch.int32, device), cached(numels, torch.int32, device),
        cached(segments.momentum, torch.float32, device), cached(segments.decay, torch.float32, device),
        cached(segments.applied, torch.float32, device),
        cached(tuple(map(int, segments.nesterov)), torch.int32, device),
        search.scopes if search else nothing, search.thresholds if search else residual,
        velocity if velocity is not None else residual, residual, search.words if search else nothing,
        search.tile_counts if search else nothing, search.scope_counts if search else nothing, flag,
        velocity is not None, search is not None, TILE, _BITE,
    )  # fmt: skip
    if search is None:
        accumulate_tiles[(tiles.total,)](*arguments, num_warps=8)
        return None

    def launch() -> Search:
        search.cleared.zero_()
        accumulate_tiles[(tiles.total,)](*arguments, num_warps=8)
        search.choose(residual)
        return search

    # The tables are cached by content, so equal contents have equal addresses.
    key = tuple(a.data_ptr() if isinstance(a, Tensor) else a for a in arguments)
    # The caller's own vectors come again at every step and are not held: only the tables are.
    tables = tuple(a for a in arguments if isinstance(a, Tensor) and a is not velocity and a is not residual)
    return search.recorder.run(key, launch, tables)[0]
