"""Histograms of gradients while a recipe trains; for TernGrad those of its Figure 2."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from thinwire import Reducer
from thinwire.lab.recipes.events import Histogram, Histograms

NUM_BINS = 64
MOST_TENSORS = 8


class GradientTap:
    """Keeps this rank's own gradients of one backward pass, before they are exchanged."""

    def __init__(self, module: nn.Module) -> None:
        self.gradients: dict[str, Tensor] = {}
        self._handles = [
            parameter.register_hook(lambda grad, name=name: self._keep(name, grad))
            for name, parameter in _watched(module).items()
        ]

    def _keep(self, name: str, grad: Tensor) -> None:
        before = self.gradients.get(name)  # a parameter that is used twice gets its gradient in parts
        self.gradients[name] = grad.detach().clone() if before is None else before + grad.detach()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


def _watched(module: nn.Module) -> dict[str, nn.Parameter]:
    """At most MOST_TENSORS weights, spread over the model from the first to the last."""
    weights = [(name, p) for name, p in module.named_parameters() if p.requires_grad and p.dim() > 1]
    if len(weights) > MOST_TENSORS:
        gap = (len(weights) - 1) / (MOST_TENSORS - 1)
        weights = [weights[round(place * gap)] for place in range(MOST_TENSORS)]
    return dict(weights)


def histograms(spec: str, reducer: Reducer, module: nn.Module, tap: GradientTap, step: int) -> Histograms | None:
    """The tapped gradients and their means, on rank 0; every rank calls this after the step's backward pass.

    ``step`` counts from 0, as the exchange does. Where the compressor shows its ``stages`` also what became of them:
    with TernGrad clipped (Eq. 21) and ternary, the very values that this rank sent.
    """
    stages: dict[str, dict[str, Tensor]] = {"original": tap.gradients}
    stages |= reducer.running.stages(tap.gradients, step)
    parameters = dict(module.named_parameters())
    stages["averaged"] = {name: g for name in tap.gradients if (g := parameters[name].grad) is not None}
    if reducer.nets.own.rank != 0:
        return None
    found = {f"{name}/{stage}": _histogram(x) for stage, by_name in stages.items() for name, x in by_name.items()}
    return Histograms(spec=spec, step=step + 1, by_tag=found)


def _histogram(x: Tensor) -> Histogram:
    x = x.detach().reshape(-1).to(torch.float32)
    largest = float(x.abs().max()) or 1.0
    counts = torch.histc(x, NUM_BINS, -largest, largest)
    edges = torch.linspace(-largest, largest, NUM_BINS + 1)
    return Histogram(edges.tolist(), counts.tolist(), float(x.sum()), float(x.square().sum()))
