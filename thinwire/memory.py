"""What is not sent now is kept: error feedback, momentum correction, and the step-size-rescaled error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.kernels import accumulate, error_step, watch, zero_at
from thinwire.layout import Layout, Turn
from thinwire.named_state import NamedState
from thinwire.payloads import Accepted

Gradient = Tensor | Sequence[Tensor]
"""A gradient as one flat vector, or as one vector a segment wherever they lie (DDP's buckets)."""


def as_parts(layout: Layout, grad: Gradient) -> Sequence[Tensor]:
    return layout.split(grad) if isinstance(grad, Tensor) else grad


def as_flat(grad: Gradient) -> Tensor:
    """A flat vector of our own, or the given one."""
    return grad if isinstance(grad, Tensor) else torch.cat(list(grad))


def coded_part(layout: Layout, x: Gradient) -> Gradient:
    """What goes through the compressor."""
    return x[: layout.coded_numel] if isinstance(x, Tensor) else x[: len(layout.coded)]


def tail_part(layout: Layout, x: Gradient, room: Tensor | None = None) -> Tensor:  # -> (t,) a copy
    """What travels dense, in memory of its own or in ``room``, (t,)."""
    if isinstance(x, Tensor) and room is not None:
        return room.copy_(x[layout.coded_numel :])
    if isinstance(x, Tensor):
        return x[layout.coded_numel :].clone()
    rest = x[len(layout.coded) :]
    return torch.cat(list(rest)) if rest else x[0][:0]


@dataclass(frozen=True)
class SearchRoom:
    """Memory, all int32, for the places that reach a threshold, for putting them in order, and for those that are
    chosen; ``mark`` is what of the scratch memory the last ones need."""

    listing: Tensor
    places: Tensor
    chosen: Tensor
    mark: int


@dataclass
class Scout:
    """Asks a memory to look for large elements while it passes over them anyway.

    ``thresholds`` has one number a segment; ``found`` is then the flat indices of everything that reaches its
    threshold, rising, or None when that is more than ``capacity``. On a GPU both are the device's search.
    """

    thresholds: Any
    capacity: int
    found: Any = None
    room: SearchRoom | None = None  # where the native kernels look and list
    flag: Tensor | None = None  # where the device's search reports what is not finite


class NoMemory:
    """Nothing is kept: for methods whose error is meant to average out (TernGrad)."""

    state = NamedState()
    watches = True

    def applied(self, turn: Turn) -> tuple[float, ...]:
        return ()

    def compensate(self, turn: Turn, grad: Gradient, scout: Scout | None = None) -> Gradient:
        if turn.alarm.flag is not None:
            watch(as_parts(turn.layout, grad), turn.alarm.flag)
        return grad

    def retain(self, turn: Turn, x: Gradient, accepted: Accepted) -> None:
        return

    def forget(self) -> None:
        return

    def settle(self, turn: Turn, rank: int) -> None:
        return

    def residual_square_sum(self) -> float:
        return 0.0

    def leftover(self, rates: dict[str, float]) -> dict[str, Tensor]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        return


class _Stateful:
    """The shared handling of named state.

    A memory that ``watches`` keeps out what is not finite by itself and raises the alarm's flag, where there is one.
    """

    kinds: tuple[str, ...] = ()
    watches = True
    ratio: RateRatio | None = None  # where the residual is in units of a learning rate

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.state = NamedState(*self.kinds, dtype=dtype)

    def applied(self, turn: Turn) -> tuple[float, ...]:
        return ()

    def compensate(self, turn: Turn, grad: Gradient, scout: Scout | None = None) -> Tensor:
        raise AssertionError("every memory says how it compensates")

    def _accumulate(
        self,
        turn: Turn,
        grad: Gradient,
        scout: Scout | None,
        *,
        with_velocity: bool,
        coded_decay: bool = True,
        ratios: Sequence[float] | None = None,
    ) -> Tensor:  # -> (n,) the residual
        parts = as_parts(turn.layout, grad)
        residual = self.state.flat("residual", turn.layout, parts[0].device)
        velocity = self.state.flat("velocity", turn.layout, parts[0].device) if with_velocity else None
        found = accumulate(
            parts,
            turn.segments(with_decay=with_velocity, coded_decay=coded_decay),
            velocity,
            residual,
            scout.thresholds if scout else None,
            scout.capacity if scout else 0,
            turn.alarm.flag,
            (scout.room.listing, scout.room.places) if scout is not None and scout.room is not None else None,
            ratios,
        )
        if scout is not None:
            scout.found = found
        return residual

    def retain(self, turn: Turn, x: Tensor, accepted: Accepted) -> None:
        return

    def forget(self) -> None:
        if self.ratio is not None and self.state.dtype != torch.float32:
            self.ratio.undo()  # an exchange that failed changed copies of the state alone
        self.state.forget()

    def settle(self, turn: Turn, rank: int) -> None:
        self.state.settle(turn, rank)
        if self.ratio is not None:
            self.ratio.settled()

    def residual_square_sum(self) -> float:
        return self.state.square_sum("residual") if "residual" in self.kinds else 0.0

    def leftover(self, rates: dict[str, float]) -> dict[str, Tensor]:
        kept = {name: kept.to(torch.float32) for name, kept in self.state.named.get("residual", {}).items()}
        ratio = self.ratio
        return kept if ratio is None else {name: e * ratio.rescale(name, rates[name]) for name, e in kept.items()}

    def state_dict(self) -> dict[str, Any]:
        rates = {"rates": dict(self.ratio.rates)} if self.ratio is not None else {}
        return {**self.state.state_dict(), **rates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state.load_state_dict(state)
        if self.ratio is not None:
            self.ratio.rates = dict(state.get("rates", {}))


def apply_momentum(turn: Turn, velocity: Tensor, grad: Tensor) -> None:  # (n,) float32 both, changed in place
    """velocity = m velocity + grad; grad becomes the velocity, or grad + m velocity for Nesterov: SGD's own update."""
    for span, hyper in turn.runs():
        if hyper.momentum:
            velocity[span].mul_(hyper.momentum).add_(grad[span])
            if hyper.nesterov:
                grad[span].add_(velocity[span], alpha=hyper.momentum)
            else:
                grad[span].copy_(velocity[span])


class Velocity(_Stateful):
    """Signum: the optimizer's momentum in front of the compression, and no residual.

    u = m u + g; what is sent is u, or g + m u for Nesterov.
    """

    kinds = ("velocity",)
    watches = False

    def compensate(self, turn: Turn, grad: Gradient, scout: Scout | None = None) -> Tensor:
        flat = as_flat(grad)
        apply_momentum(turn, self.state.flat("velocity", turn.layout, flat.device), flat)
        return flat


class ErrorFeedback(_Stateful):
    """x = g + e; e = x - accepted (gTop-k Algorithm 4 lines 4-10, gradient dropping Algorithm 1 lines 3-7)."""

    kinds = ("residual",)

    def compensate(self, turn: Turn, grad: Gradient, scout: Scout | None = None) -> Tensor:
        return self._accumulate(turn, grad, scout, with_velocity=False)

    def retain(self, turn: Turn, x: Tensor, accepted: Accepted) -> None:
        accepted.subtract_from(x)  # x is the residual itself


class RateRatio:
    """eta_{t-1} / eta_t of every parameter: an error is stored in units of the step size that it missed.

    A learning rate of zero applies nothing, so the error keeps the units of the last rate that was not zero; what an
    exchange does to it between ``begin`` and ``end`` is undone.
    """

    def __init__(self) -> None:
        self.rates: dict[str, float] = {}
        self._before: dict[str, float | None] = {}  # the exchange that is not settled yet
        self._held: list[tuple[slice, Tensor]] = []  # errors whose learning rate is zero, as they were

    def rescale(self, name: str, rate: float) -> float:
        """Return the ratio of the stored rate and ``rate``, 1 where one of them is zero."""
        previous = self.rates.get(name, 0.0)
        return previous / rate if previous and rate else 1.0

    def begin(self, turn: Turn, error: Tensor) -> list[float]:  # (n,) float32
        """Return every segment's ratio, and remember the current rates."""
        pairs = list(zip(turn.layout.segments, turn.hypers, strict=True))
        self._held = [(segment.span, error[segment.span].clone()) for segment, hyper in pairs if hyper.lr == 0]
        ratios = [self.rescale(segment.name, hyper.lr) for segment, hyper in pairs]
        for segment, hyper in pairs:
            if hyper.lr:
                self._before[segment.name] = self.rates.get(segment.name)
                self.rates[segment.name] = hyper.lr
        return ratios

    def end(self, error: Tensor) -> None:  # (n,) float32
        for span, copy in self._held:
            error[span] = copy

    def that_moved(self, indices: Tensor) -> Tensor:  # (k,) -> (at most k,)
        """Those of the indices whose learning rate is not zero."""
        for span, _ in self._held:
            indices = indices[(indices < span.start) | (indices >= span.stop)]
        return indices

    def settled(self) -> None:
        self._before.clear()

    def undo(self) -> None:
        """Go back to the rates before what was not settled."""
        for name, rate in self._before.items():
            if rate is None:
                del self.rates[name]
            else:
                self.rates[name] = rate
        self._before.clear()


class MomentumCorrection(_Stateful):
    """DGC: u = m u + g, v = v + u (Eq. 4), or v = v + m u + g for Nesterov (Eq. 7); v is what should be sent.

    g includes the weight decay. With ``masking`` the velocity of every coordinate that was sent is cleared (section
    2.3); tensors that travel dense are never masked, because all of their coordinates are always sent and masking
    would take their momentum away altogether.

    With ``direct`` the decay need not wait: every rank knows the weights, so s w is added to the mean of coded tensors
    on all of them without being sent, and taken off what waits: v = v + (u - s w). s = decay / (1 - m) is what momentum
    makes of the decay of weights that stand still. Nothing is lost or added, whatever the weights do meanwhile, and
    with density 1 the result is SGD's.

    Both together: masking would clear the decay's velocity, too, so u and v are without it and s w alone is applied, as
    in the code of DGC's authors. A gradient then loses velocity whenever its element is sent and the decay does not:
    beside each other the decay is the stronger, up to 1 / (1 - m) times where an element is sent at every step.

    With ``rescaling`` v = (eta_{t-1} / eta_t) v + u, as in dist-EF-blockSGDM (Algorithm 4): what waits is applied with
    the learning rates of the steps that it comes from, and not with the one at which it leaves.
    """

    kinds = ("velocity", "residual")

    def __init__(
        self, masking: bool, dtype: torch.dtype = torch.float32, rescaling: bool = False, direct: bool = True
    ) -> None:
        super().__init__(dtype)
        self.masking, self.direct = masking, direct
        self.ratio = RateRatio() if rescaling else None

    def applied(self, turn: Turn) -> tuple[float, ...]:
        if not self.direct:
            return ()
        rows = zip(turn.layout.segments, turn.hypers, strict=True)
        shares = tuple(hyper.steady_decay if segment.coded else 0.0 for segment, hyper in rows)
        return shares if any(shares) else ()

    def compensate(self, turn: Turn, grad: Gradient, scout: Scout | None = None) -> Tensor:
        ratios = None
        if self.ratio is not None:
            residual = self.state.flat("residual", turn.layout, as_parts(turn.layout, grad)[0].device)
            ratios = self.ratio.begin(turn, residual)
        coded_decay = not (self.direct and self.masking)
        return self._accumulate(turn, grad, scout, with_velocity=True, coded_decay=coded_decay, ratios=ratios)

    def retain(self, turn: Turn, x: Tensor, accepted: Accepted) -> None:
        accepted.subtract_from(x)
        if self.ratio is not None:
            self.ratio.end(x)
        if self.masking and accepted.sent is not None:
            sent = accepted.sent if self.ratio is None else self.ratio.that_moved(accepted.sent)
            zero_at(self.state.flat("velocity", turn.layout, x.device), sent)


class RescaledError(_Stateful):
    """dist-EF-blockSGDM, Algorithm 4 on the worker: m = mu m + g; p = q + (eta_{t-1} / eta_t) e; e = p - Delta.

    q is mu m + g with Nesterov momentum (the paper's), m with plain momentum, g without. g includes the weight decay
    when ``momentum_moved``: momentum and weight decay are then taken from the user's SGD; otherwise the optimizer
    keeps both.
    """

    ratio: RateRatio

    def __init__(self, momentum_moved: bool, dtype: torch.dtype = torch.float32) -> None:
        self.kinds = ("velocity", "residual") if momentum_moved else ("residual",)
        super().__init__(dtype)
        self.momentum_moved = momentum_moved
        self.ratio = RateRatio()

    def compensate(self, turn: Turn, grad: Gradient, scout: Scout | None = None) -> Tensor:
        parts = as_parts(turn.layout, grad)
        residual = self.state.flat("residual", turn.layout, parts[0].device)
        ratios = self.ratio.begin(turn, residual)
        moved = self.momentum_moved and any(hyper.momentum for hyper in turn.hypers)
        velocity = self.state.flat("velocity", turn.layout, parts[0].device) if moved else None
        error_step(parts, turn.segments(with_decay=self.momentum_moved), ratios, velocity, residual, turn.alarm.flag)
        return residual

    def retain(self, turn: Turn, x: Tensor, accepted: Accepted) -> None:
        accepted.subtract_from(x)
        self.ratio.end(x)


class LocalClipping:
    """A policy around a memory: a worker's whole gradient is clipped before it is accumulated (DGC, section 2.2).

    The paper scales the threshold by N^-1/2 for gradients that carry a factor 1/N already (Eq. 3) and are added up.
    Ours are averaged, so they are N times as long and the threshold is clip_norm * sqrt(N): where the workers'
    gradients differ by more than they have in common, as the paper assumes, their mean then has a norm of about
    clip_norm, as if it had been clipped itself; where they all point the same way it can be sqrt(N) times that.
    """

    def __init__(self, inner: Any, clip_norm: float, ranks: int) -> None:
        self.inner = inner
        self.state = inner.state
        self.threshold = clip_norm * ranks**0.5
        self.retain = inner.retain
        self.watches, self.applied = inner.watches, inner.applied
        self.forget, self.settle = inner.forget, inner.settle
        self.residual_square_sum = inner.residual_square_sum
        self.leftover = inner.leftover
        self.state_dict = inner.state_dict
        self.load_state_dict = inner.load_state_dict

    def compensate(self, turn: Turn, grad: Gradient, scout: Scout | None = None) -> Tensor:
        parts = as_parts(turn.layout, grad)
        # In float64, where no finite gradient's norm overflows.
        norms = torch._foreach_norm(list(parts), 2, dtype=torch.float64)
        factor = (self.threshold / (torch.linalg.vector_norm(torch.stack(norms)) + 1e-6)).clamp(max=1.0)
        factor = torch.where(torch.isnan(factor), 1.0, factor)  # the nan is found where it is, and not everywhere
        torch._foreach_mul_(list(parts), factor.to(parts[0].dtype))
        x: Tensor = self.inner.compensate(turn, parts, scout)
        return x
