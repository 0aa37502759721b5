"""The contracts of the engine's parts. Every registered part is tested against these docstrings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from thinwire.engine.context import ExchangeContext
from thinwire.engine.gradients import Gradient
from thinwire.engine.hints import TopKHint
from thinwire.engine.named_state import NamedState
from thinwire.engine.payloads import Accepted, Payload, Result
from thinwire.transport import Net

Chosen = TypeVar("Chosen", bound=Payload, covariant=True)
Taken = TypeVar("Taken", bound=Payload, contravariant=True)


class Memory(Protocol):
    """Turns a gradient into what should be sent now, and keeps what was not.

    ``compensate`` may change ``grad`` and may return a tensor that aliases its own state, or, where it keeps nothing,
    the gradient as it is; ``retain`` gets the same back, which is the residual itself where ``state`` has one. A memory
    that passes over its vector anyway answers a ``scout``; others leave it unanswered. Over any run, the sum of
    everything accepted plus the residual equals the sum of everything that ``compensate`` produced from gradients
    (conservation). State is kept by parameter name.

    A memory that ``watches`` lets nothing that is not finite into its state and sets the alarm's flag, where the alarm
    has one; others are only given finite gradients.
    """

    state: NamedState
    watches: bool

    def applied(self, context: ExchangeContext) -> tuple[float, ...]:
        """Return how many times its weights are to be added to each coded segment's mean without being sent, 0 for the
        others; empty: never. What ``compensate`` returns then lacks as much, and the collective must add it
        (``adds_applied``)."""
        ...

    def compensate(
        self, context: ExchangeContext, grad: Gradient, hint: TopKHint | None = None
    ) -> Gradient: ...  # -> (n,) float32

    def retain(self, context: ExchangeContext, x: Any, accepted: Accepted) -> None: ...

    def forget(self) -> None:
        """A new exchange begins: throw away what one that failed may have left behind."""
        ...

    def commit(self, context: ExchangeContext, rank: int) -> None:
        """The exchange is over and nothing holds ``x`` any more: bring the state into the form in which it is kept."""
        ...

    def residual_square_sum(self) -> float: ...

    def leftover(self, rates: dict[str, float]) -> dict[str, Tensor]:
        """Return the residuals by parameter name, in units of the learning rates ``rates``."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Compressor(Protocol[Chosen]):
    """Chooses what to send of a vector; pure, and never communicates.

    ``measure`` returns numbers that all ranks must agree on before compressing (the largest wins), or
    None when there is nothing to agree on; ``compress`` gets the agreed numbers. ``x`` is the coded part of the flat
    vector, or of what else the memory gave: one vector a coded tensor. It must not be changed. The same inputs give the
    same payload, bit for bit. A payload may hold on to x and be written out later; x stays as it is until ``retain``.
    """

    def hint(self, context: ExchangeContext, device: torch.device) -> TopKHint | None:
        """Return what to look for while the memory compensates, or None."""
        ...

    def measure(self, context: ExchangeContext, x: Any) -> Tensor | None: ...  # (c,) float32 -> (m,) float32

    def compress(
        self, context: ExchangeContext, x: Any, agreed: Tensor | None, rank: int, hint: TopKHint | None = None
    ) -> Chosen: ...


class Collective(Protocol[Taken]):
    """Forms the group's mean of all ranks' payloads and dense tails.

    Returns the mean, bit-equal on every rank, and what the group ACCEPTED of this rank's contribution: the memory keeps
    the rest. This is the only place where anything is divided by the number of ranks. ``into``, one vector a segment,
    is where the mean will go: a collective that learns it piece by piece may put it there at once, when the payload
    has been sent. One that ``adds_applied`` puts the turn's ``applied`` on top of the mean.
    """

    adds_applied: ClassVar[bool]

    def rounds(self, size: int) -> int:
        """How often the ranks of a group wait for each other in one exchange, one time after the other, what they agree
        on before they compress included: what a latency costs it."""
        ...

    def mean(
        self, context: ExchangeContext, payload: Taken, tail: Tensor, net: Net, into: Sequence[Tensor] | None = None
    ) -> tuple[Result, Accepted]: ...

    def residual_square_sum(self) -> float: ...

    def leftover(self, rates: dict[str, float]) -> Iterable[tuple[str, int, Tensor]]:
        """Yield what this rank keeps as a server: parameter name, first element, values, in units of the mean."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass
class Clock:
    """Seconds that this rank spent on its own side of the exchanges."""

    compensating: float = 0.0
    compressing: float = 0.0


class Aggregator(Protocol):
    """The outside view of a method: gradients in, the group's mean out.

    ``whole_model`` says that it wants every gradient of a step in one call instead of one call a bucket.
    """

    whole_model: bool
    clock: Clock

    def mean(
        self, context: ExchangeContext, grad: Tensor
    ) -> Tensor: ...  # (n,) float32, may be changed -> (n,) float32

    def reduce(self, context: ExchangeContext, parts: Sequence[Tensor]) -> None:
        """The same in place, on one vector a segment wherever they lie."""
        ...

    def residual_square_sum(self) -> float: ...

    def leftover(self, numels: dict[str, int], rates: dict[str, float]) -> dict[str, Tensor]:
        """Return this rank's share of what is kept; the mean over ranks is what the group has not applied."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
