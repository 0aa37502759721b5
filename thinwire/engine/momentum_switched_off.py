"""Options of some of an optimizer's parameters that are 0 while its ``step()`` runs."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch

Group = dict[str, Any]


class SwitchedOff:
    """From when it is made until ``restore`` each of these options is 0 for the parameters with its ids.

    Where a group has other parameters as well, those are in groups of their own for the time.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, options: Mapping[str, Container[int]]) -> None:
        self._optimizer = optimizer
        self._saved: dict[int, tuple[Group, Group]] = {}  # a group and what the user's had, by the group's id
        self._apart: list[Group] = []
        for group in optimizer.param_groups:
            alike: dict[tuple[str, ...], list[Any]] = {}
            for parameter in group["params"]:
                off = tuple(option for option, ids in options.items() if id(parameter) in ids)
                alike.setdefault(off, []).append(parameter)
            self._switch_off(group, list(alike.items()))
        optimizer.param_groups.extend(self._apart)

    def _switch_off(self, group: Group, alike: Sequence[tuple[tuple[str, ...], list[Any]]]) -> None:
        own = dict(group)
        for place, (off, parameters) in enumerate(alike):
            part = group if place == 0 else dict(own)
            part.update(dict.fromkeys(off, 0.0))
            if len(alike) > 1:
                part["params"] = parameters
            self._saved[id(part)] = part, {option: own[option] for option in (*off, "params")}
            if place:
                self._apart.append(part)

    def as_it_was(self, group: Mapping[str, Any]) -> Mapping[str, Any]:
        """A group with the user's own options."""
        _, saved = self._saved.get(id(group), (group, {}))
        return {**group, **saved}

    def restore(self) -> None:
        """Put everything back; groups that are not the optimizer's any more change nothing."""
        for group, saved in self._saved.values():
            group.update(saved)
        apart = set(map(id, self._apart))
        self._optimizer.param_groups[:] = [g for g in self._optimizer.param_groups if id(g) not in apart]
