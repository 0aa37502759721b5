"""What all memories share: state by parameter name, one pass that accumulates, and rates of stored errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.engine.context import ExchangeContext
from thinwire.engine.flat_gradient import Gradient, as_parts
from thinwire.engine.named_state import NamedState, StateKind
from thinwire.engine.payloads import Accepted
from thinwire.engine.topk_hint import Candidates, TopKHint
from thinwire.kernels import accumulate
from thinwire.memory.lr_rescaling import RateRatio


class StatefulMemory:
    """The shared handling of named state.

    A memory that ``watches`` keeps out what is not finite by itself and raises the alarm's flag, where there is one.
    """

    kinds: tuple[StateKind, ...] = ()
    watches = True
    ratio: RateRatio | None = None  # where the residual is in units of a learning rate
    decay = 1.0  # of the residual, before anything is added to it

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.state = NamedState(*self.kinds, dtype=dtype)

    @property
    def keeps_residual(self) -> bool:
        return bool(self.state.leftovers)

    def direct_decay(self, context: ExchangeContext) -> tuple[float, ...]:
        return ()

    def _accumulate(
        self,
        context: ExchangeContext,
        gradients: Gradient,
        hint: TopKHint | None,
        flag: Tensor | None,
        *,
        with_velocity: bool,
        coded_decay: bool = True,
        direct_decay: tuple[float, ...] = (),
        ratios: Sequence[float] | None = None,
    ) -> tuple[Tensor, Candidates | None]:  # -> (n,) the residual
        parts = as_parts(context.layout, gradients)
        residual = self.state.flat("residual", context.layout, parts[0].device)
        velocity = self.state.flat("velocity", context.layout, parts[0].device) if with_velocity else None
        if velocity is not None:
            undo_decay(context, velocity, residual)
        found = accumulate(
            parts,
            context.segments(with_decay=with_velocity, coded_decay=coded_decay, direct_decay=direct_decay),
            velocity,
            residual,
            hint.thresholds if hint else None,
            hint.capacity if hint else 0,
            flag,
            ratios,
            (hint.buffers.listing, hint.buffers.places) if hint is not None and hint.buffers is not None else None,
        )
        return residual, Candidates(hint, found) if hint is not None else None

    def retain(self, context: ExchangeContext, x: Tensor, accepted: Accepted) -> None:
        return

    def rollback(self) -> None:
        if self.ratio is not None and self.state.dtype != torch.float32:
            self.ratio.undo()  # an exchange that failed changed copies of the state alone
        self.state.rollback()

    def commit(self, context: ExchangeContext, rank: int) -> None:
        self.state.commit(context, rank)
        if self.ratio is not None:
            self.ratio.settled()

    def copy_of(self, name: str) -> Any:
        return self.state.copy_of(name), self.ratio.rates.get(name) if self.ratio is not None else None

    def put_back(self, name: str, copies: Any) -> None:
        vectors, rate = copies
        self.state.put_back(name, vectors)
        if self.ratio is not None:
            self.ratio.put_back(name, rate)

    def residual_square_sum(self) -> float:
        return self.state.square_sum()

    def leftover(self, rates: dict[str, float]) -> dict[str, Tensor]:
        kept: dict[str, Tensor] = {}
        for kind in self.state.leftovers:
            for name, vector in self.state.named[kind].items():
                kept[name] = kept[name] + vector if name in kept else vector.to(torch.float32)
        ratio = self.ratio
        return kept if ratio is None else {name: e * ratio.rescale(name, rates[name]) for name, e in kept.items()}

    def state_dict(self) -> dict[str, Any]:
        rates = {"rates": dict(self.ratio.rates)} if self.ratio is not None else {}
        return {**self.state.state_dict(), **rates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state.load_state_dict(state)
        if self.ratio is not None:
            self.ratio.rates = dict(state.get("rates", {}))


def undo_decay(context: ExchangeContext, velocity: Tensor, residual: Tensor | None = None) -> None:
    """Make room for a further gradient of a step that has moved the velocity already (``Hyper.again``).

    What comes next multiplies the velocity by m and adds it to the residual. Divided and taken off here before, that
    comes to u = u + g and v = v + g, or v + (1 + m) g for Nesterov. Vectors are (n,) float32, changed in place.
    """
    for span, hyper in context.runs():
        if hyper.again and hyper.momentum:
            if residual is not None:
                residual[span].sub_(velocity[span], alpha=hyper.momentum if hyper.nesterov else 1.0)
            velocity[span].div_(hyper.momentum)
