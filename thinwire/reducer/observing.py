"""What ranks tell each other about their training, besides gradients, and whether an optimizer must be seen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thinwire.monitor.ranks_differ import numbers_of

if TYPE_CHECKING:
    from thinwire.reducer.reducer import Reducer


def numbers_to_compare(reducer: Reducer) -> list[float]:
    """What all ranks should have alike now, as they compare it every so many steps."""
    hypers = list(reducer.view.hypers().values())
    return numbers_of(hypers, reducer.progress.states if reducer.running.keeps else None)


def needs_its_optimizer(reducer: Reducer) -> bool:
    """Whether anything depends on the steps of the optimizer that was given: another one would not do as well."""
    if reducer.skipper is not None or reducer.monitors.check_every is not None:
        return True
    return reducer.running.keeps or reducer.method.averaging_interval is not None
