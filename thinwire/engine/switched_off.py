"""Options of some of an optimizer's parameters that are 0 while its ``step()`` runs."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch

Group = dict[str, Any]


class SwitchedOff:
    """From when it is made until ``restore`` these options are 0 for the parameters with these ids.

    Where a group has other parameters as well, those are in a group of their own for the time.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, options: Sequence[str], ids: Container[int]) -> None:
        self._optimizer = optimizer
        self._saved: dict[int, tuple[Group, Group]] = {}  # a group and what it had, by the group's id
        self._apart: list[Group] = []
        for group in optimizer.param_groups:
            off = [parameter for parameter in group["params"] if id(parameter) in ids]
            if off:
                self._switch_off(group, options, off, [p for p in group["params"] if id(p) not in ids])
        optimizer.param_groups.extend(self._apart)

    def _switch_off(self, group: Group, options: Sequence[str], off: list[Any], others: list[Any]) -> None:
        saved = {key: group[key] for key in options}
        if others:
            self._apart.append({**group, "params": others})
            saved["params"] = group["params"]
            group["params"] = off
        self._saved[id(group)] = group, saved
        group.update(dict.fromkeys(options, 0.0))

    def as_it_was(self, group: Mapping[str, Any]) -> Mapping[str, Any]:
        """A group with the user's own options."""
        _, saved = self._saved.get(id(group), ({}, {}))
        return {**group, **saved}

    def restore(self) -> None:
        """Put everything back; groups that are not the optimizer's any more change nothing."""
        for group, saved in self._saved.values():
            group.update(saved)
        apart = set(map(id, self._apart))
        self._optimizer.param_groups[:] = [g for g in self._optimizer.param_groups if id(g) not in apart]
