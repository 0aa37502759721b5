"""Several aggregators side by side, each with parameters of its own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from thinwire.engine.context import ExchangeContext
from thinwire.engine.exchange_parts import Clock
from thinwire.engine.layout import Layout
from thinwire.engine.named_state import KeptVector, StateKind
from thinwire.engine.norms import UNMEASURED, Measured
from thinwire.engine.protocols import Aggregator
from thinwire.engine.traffic_plan import Plan

ROOMS = ("memory", "collective")  # whose vectors and numbers belong to parameters


class Mixture:
    """One exchange becomes one of each member that has parameters in it, in the members' order, the same on all ranks.

    ``place_of`` gives a parameter's member; layouts come with ``of_methods``, one per member. State is that of all
    members together, by parameter name.
    """

    def __init__(self, members: Sequence[Aggregator], place_of: Callable[[str], int]) -> None:
        self.members, self.place_of = tuple(members), place_of
        self.whole_model = any(member.whole_model for member in members)
        # Joined by measured times, buckets of an fp32 all-reduce would be added up in another order on every run.
        self.fusible = all(member.fusible for member in members)
        self.kinds()  # raises where the members' states cannot lie side by side

    def member_of(self, name: str) -> Aggregator:
        return self.members[self.place_of(name)]

    @property
    def clock(self) -> Clock:
        clocks = [member.clock for member in self.members]
        return Clock(sum(one.compensating for one in clocks), sum(one.compressing for one in clocks))

    @property
    def frames_grow(self) -> bool:
        return any(member.frames_grow for member in self.members)

    @property
    def sums_by_place(self) -> bool:
        return any(member.sums_by_place for member in self.members)

    def _exchanges(self, layout: Layout) -> Iterator[tuple[Aggregator, Layout]]:
        assert layout.of_methods, "the layout of a mixture comes from its method"
        return ((one, own) for one, own in zip(self.members, layout.of_methods, strict=True) if own.segments)

    def plan(self, layout: Layout, size: int) -> Plan:
        return sum((member.plan(own, size) for member, own in self._exchanges(layout)), Plan())

    def waits(self, layout: Layout) -> float:
        return sum(member.waits(own) for member, own in self._exchanges(layout))

    def reduce(self, context: ExchangeContext, parts: Sequence[Tensor], norms: Measured = UNMEASURED) -> Measured:
        for member, layout in self._exchanges(context.layout):
            own, places = _part_of(context, layout)
            norms = member.reduce(own, [parts[place] for place in places], norms)
        return norms

    def residual_square_sum(self) -> float:
        return sum(member.residual_square_sum() for member in self.members)

    def leftover(self, numels: dict[str, int], rates: dict[str, float]) -> dict[str, Tensor]:
        return {name: rest for one in self.members for name, rest in one.leftover(numels, rates).items()}

    def kinds(self) -> dict[str, dict[str, StateKind]]:
        found: dict[str, dict[str, StateKind]] = {}
        for member in self.members:
            for room, kinds in member.kinds().items():
                _check_side_by_side(room, kinds, found.setdefault(room, {}))
                found[room].update(kinds)
        return found

    def vectors(self, numels: Mapping[str, int], coded: Collection[str]) -> Iterator[KeptVector]:
        for place, member in enumerate(self.members):
            yield from (one for one in member.vectors(numels, coded) if self.place_of(one.name) == place)

    def state_dict(self) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for member in self.members:
            for room, kinds in member.state_dict().items():
                for kind, values in kinds.items():
                    merged.setdefault(room, {}).setdefault(kind, {}).update(values)
        return merged

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for place, member in enumerate(self.members):
            member.load_state_dict({room: self._own(place, state.get(room, {})) for room in ROOMS})

    def _own(self, place: int, kinds: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """What a member's parameters have of this."""
        return {
            kind: {name: value for name, value in values.items() if self.place_of(name) == place}
            for kind, values in kinds.items()
        }


def _part_of(context: ExchangeContext, layout: Layout) -> tuple[ExchangeContext, list[int]]:
    """A context for the parameters of ``layout`` alone, and their places in the whole one."""
    place_of = {segment.ordinal: place for place, segment in enumerate(context.layout.segments)}
    places = [place_of[segment.ordinal] for segment in layout.segments]
    hypers = tuple(context.hypers[place] for place in places)
    weights = tuple(context.weights[place] for place in places) if context.weights else ()
    return ExchangeContext(layout, context.step, hypers, weights), places


def _check_side_by_side(room: str, kinds: Mapping[str, StateKind], others: Mapping[str, StateKind]) -> None:
    """Raise where a member's state could not be told from the others' by parameter and kind."""
    if kinds and room not in ROOMS:
        raise ValueError(f"a method that keeps a {room} of the whole model cannot be one of several; give it all of it")
    for name, kind in kinds.items():
        if others.get(name, kind) != kind:
            raise ValueError(f"two of the methods keep a {name!r} each that is redistributed in its own way; take one")
