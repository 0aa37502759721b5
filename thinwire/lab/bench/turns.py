"""Who steps when, and what a step is compared with: methods take turns step by step, always with a free one between.

The speed of a shared machine drifts by more than the differences that are to be seen. So every step of a method has a
step without communication right before it and right after it, and its share of the free speed is the mean of those two
times over its own. The median of such paired shares does not see a drift that is slower than two steps.
"""

from __future__ import annotations

from collections.abc import Sequence

FREE = 0  # the lane that sends nothing


def order_of(wanted: Sequence[int]) -> list[int]:
    """The lanes in the order of their steps, FREE before and after each: wanted[i] steps of lane i + 1.

    Lanes with fewer steps are spread over the whole time, and every cycle begins with another lane, so that none always
    follows the same one.
    """
    cycles, order = max(wanted, default=0), [FREE]
    for cycle in range(cycles):
        due = [n * (cycle + 1) // cycles > n * cycle // cycles for n in wanted]
        for place in range(len(wanted)):
            lane = (place + cycle) % len(wanted)
            if due[lane]:
                order += [lane + 1, FREE]
    return order


def shares_of(order: Sequence[int], seconds: Sequence[float]) -> dict[int, list[float]]:
    """By lane, each step's share of the free speed: the free steps' mean time before and after it, over its own.

    A free step is compared with the free ones nearest to it, two turns away: what that spreads is the noise of a pair.
    """
    found: dict[int, list[float]] = {lane: [] for lane in order}
    for turn, (lane, own) in enumerate(zip(order, seconds, strict=True)):
        distance = 2 if lane == FREE else 1
        beside = [seconds[at] for at in (turn - distance, turn + distance) if 0 <= at < len(order)]
        if beside:
            found[lane].append(sum(beside) / len(beside) / own)
    return found
