"""A method at work on one model: its exchange, its layouts, and what it keeps by parameter name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire.engine.aggregators import Exchange, NoopMean
from thinwire.engine.context import ExchangeContext, Hyper
from thinwire.engine.hierarchy import Hierarchy, sends_nothing
from thinwire.engine.layout import Layout, memory_flat
from thinwire.engine.protocols import Aggregator
from thinwire.engine.several_aggregators import Mixture
from thinwire.methods.base import Method
from thinwire.transport.reducer_nets import Nets


class RunningMethod:
    """Made anew whenever the method changes; ``parameters`` are in the model's order, ``sgd`` the names of those that
    torch.optim.SGD steps. Where they are shards, the ``wholes`` decide which of them are compressed, so that no number
    of shards changes it."""

    def __init__(
        self,
        method: Method,
        parameters: Mapping[str, Tensor],
        nets: Nets,
        sgd: Collection[str],
        wholes: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.method, self._nets = method, nets
        self._numels = [parameter.numel() for parameter in parameters.values()]
        self._rows = [(name, place, p.shape) for place, (name, p) in enumerate((wholes or parameters).items())]
        self._is_cut = any(n != shape.numel() for n, (_, _, shape) in zip(self._numels, self._rows, strict=True))
        self._layouts: dict[tuple[int, ...], Layout] = {}
        of_sgd = method.of_sgd(parameters, sgd)
        inner = method.assembled(nets.between, of_sgd)
        if not self.compresses:
            inner = _as_it_is(inner, nets)
        self._parts: tuple[Any, ...] = inner.members if isinstance(inner, Mixture) else (inner,)
        self._part_of: Callable[[str], Any] = inner.member_of if isinstance(inner, Mixture) else lambda name: inner
        self.aggregator: Aggregator = inner
        if nets.inside is not None and nets.groups is not None:
            self.aggregator = Hierarchy(inner, nets.inside, nets.groups)
        # The parameters whose momentum, and whose weight decay, act in front of the compression.
        self.with_momentum = self._those(lambda one: one.takes_momentum(of_sgd(one)))
        self.with_decay = self._those(lambda one: one.takes_weight_decay(of_sgd(one)))
        self.drifting = self._those(lambda one: one.replicas_drift)

    def _those(self, has: Callable[[Method], bool]) -> frozenset[str]:
        """The names of the parameters whose method has something."""
        return frozenset(name for name, _, _ in self._rows if has(self.method.member_of(name)))

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

    def layout(self, ordinals: tuple[int, ...]) -> Layout:
        """The layout of an exchange of these parameters, by their places in the model."""
        layout = self._layouts.get(ordinals)
        if layout is None:
            rows = [self._rows[place] for place in ordinals]
            layout = self.method.layout(rows, model=self._rows, compress=self.compresses)
            if self._is_cut:
                layout = layout.cut(self._numels, self.method.layout(self._rows))
            self._layouts[ordinals] = layout
        return layout

    def stages(self, gradients: Mapping[str, Tensor], step: int) -> dict[str, dict[str, Tensor]]:
        """What becomes of this rank's gradients of a step on their way, by stage and name, where the compressor shows
        it: compressors are pure, so these are the values that the exchange sent. Collective; nothing is kept."""
        part = self._parts[0]
        if len(self._parts) > 1 or not hasattr(getattr(part, "compressor", None), "stages"):
            return {}
        places = [place for place, (name, _, _) in enumerate(self._rows) if name in gradients]
        layout = self.layout(tuple(places))
        context = ExchangeContext(layout, step, (Hyper(),) * len(places))
        flat = [memory_flat(gradients[segment.name]).to(torch.float32) for segment in layout.coded]
        x = torch.cat([*flat, torch.empty(0, dtype=torch.float32)])
        shown = part.compressor.stages(context, x, part.stages.agree, part.net.rank)
        return {stage: {s.name: values[s.span] for s in layout.coded} for stage, values in shown.items()}

    @property
    def keeps(self) -> bool:
        """Whether anything is kept from one step to the next."""
        return any(self.aggregator.kinds().values())

    def kept(self, kind: str) -> dict[str, Tensor]:
        """What memories keep of a kind, by parameter name; nothing where they have no such kind."""
        states = [part.memory.state for part in self._parts if _memory(part) is not None]
        return {name: vector for state in states for name, vector in state.named.get(kind, {}).items()}

    def keep(self, kind: str, vectors: Mapping[str, Tensor]) -> None:
        """Replace what memories keep of a kind; a rank that follows its leader keeps nothing."""
        for part in () if self.follows else self._parts:
            own = {name: vector for name, vector in vectors.items() if self._part_of(name) is part}
            if own:
                part.memory.load_state_dict({**part.memory.state_dict(), kind: own})

    @property
    def copied(self) -> frozenset[str]:
        """The parameters of which there is a memory to copy, so that their exchanges can be taken back."""
        return frozenset(name for name, _, _ in self._rows if _memory(self._part_of(name)) is not None)

    def copy_of(self, name: str) -> Any:
        """Copies of all that is kept of a parameter whose method has a memory."""
        part = self._part_of(name)
        return part.memory.copy_of(name), part.collective.copy_of(name)

    def put_back(self, name: str, copies: Any) -> None:
        """Keep again what ``copy_of`` gave."""
        part, (kept, served) = self._part_of(name), copies
        part.memory.put_back(name, kept)
        part.collective.put_back(name, served)

    def leftover_kind(self, name: str) -> str | None:
        """The kind of vector in which what was not sent of a parameter is kept; None where nothing is."""
        memory = _memory(self._part_of(name))
        return next(iter(memory.state.leftovers), None) if memory is not None else None

    def shared(self, vectors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Scaled so that the mean over all ranks is the mean over those that compress."""
        return self.aggregator.share(vectors) if isinstance(self.aggregator, Hierarchy) else vectors

    @property
    def _compressors(self) -> list[Any]:
        return [part.compressor for part in self._parts if hasattr(part, "compressor")]

    def density(self, step: int) -> float | None:
        """The share of elements that a step sends, of several methods the smallest; None where there is none."""
        return min((one.density(step) for one in self._compressors if hasattr(one, "density")), default=None)

    @property
    def density_factor(self) -> float:
        return next((one.factor for one in self._compressors if hasattr(one, "factor")), 1.0)

    @density_factor.setter
    def density_factor(self, factor: float) -> None:
        for one in self._compressors:
            if hasattr(one, "factor"):
                one.factor = factor


def _memory(part: Any) -> Any:
    """The memory of an aggregator; None where it has none."""
    return getattr(part, "memory", None)


def _as_it_is(part: Any, nets: Nets) -> Aggregator:
    """The aggregator where there is nothing to average: a mean is handed on as it is, in no shorter type."""
    if isinstance(part, Mixture):
        return Mixture([_as_it_is(member, nets) for member in part.members], part.place_of)
    return part if isinstance(part, Exchange) else NoopMean(nets.between)
