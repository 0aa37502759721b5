"""Everything that one exchange needs to know besides the gradient itself: made once, read by all, written by nobody."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.engine.layout import Layout, memory_flat
from thinwire.kernels import Segments


@dataclass(frozen=True)
class Hyper:
    """What one optimizer group says about a parameter at one step.

    ``again``: its velocity has decayed in this step already, and only takes a further gradient in.
    """

    lr: float = 0.0
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    maximize: bool = False
    again: bool = False

    @property
    def decay(self) -> float:
        """The weights' share of the gradient; SGD negates the gradient of a maximised objective behind us."""
        return -self.weight_decay if self.maximize else self.weight_decay

    @property
    def steady_decay(self) -> float:
        """What momentum makes of the decay of weights that stand still: decay (1 + m + m^2 + ...), which is also what
        it is with Nesterov momentum."""
        return self.decay / (1 - self.momentum) if self.momentum < 1 else self.decay


@dataclass(frozen=True)
class ExchangeContext:
    """``hypers`` and ``weights`` run parallel to ``layout.segments``; ``weights`` are the parameters, read by methods
    that move weight decay in front of the compression.
    """

    layout: Layout
    step: int
    hypers: tuple[Hyper, ...]
    weights: tuple[Tensor, ...] = ()

    def runs(self) -> Iterator[tuple[slice, Hyper]]:
        """Yield the longest stretches of the flat vector whose parameters share their hyper-parameters."""
        start, stop, current = 0, 0, None
        for segment, hyper in zip(self.layout.segments, self.hypers, strict=True):
            if hyper != current:
                if current is not None and stop > start:
                    yield slice(start, stop), current
                start, current = segment.start, hyper
            stop = segment.start + segment.numel
        if current is not None and stop > start:
            yield slice(start, stop), current

    def flat_weight(self, place: int) -> Tensor:  # -> (numel,)
        """A segment's parameter, its elements as they lie in memory, in its own type."""
        return memory_flat(self.weights[place].detach())

    def segments(self, *, with_decay: bool, coded_decay: bool = True, direct_decay: tuple[float, ...] = ()) -> Segments:
        """The rows that the kernels read; with weight decay where it acts in front of the compression: that of coded
        segments only with ``coded_decay``. ``direct_decay`` is what of the weights is applied without being sent, and
        so taken off what is."""
        whose = [with_decay and (coded_decay or not segment.coded) for segment in self.layout.segments]
        decays = [hyper.decay if has else 0.0 for hyper, has in zip(self.hypers, whose, strict=True)]
        applied = direct_decay or (0.0,) * len(decays)
        weights = [self.flat_weight(place).to(torch.float32) if decay else None for place, decay in enumerate(decays)]
        return Segments(
            starts=tuple(segment.start for segment in self.layout.segments),
            momentum=tuple(hyper.momentum for hyper in self.hypers),
            nesterov=tuple(hyper.nesterov for hyper in self.hypers),
            decay=tuple(decays),
            weights=tuple(weights),
            applied=tuple(share if has else 0.0 for share, has in zip(applied, whose, strict=True)),
        )
