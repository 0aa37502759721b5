"""Which parameters travel together where that changes the result: cut by the model alone, never by DDP's buckets."""

from __future__ import annotations

from collections.abc import Sequence

FIRST_NBYTES, LATER_NBYTES = 1 << 20, 25 << 20  # DDP's own sizes: with them its buckets and these groups mostly agree


def fixed_groups(numels: Sequence[int]) -> list[tuple[int, ...]]:
    """Cut the parameters, the last one first, as backward mostly finishes them; a group ends when it is full.

    ``numels`` are sizes by ordinal; the groups hold ordinals.
    """
    groups: list[tuple[int, ...]] = []
    group: list[int] = []
    nbytes = 0
    for ordinal in reversed(range(len(numels))):
        group.append(ordinal)
        nbytes += 4 * numels[ordinal]
        if nbytes >= (LATER_NBYTES if groups else FIRST_NBYTES):
            groups.append(tuple(group))
            group, nbytes = [], 0
    return [*groups, tuple(group)] if group else groups
