"""What a wire's method keeps, by parameter name: how it is read, replaced, averaged and applied."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from thinwire.edges.optimizer import OptimizerView
from thinwire.engine.hierarchy import Groups, Hierarchy, sends_nothing
from thinwire.engine.layout import shaped_like
from thinwire.engine.local_gradients import average_parameters
from thinwire.engine.protocols import Aggregator
from thinwire.engine.worker import Worker
from thinwire.methods import Method
from thinwire.monitor.health import Guard
from thinwire.transport import TorchNet, overhead


class Keeper:
    """The part of a wire that holds things between two steps; ``thinwire.edges.wire`` sets its attributes."""

    model: DistributedDataParallel
    method: Method
    _aggregator: Aggregator
    _view: OptimizerView
    _parameters: dict[str, Tensor]  # in the model's order
    _names: list[str]
    _net: TorchNet  # all ranks
    _wire_net: TorchNet  # those that compress
    _groups: Groups | None
    _worker: Worker
    _guard: Guard | None
    _pending: dict[str, Tensor]  # gradients that enter the next exchange
    _step: int
    _steps_before: int  # of them were made by the wire whose state was loaded
    _optimizer_steps: int

    @property
    def _compresses(self) -> bool:
        """Not where all ranks are on one machine: their exact mean is there without it."""
        return not (sends_nothing(self._groups) and self.method.estimates_mean)

    @property
    def _follows(self) -> bool:
        """Whether this rank stands behind its machine's first, and keeps nothing."""
        return isinstance(self._aggregator, Hierarchy) and not self._aggregator.leads

    @property
    def _memory(self) -> Any:
        """The memory of the method; None where it has none."""
        inner = self._aggregator.inner if isinstance(self._aggregator, Hierarchy) else self._aggregator
        return getattr(inner, "memory", None)

    def _velocity(self) -> dict[str, Tensor]:
        return dict(self._memory.state.named.get("velocity", {})) if self._memory is not None else {}

    def _mean_velocity(self) -> dict[str, Tensor]:
        mine = self._velocity()
        if isinstance(self._aggregator, Hierarchy):
            mine = self._aggregator.share(mine)
        return self._mean_over_ranks(mine)

    def _set_memory(self, kind: str, vectors: dict[str, Tensor]) -> None:
        if vectors and not self._follows:
            self._memory.load_state_dict({**self._memory.state_dict(), kind: vectors})

    @property
    def _weight(self) -> float:
        return self._aggregator.weight if isinstance(self._aggregator, Hierarchy) else 1.0

    def _reunite(self) -> None:
        """Make the replicas equal again after a method that lets them drift apart: parameters and optimizer state."""
        if self.method.replicas_drift:
            tensors = list(self._parameters.values())
            for parameter in self._parameters.values():
                for value in self._view.optimizer.state.get(parameter, {}).values():
                    if isinstance(value, Tensor) and value.is_floating_point() and value.shape == parameter.shape:
                        tensors.append(value)
            with overhead(self._net):
                average_parameters(tensors, self._net)

    def _apply(self, mean: dict[str, Tensor]) -> None:
        """Step by an update that momentum has acted on already: w -= lr * mean."""
        with torch.no_grad():
            for name, update in mean.items():
                parameter = self._parameters[name]
                hyper = self._view.hyper(parameter)
                rate = hyper.lr if hyper.maximize else -hyper.lr
                parameter.add_(shaped_like(update, parameter.detach()), alpha=rate)

    def _leftover(self) -> dict[str, Tensor]:
        numels = {name: p.numel() for name, p in self._parameters.items()}
        return self._aggregator.leftover(numels, {name: self._view.hyper(p).lr for name, p in self._parameters.items()})

    def _mean_over_ranks(self, mine: dict[str, Tensor]) -> dict[str, Tensor]:
        """The mean of per-parameter vectors over all ranks; a rank without one counts as zero."""
        sizes = [p.numel() for p in self._parameters.values()]
        flat = torch.zeros(sum(sizes), dtype=torch.float32, device=self._net.compute_device)
        views = dict(zip(self._names, flat.split(sizes), strict=True))
        for name, tensor in mine.items():
            views[name].copy_(tensor.reshape(-1))
        self._net.stage = "move what was not sent"
        with overhead(self._net):
            self._net.all_reduce(flat)
        flat.div_(self._net.size)
        return {name: view.clone() for name, view in views.items()}
