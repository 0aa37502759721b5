"""A method at work on one model: its exchange, its layouts, and what it keeps by parameter name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire.engine.aggregators import Exchange, NoopMean
from thinwire.engine.context import ExchangeContext, Hyper
from thinwire.engine.hierarchy import Hierarchy, sends_nothing
from thinwire.engine.layout import Layout, memory_flat
from thinwire.engine.protocols import Aggregator
from thinwire.methods.base import Method
from thinwire.transport.nets import Nets


class RunningMethod:
    """Made anew whenever the method changes; ``parameters`` are in the model's order."""

    def __init__(self, method: Method, parameters: Mapping[str, Tensor], nets: Nets, sgd: bool) -> None:
        self.method, self.sgd, self._nets = method, sgd, nets
        self._rows = [(name, place, p.shape) for place, (name, p) in enumerate(parameters.items())]
        self._layouts: dict[tuple[int, ...], Layout] = {}
        self.inner: Any = method.aggregator(nets.between, sgd)
        if not self.compresses and not isinstance(self.inner, Exchange):
            self.inner = NoopMean(nets.between)  # the machine's mean as it is, in no shorter type
        self.aggregator: Aggregator = self.inner
        if nets.inside is not None and nets.groups is not None:
            self.aggregator = Hierarchy(self.inner, nets.inside, ranks_a_machine=nets.own.size / len(nets.groups))

    @property
    def takes_momentum(self) -> bool:
        return self.method.takes_momentum(self.sgd)

    @property
    def takes_weight_decay(self) -> bool:
        return self.method.takes_weight_decay(self.sgd)

    @property
    def compresses(self) -> bool:
        """Not where all ranks are on one machine: their exact mean is there without it."""
        return not (sends_nothing(self._nets.groups) and self.method.estimates_mean)

    @property
    def follows(self) -> bool:
        """True on every rank of a machine except its leader."""
        return isinstance(self.aggregator, Hierarchy) and not self.aggregator.leads

    @property
    def weight(self) -> float:
        """What one unit of a residual is worth in the group's mean, against one of a flat group."""
        return self.aggregator.weight if isinstance(self.aggregator, Hierarchy) else 1.0

    @property
    def memory(self) -> Any:
        """The memory of the method; None where it has none."""
        return getattr(self.inner, "memory", None)

    @property
    def compressor(self) -> Any:
        """The compressor of the method; None where it has none."""
        return getattr(self.inner, "compressor", None)

    def layout(self, ordinals: tuple[int, ...]) -> Layout:
        """The layout of an exchange of these parameters, by their places in the model."""
        layout = self._layouts.get(ordinals)
        if layout is None:
            rows = [self._rows[place] for place in ordinals]
            layout = self.method.layout(rows, model=self._rows, compress=self.compresses)
            self._layouts[ordinals] = layout
        return layout

    def stages(self, gradients: Mapping[str, Tensor], step: int) -> dict[str, dict[str, Tensor]]:
        """What becomes of this rank's gradients of a step on their way, by stage and name, where the compressor shows
        it: compressors are pure, so these are the values that the exchange sent. Collective; nothing is kept."""
        if not hasattr(self.compressor, "stages"):
            return {}
        places = [place for place, (name, _, _) in enumerate(self._rows) if name in gradients]
        layout = self.layout(tuple(places))
        context = ExchangeContext(layout, step, (Hyper(),) * len(places))
        flat = [memory_flat(gradients[segment.name]).to(torch.float32) for segment in layout.coded]
        x = torch.cat([*flat, torch.empty(0, dtype=torch.float32)])
        shown = self.compressor.stages(context, x, self.inner.stages.agree, self.inner.net.rank)
        return {stage: {s.name: values[s.span] for s in layout.coded} for stage, values in shown.items()}

    def kept(self, kind: str) -> dict[str, Tensor]:
        """What the memory keeps of a kind, by parameter name; nothing where it has no such kind."""
        return dict(self.memory.state.named.get(kind, {})) if self.memory is not None else {}

    def keep(self, kind: str, vectors: Mapping[str, Tensor]) -> None:
        """Replace what the memory keeps of a kind; a rank that follows its leader keeps nothing."""
        if vectors and not self.follows:
            self.memory.load_state_dict({**self.memory.state_dict(), kind: dict(vectors)})

    def copy_of(self, name: str) -> Any:
        """Copies of all that a method with a memory keeps of a parameter."""
        return self.memory.copy_of(name), self.inner.collective.copy_of(name)

    def put_back(self, name: str, copies: Any) -> None:
        """Keep again what ``copy_of`` gave."""
        kept, served = copies
        self.memory.put_back(name, kept)
        self.inner.collective.put_back(name, served)

    @property
    def leftover_kind(self) -> str | None:
        """The kind of vector in which the memory keeps what was not sent; None where it keeps nothing of that."""
        return next(iter(self.memory.state.leftovers), None) if self.memory is not None else None

    def shared(self, vectors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Scaled so that the mean over all ranks is the mean over those that compress."""
        return self.aggregator.share(vectors) if isinstance(self.aggregator, Hierarchy) else vectors

    def density(self, step: int) -> float | None:
        return self.compressor.density(step) if hasattr(self.compressor, "density") else None

    @property
    def density_factor(self) -> float:
        return getattr(self.compressor, "factor", 1.0)

    @density_factor.setter
    def density_factor(self, factor: float) -> None:
        if hasattr(self.compressor, "factor"):
            self.compressor.factor = factor
