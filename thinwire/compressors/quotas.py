"""How many entries each tensor may send: k of every scope of a layout."""

from __future__ import annotations

import math
from functools import lru_cache

from thinwire.engine.layout import Layout
from thinwire.engine.payloads import Spread

SCOPES = ("balanced", "tensor", "model", "chunk")
CHUNK = 4096  # consecutive elements of a tensor, in memory order; the last chunk of a tensor may be shorter


def entries_kept(density: float, numel: int) -> int:
    """k = max(1, round(density * numel)), 0 of an empty vector."""
    return max(1, round(density * numel)) if numel else 0


def quotas(scope: str, density: float, layout: Layout) -> list[int]:
    """k of every coded tensor, or with "model" of all together, in one list.

    "tensor" gives each the same share of its elements. "balanced" gives it c sqrt(n) of its n, at most all, with one c
    for the whole model that makes the sum what "tensor" sends. Why the square root: layers whose gradients have equal
    norms have elements of a size of 1 / sqrt(n), so that of a small one more are among the model's largest. "chunk"
    gives each chunk of a tensor the same share.
    """
    if scope == "model":
        return [entries_kept(density, layout.coded_numel)]
    numels = [segment.numel for segment in layout.coded]
    if scope == "tensor":
        return [entries_kept(density, numel) for numel in numels]
    if scope == "chunk":
        k = entries_kept(density, CHUNK)
        return [numel // CHUNK * k + entries_kept(density, numel % CHUNK) for numel in numels]
    rate = balanced_rate(density, layout.coded_sizes)
    return [max(1, round(min(numel, rate * math.sqrt(numel)))) if numel else 0 for numel in numels]


def spread_of(scope: str, layout: Layout, entries: list[int]) -> Spread:
    """What a frame's length must know of the quotas besides their sum: (elements, entries) of every tensor where they
    send different shares."""
    return tuple(zip((s.numel for s in layout.coded), entries, strict=True)) if scope == "balanced" else ()


@lru_cache(maxsize=64)
def balanced_rate(density: float, sizes: tuple[int, ...]) -> float:
    """Return the c for which sum(min(n, c sqrt(n))) over the sizes n, the smallest first, is density * sum(n)."""
    left = density * sum(sizes)
    ascending = [numel for numel in sizes if numel]
    roots_left = math.fsum(math.sqrt(numel) for numel in ascending)
    for numel in ascending:  # the smallest is the first to be sent whole
        if left <= math.sqrt(numel) * roots_left:
            break
        left -= numel
        roots_left -= math.sqrt(numel)
    else:
        return math.inf
    return left / roots_left
