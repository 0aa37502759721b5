"""Everything that one exchange needs to know besides the gradient itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.engine.layout import Layout, memory_flat
from thinwire.kernels import Segments


@dataclass(frozen=True)
class Hyper:
    """What one optimizer group says about a parameter at one step."""

    lr: float = 0.0
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    maximize: bool = False

    @property
    def decay(self) -> float:
        """The weights' share of the gradient; SGD negates the gradient of a maximised objective behind us."""
        return -self.weight_decay if self.maximize else self.weight_decay

    @property
    def steady_decay(self) -> float:
        """What momentum makes of the decay of weights that stand still: decay (1 + m + m^2 + ...), which is also what
        it is with Nesterov momentum."""
        return self.decay / (1 - self.momentum) if self.momentum < 1 else self.decay


@dataclass
class Alarm:
    """Whether a gradient of this exchange is not finite, on this rank or, as frames tell, on another.

    Every frame that a rank builds while it rings says so, so that one exchange is enough for all ranks to know.
    """

    own: str | None = None  # the parameter, on a rank that has the bad gradient
    flag: Tensor | None = None  # (1,) int32 on the device, not zero where this rank's gradient is bad
    heard_from: str | None = None

    @property
    def rings(self) -> bool:
        return self.own is not None or self.heard_from is not None


class Probe:
    """Sums that the exchanges of one step fill in for whoever watches the training; left out of all other steps.

    g is the gradient, x what should be sent, e what remains of x after the exchange.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self._sums: list[Tensor] = [torch.zeros((), dtype=torch.float64) for _ in range(5)]  # g2, x2, x1, e2, e1

    def _add(self, place: int, vector: Tensor, order: int) -> None:
        norm = torch.linalg.vector_norm(vector, order, dtype=torch.float64)
        self._sums[place] = self._sums[place].to(norm.device) + norm**order

    def gradient(self, parts: Sequence[Tensor]) -> None:
        for part in parts:
            self._add(0, part, 2)

    def wanted(self, x: Tensor) -> None:
        self._add(1, x, 2)
        self._add(2, x, 1)

    def left(self, e: Tensor) -> None:
        self._add(3, e, 2)
        self._add(4, e, 1)

    def as_bytes(self) -> Tensor:  # -> (40,) uint8
        device = self._sums[0].device
        return torch.stack([one.to(device) for one in self._sums]).view(torch.uint8)


@dataclass(frozen=True)
class ExchangeContext:
    """Everything that one exchange needs to know besides the gradient itself.

    ``hypers`` and ``weights`` run parallel to ``layout.segments``; ``weights`` are the parameters, read by methods that
    move weight decay in front of the compression. ``applied``, parallel to them or empty, is how many times its weights
    are added to a coded segment's mean on every rank alike, without being sent; a memory takes that off what it keeps.
    ``own``, where it is not 0, is the share of this rank's own gradient that the coded mean is added to, and not to
    zeros (thinwire/engine/local_gradients.py).
    """

    layout: Layout
    step: int
    hypers: tuple[Hyper, ...]
    weights: tuple[Tensor, ...] = ()
    applied: tuple[float, ...] = ()
    own: float = 0.0
    alarm: Alarm = field(default_factory=Alarm, compare=False)
    probe: Probe | None = field(default=None, compare=False)

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

    def segments(self, *, with_decay: bool, coded_decay: bool = True) -> Segments:
        """The rows that the kernels read; with weight decay where it acts in front of the compression: that of coded
        segments only with ``coded_decay``."""
        whose = [with_decay and (coded_decay or not segment.coded) for segment in self.layout.segments]
        decays = [hyper.decay if has else 0.0 for hyper, has in zip(self.hypers, whose, strict=True)]
        applied = self.applied or (0.0,) * len(decays)
        weights = [self.flat_weight(place).to(torch.float32) if decay else None for place, decay in enumerate(decays)]
        return Segments(
            starts=tuple(segment.start for segment in self.layout.segments),
            momentum=tuple(hyper.momentum for hyper in self.hypers),
            nesterov=tuple(hyper.nesterov for hyper in self.hypers),
            decay=tuple(decays),
            weights=tuple(weights),
            applied=tuple(share if has else 0.0 for share, has in zip(applied, whose, strict=True)),
        )
