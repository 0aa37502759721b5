"""Telling a script that goes on with another optimizer than the one that was given to attach."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch.optim import Optimizer

from thinwire.monitor.user_warning import warn_user

SENTENCE = (
    "thinwire: another optimizer steps the model's parameters than the one that was given to attach, whose learning "
    "rates and momentum stay the ones in use; after a change of the optimizer call wire.detach() and attach again"
)


class OtherOptimizerWarning:
    """Warns once. An optimizer around an attached one, and one inside of it, are parts of it."""

    def __init__(self) -> None:
        self.matters = False  # whether the method in use needs to know the optimizer
        self._told = False

    def stepped(self, own: Collection[Optimizer], other: Optimizer) -> None:
        """``other`` made a step with parameters that ``own`` have."""
        if not self.matters or self._told or any(_has(one, other) or _has(other, one) for one in own):
            return
        self._told = True
        warn_user(SENTENCE)


def _has(outer: Optimizer, inner: Optimizer) -> bool:
    return any(value is inner for value in _values(vars(outer)))


def _values(attributes: dict[str, Any]) -> Iterator[Any]:
    """Attributes, and what lies in those that are lists or dictionaries; not the hooks, states and groups."""
    for name, value in attributes.items():
        if name in ("state", "param_groups"):
            continue
        yield value
        if isinstance(value, (list, tuple)):
            yield from value
        elif isinstance(value, dict):
            yield from value.values()
