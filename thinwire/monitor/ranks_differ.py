"""Telling a training whose ranks do not do the same: learning rates that differ, a state that one rank saves alone.

Every rank's numbers travel with the comparison of the ranks' pace. Nothing of this takes part in a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, nan

from thinwire.engine.context import Hyper

NAMES = ("learning rates", "momentum", "weight decay")
UNKNOWN = [nan] * (len(NAMES) + 1)  # of a rank that takes no steps any more
TOLERANCE = 1e-5  # relative: a float and a float32 tensor of it are alike
RATES = (
    "thinwire: ranks have different {}: on average over the parameters {:.6g} on rank {} and {:.6g} on rank {}, so "
    "their parameters differ from now on; set them alike on all ranks, a scheduler by a loss averaged over all ranks"
)
STATES = (
    "thinwire: wire.state_dict() was called on {} and not on the others, whose residuals are then in no checkpoint; to "
    "save one file call wire.state_dict(all_ranks=True) on every rank"
)


def numbers_of(hypers: Sequence[Hyper], states: int | None) -> list[float]:
    """What a rank tells: means over parameters, weighted by place, and how many states it gave away (None: they hold
    nothing)."""
    weights = range(1, len(hypers) + 1)
    total = sum(weights)
    columns = ([h.lr for h in hypers], [h.momentum for h in hypers], [h.weight_decay for h in hypers])
    means = [sum(w * x for w, x in zip(weights, column, strict=True)) / total for column in columns]
    return [*means, nan if states is None else float(states)]


class RanksDiffer:
    """Judges all ranks' numbers; says each thing once."""

    def __init__(self) -> None:
        self._told: set[str] = set()
        self._missing: list[int] = []  # ranks that had given no state at the comparison before, while others had
        self._sentences: list[str] = []

    def judge(self, everybody: Sequence[Sequence[float]]) -> None:  # a row per rank
        for place, name in enumerate(NAMES):
            known = {rank: row[place] for rank, row in enumerate(everybody) if isfinite(row[place])}
            low, high = min(known, key=known.__getitem__, default=0), max(known, key=known.__getitem__, default=0)
            if known and known[high] - known[low] > TOLERANCE * max(abs(known[high]), abs(known[low])):
                self._tell(name, RATES.format(name, known[low], low, known[high], high))
        saved = {rank: row[-1] for rank, row in enumerate(everybody) if isfinite(row[-1])}
        missing = [rank for rank, count in saved.items() if not count]
        some = [rank for rank, count in saved.items() if count]
        if some and missing and missing == self._missing:  # twice, because ranks may save one after the other
            who = f"rank {some[0]}" if len(some) == 1 else f"ranks {', '.join(map(str, some))}"
            self._tell("states", STATES.format(who))
        self._missing = missing if some else []

    def _tell(self, what: str, sentence: str) -> None:
        if what not in self._told:
            self._told.add(what)
            self._sentences.append(sentence)

    def take_sentences(self) -> list[str]:
        """What there is to say, once."""
        sentences, self._sentences = self._sentences, []
        return sentences
