"""A wire's watch over its training: the replicas, and what the guard measures and decides."""

from __future__ import annotations

from typing import Any

from thinwire.edges.kept import Keeper
from thinwire.engine.hierarchy import Hierarchy
from thinwire.engine.norms import Norms
from thinwire.monitor.replicas import check_replicas
from thinwire.transport import overhead


class Watcher(Keeper):
    """The part of a wire that watches."""

    _check_every: int | None  # steps between two checks of the replicas
    _checked: int  # passes at the last one
    _passes: int  # backward passes that were exchanged: the same on all ranks, also when one of them took no step

    def _check_replicas(self, equal: bool) -> None:
        """Every so many steps, where they should be ``equal`` at all: replicas that drift are after an averaging."""
        if self._check_every is None or not equal or self._passes - self._checked < self._check_every:
            return
        if self.model._join_config.enable:
            return  # ranks that ran out of inputs take no steps until DDP gives them the others' model
        self._checked = self._passes
        self._worker.wait()
        ignored: set[str] = getattr(self.model, "parameters_to_ignore", set())
        whole = {name: p for name, p in self.model.module.named_parameters() if name not in ignored}
        with overhead(self._net):
            check_replicas(whole, self._net, self._optimizer_steps)

    def _watch(self, step: int, norms: Norms) -> None:
        """After the last exchange of a measured step, on the worker's thread: the same decision on all ranks."""
        assert self._guard is not None
        self._guard.conclude(step, norms, self._net, self._density(step))
        self._set_density_factor(self._guard.density_factor)

    @property
    def _compressor(self) -> Any:
        """The compressor of the method; None where it has none."""
        inner = self._aggregator.inner if isinstance(self._aggregator, Hierarchy) else self._aggregator
        return getattr(inner, "compressor", None)

    def _density(self, step: int | None = None) -> float | None:
        compressor = self._compressor
        return compressor.density(self._step if step is None else step) if hasattr(compressor, "density") else None

    def _set_density_factor(self, factor: float) -> None:
        if hasattr(self._compressor, "factor"):
            self._compressor.factor = factor
