"""Errors in units of the learning rate that they missed."""

from __future__ import annotations

from torch import Tensor

from thinwire.engine.context import ExchangeContext


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

    def begin(self, context: ExchangeContext, error: Tensor) -> list[float]:  # (n,) float32
        """Return every segment's ratio, and remember the current rates."""
        pairs = list(zip(context.layout.segments, context.hypers, strict=True))
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

    def put_back(self, name: str, rate: float | None) -> None:
        """The stored rate is again what it was, None: there was none."""
        if rate is None:
            self.rates.pop(name, None)
        else:
            self.rates[name] = rate

    def undo(self) -> None:
        """Go back to the rates before what was not settled."""
        for name, rate in self._before.items():
            self.put_back(name, rate)
        self._before.clear()
