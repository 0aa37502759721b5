"""How far a training is."""

from __future__ import annotations

from dataclasses import dataclass, field

from thinwire.engine.exchange_parts import Clock


@dataclass
class Progress:
    """What a reducer counts: steps, passes and bytes."""

    step: int = 0  # exchanged, with those of the run whose state was loaded
    steps_before: int = 0  # of them were made by that run
    passes: int = 0  # that were exchanged here, also those that were passed over: the same on all ranks
    states: int = 0  # that this rank gave away
    optimizer_steps: int = 0
    dense_bytes: int = 0
    spent: Clock = field(default_factory=Clock)  # by the methods before the last switch
