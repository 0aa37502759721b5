"""Which optimizers a training has, seen through their wrappers, and which of them owns which parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def seen_through(optimizer: Any) -> Any:
    """The optimizer inside of wrappers that hand step() on and hold it as ``.optimizer``: Accelerate's, Lightning's."""
    seen: set[int] = set()
    while id(optimizer) not in seen:
        seen.add(id(optimizer))
        inner = getattr(optimizer, "optimizer", None)
        if _is_wrapped(optimizer, inner):
            optimizer = inner
    return optimizer


def _is_wrapped(outer: Any, inner: Any) -> bool:
    """Whether ``outer`` only hands on what ``inner`` does. An optimizer that has groups of its own, such as one of
    half-precision weights around one of their full-precision copies, is more than that."""
    if not hasattr(inner, "param_groups") or not hasattr(inner, "step"):
        return False
    return not isinstance(outer, Optimizer) or outer.param_groups is inner.param_groups


def optimizers_of(given: Any) -> tuple[Optimizer, ...]:
    """The optimizers that were given, one or a list of them, without wrappers; a ValueError where one is none."""
    several = isinstance(given, Sequence) and not isinstance(given, (str, bytes))
    found = tuple(seen_through(one) for one in (given if several else [given]))
    for one in found:
        if not isinstance(one, Optimizer):
            what = f"a list with a {type(one).__name__}" if several else type(one).__name__
            raise ValueError(
                f"optimizer must be a torch optimizer, not {what}; give the one that steps the model, or a list of them"
            )
    if not found:
        raise ValueError("the list of optimizers is empty; give those that step the model's parameters")
    if len({id(one) for one in found}) < len(found):
        raise ValueError("the list of optimizers has one of them twice; give each of them once")
    return found


def owners_of(optimizers: Sequence[Optimizer], parameters: Mapping[str, Tensor]) -> dict[str, Optimizer]:
    """The optimizer of every parameter, by name; a ValueError where one has none or two."""
    owners: dict[int, Optimizer] = {}
    names = {id(parameter): name for name, parameter in parameters.items()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                before = owners.setdefault(id(parameter), optimizer)
                if before is not optimizer and id(parameter) in names:
                    kinds = f"{type(before).__name__} and {type(optimizer).__name__}"
                    raise ValueError(
                        f"parameter {names[id(parameter)]!r} is in two of the optimizers, {kinds}; leave it to one"
                    )
    missing = [name for name, parameter in parameters.items() if id(parameter) not in owners]
    if missing:
        whose = "the optimizer does not" if len(optimizers) == 1 else f"the {len(optimizers)} optimizers do not"
        raise ValueError(
            f"{whose} own {len(missing)} of the model's {len(parameters)} parameters, the first is {missing[0]!r}; "
            f"build the optimizer{'s together' if len(optimizers) > 1 else ''} from model.parameters()"
        )
    return {name: owners[id(parameter)] for name, parameter in parameters.items()}


class SharedStep:
    """Counts the steps of several optimizers as one where no backward pass lies between them.

    A step begins with the first optimizer that steps behind a backward pass, or with one that steps again. It is over
    when all have stepped, or when the next one begins.
    """

    def __init__(self) -> None:
        self._stepped: set[int] = set()  # ids of the optimizers, in the step that is open
        self._passes = -1  # that were exchanged when it began

    def has_all(self, optimizers: Sequence[Optimizer]) -> bool:
        """Whether all of these have stepped in the step that is open."""
        return all(id(optimizer) in self._stepped for optimizer in optimizers)

    def begins_with(self, optimizer: Optimizer, passes: int) -> bool:
        """Whether this optimizer's step would begin one, after so many ``passes``."""
        return passes != self._passes or id(optimizer) in self._stepped

    def stepped(self, optimizer: Optimizer, passes: int) -> bool:
        """Take note of an optimizer's step; return whether it began one."""
        begins = self.begins_with(optimizer, passes)
        if begins:
            self._stepped, self._passes = set(), passes
        self._stepped.add(id(optimizer))
        return begins
