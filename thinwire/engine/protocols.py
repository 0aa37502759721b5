"""The contracts of the engine's parts. Every registered part is tested against these docstrings."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from thinwire.engine.context import ExchangeContext
from thinwire.engine.flat_gradient import Gradient
from thinwire.engine.group_mean import Base, Result
from thinwire.engine.layout import Layout
from thinwire.engine.named_state import KeptVector, NamedState, StateKind
from thinwire.engine.nonfinite_alarm import Alarm
from thinwire.engine.norms import UNMEASURED, Measured
from thinwire.engine.payloads import Accepted
from thinwire.engine.topk_hint import Candidates, TopKHint
from thinwire.engine.traffic_plan import Budget, Plan
from thinwire.transport import Net


class Memory(Protocol):
    """Turns a gradient into what should be sent now, and keeps what was not.

    Over any run, the sum of everything accepted plus the residual equals the sum of everything that ``compensate``
    produced from gradients (conservation). State is kept by parameter name.

    A memory that ``watches`` lets nothing that is not finite into its state and sets the flag, where there is one;
    others are only given finite gradients.
    """

    state: NamedState
    watches: bool

    @property
    def keeps_residual(self) -> bool: ...

    def direct_decay(self, context: ExchangeContext) -> tuple[float, ...]:
        """Return how many times its weights are to be added to each coded segment's mean without being sent, 0 for the
        others; empty: never. What ``compensate`` returns then lacks as much."""
        ...

    def compensate(
        self,
        context: ExchangeContext,
        gradients: Gradient,
        direct_decay: tuple[float, ...],
        hint: TopKHint | None,
        flag: Tensor | None,
    ) -> tuple[Gradient, Candidates | None]:  # -> (n,) float32, or one vector per segment
        """Return what should be sent now, and the answer to the hint.

        May change ``gradients``, and may return a tensor that aliases its own state or, where it keeps nothing, the
        gradients as they are. A memory that passes over its vector anyway answers a hint; others leave it unanswered.
        """
        ...

    def retain(self, context: ExchangeContext, x: Any, accepted: Accepted) -> None:
        """Keep the rest of ``x``, which ``compensate`` returned: the residual itself where there is one."""
        ...

    def rollback(self) -> None:
        """A new exchange begins: throw away what one that failed may have left behind."""
        ...

    def commit(self, context: ExchangeContext, rank: int) -> None:
        """The exchange is over and nothing holds ``x`` any more: bring the state into the form in which it is kept."""
        ...

    def copy_of(self, name: str) -> Any:
        """Copies of what is kept of a parameter."""
        ...

    def put_back(self, name: str, copies: Any) -> None:
        """Keep again what ``copy_of`` gave: all exchanges of the parameter since then are taken back."""
        ...

    def residual_square_sum(self) -> float: ...

    def leftover(self, rates: dict[str, float]) -> dict[str, Tensor]:
        """Return the residuals by parameter name, in units of the learning rates ``rates``."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Compressor(Protocol):
    """Chooses what to send of a vector; pure, and never communicates.

    ``x`` is the coded part of the flat vector, or of what else the memory gave: one vector per coded tensor. It must
    not be changed. The same inputs give the same payload, bit for bit. A payload may hold on to x and be written out
    later; x stays as it is until ``retain``.
    """

    def budget(self, layout: Layout) -> Budget:
        """Return what a payload holds at most; where there is no such method, a payload of random numbers is asked."""
        ...

    def hint(self, context: ExchangeContext, device: torch.device) -> TopKHint | None:
        """Return what to look for while the memory compensates, or None."""
        ...

    def measure(self, context: ExchangeContext, x: Any) -> Tensor | None:  # (c,) float32 -> (m,) float32
        """Return numbers that all ranks must agree on before compressing (the largest wins), or None."""
        ...

    def compress(
        self,
        context: ExchangeContext,
        x: Any,
        agreed: Tensor | None,
        rank: int,
        candidates: Candidates | None = None,
    ) -> Any: ...  # -> a payload


class Collected(NamedTuple):
    """What a collective gives back: the group's mean, what the group ACCEPTED of this rank's contribution, and the
    alarm with what the others' frames told."""

    mean: Result
    accepted: Accepted
    alarm: Alarm


class Collective(Protocol):
    """Forms the group's mean of all ranks' payloads and dense tails.

    The mean is bit-equal on every rank; the memory keeps what was not accepted. This is the only place where anything
    is divided by the number of ranks. ``into``, one vector per segment, is where the mean will go: a collective that
    learns it piece by piece may put it there at once, on top of ``base``, when the payload has been sent. ``kinds``
    are those of the vectors that it keeps as a server. ``frames_grow`` says that a frame grows with the model whatever
    the group; servers' frames share one model between them.
    """

    @property
    def kinds(self) -> tuple[StateKind, ...]: ...

    @property
    def frames_grow(self) -> bool: ...

    def served(self, numels: Mapping[str, int], rank: int, size: int) -> dict[str, tuple[int, int]]:
        """Return which elements of which parameters a rank keeps vectors of as a server: first and end, by name."""
        ...

    def plan(self, layout: Layout, budget: Budget, size: int) -> Plan:
        """Return what an exchange of such payloads puts on the wire in a group of this size; without this method the
        adviser predicts nothing."""
        ...

    def mean(
        self,
        context: ExchangeContext,
        payload: Any,
        tail: Tensor,
        net: Net,
        base: Base,
        alarm: Alarm,
        into: Sequence[Tensor] | None = None,
    ) -> Collected: ...

    def copy_of(self, name: str) -> Any:
        """Copies of what this rank keeps of a parameter as a server."""
        ...

    def put_back(self, name: str, copies: Any) -> None:
        """Keep again what ``copy_of`` gave: all exchanges of the parameter since then are taken back."""
        ...

    def residual_square_sum(self) -> float: ...

    def leftover(self, rates: dict[str, float]) -> Iterable[tuple[str, int, Tensor]]:
        """Yield what this rank keeps as a server: parameter name, first element, values, in units of the mean."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Aggregator(Protocol):
    """The outside view of a method: gradients in, the group's mean out.

    ``whole_model`` says that it wants every gradient of a step in one call instead of one call per bucket; ``fusible``
    that an exchange has a fixed cost, so that joining buckets may save time; ``frames_grow`` that a frame grows with
    the model whatever the group; ``sums_by_place`` that the order in which ranks are added up depends on an element's
    place in the exchange.
    """

    whole_model: bool
    fusible: bool

    @property
    def sums_by_place(self) -> bool: ...

    @property
    def clock(self) -> Any:  # seconds: thinwire.engine.exchange_parts.Clock
        ...

    @property
    def frames_grow(self) -> bool: ...

    def plan(self, layout: Layout, size: int) -> Plan:
        """Return what an exchange puts on the wire in a group of this size, behind a warm-up; NoPlan where a part does
        not state it."""
        ...

    def waits(self, layout: Layout) -> float:
        """How often the ranks wait for each other in one exchange, one time after the other: what a latency costs."""
        ...

    def reduce(self, context: ExchangeContext, parts: Sequence[Tensor], norms: Measured = UNMEASURED) -> Measured:
        """Replace the gradients, one vector per segment wherever they lie, by the group's mean; return the norms with
        this exchange's added."""
        ...

    def residual_square_sum(self) -> float: ...

    def leftover(self, numels: dict[str, int], rates: dict[str, float]) -> dict[str, Tensor]:
        """Return this rank's share of what is kept; the mean over ranks is what the group has not applied."""
        ...

    def kinds(self) -> dict[str, dict[str, StateKind]]:
        """The kinds of vectors that its state has at any moment, by room ("memory", "collective") and name."""
        ...

    def vectors(self, numels: Mapping[str, int], coded: Collection[str]) -> Iterator[KeptVector]:
        """Yield the vectors that its state has at any moment, for a model of which these parameters are coded."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
