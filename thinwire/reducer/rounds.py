"""What a reducer asks of an edge whose ranks take optimizer steps alone between two exchanges."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol


class Rounds(Protocol):
    """Ranks may be a step apart, where a GradScaler passed over one of some of them: so they meet before they do
    anything together."""

    @property
    def in_round(self) -> int:
        """Steps since the ranks were equal."""
        ...

    @property
    def kinds(self) -> Collection[str]:
        """Of the vectors in its state."""
        ...

    @property
    def count(self) -> int:
        """Rounds so far."""
        ...

    @property
    def distance(self) -> float | None:
        """How far ranks went in the last one (``Stats.round_distance``)."""
        ...

    def meet(self, what: str) -> None:
        """Take part in the rounds that other ranks still make, until all of them want to do ``what``; collective."""
        ...

    def end(self) -> None:
        """Make all ranks equal, where they are not; collective, behind ``meet``."""
        ...

    def showing_mean(self) -> AbstractContextManager[None]:
        """The ranks' mean is in the parameters for the time of the block; collective, behind ``meet``."""
        ...

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Flat vectors and counters, by kind and name."""
        ...

    def load_state_dict(self, state: Mapping[str, Any], *, anew: bool) -> None:
        """Go on from there, or begin a round ``anew`` in a group that is not the one that saved."""
        ...
