"""Running means and variances, which ranks that train alone measure each on its own inputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from thinwire.engine.local_gradients import average_parameters
from thinwire.transport import Net


class RunningStatistics:
    """Those of a model's BatchNorm layers, and of whatever else keeps a ``running_mean`` and a ``running_var``."""

    def __init__(self, module: nn.Module) -> None:
        found = [(_buffer(one, "running_mean"), _buffer(one, "running_var")) for one in module.modules()]
        self._pairs = [(mean, var) for mean, var in found if mean is not None and var is not None]
        counts = (_buffer(one, "num_batches_tracked") for one in module.modules())
        self._counts = [count for count in counts if count is not None]

    def combine(self, net: Net) -> None:
        """Give all ranks those of all inputs: the mean of the means; the mean of the variances, and the variance of the
        means; the largest number of batches. Collective."""
        if not self._pairs:
            return
        own = [mean.clone() for mean, _ in self._pairs]
        average_parameters([mean for mean, _ in self._pairs], net, "average running statistics")
        with torch.no_grad():
            for (mean, var), before in zip(self._pairs, own, strict=True):
                var.add_((before - mean).square())
        average_parameters([var for _, var in self._pairs], net, "average running statistics")
        if self._counts:
            counts = torch.stack([count.detach().reshape(()) for count in self._counts])
            net.all_reduce(counts, largest=True)
            for count, most in zip(self._counts, counts, strict=True):
                count.copy_(most)

    @contextmanager
    def combined(self, net: Net) -> Iterator[None]:
        """The same for the time of the block; collective at its beginning."""
        tensors = [*(tensor for pair in self._pairs for tensor in pair), *self._counts]
        own = [tensor.clone() for tensor in tensors]
        self.combine(net)
        try:
            yield
        finally:
            for tensor, before in zip(tensors, own, strict=True):
                tensor.copy_(before)


def _buffer(module: nn.Module, name: str) -> Tensor | None:
    found = getattr(module, name, None)
    return found if isinstance(found, Tensor) else None
