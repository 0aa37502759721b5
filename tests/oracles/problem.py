"""The problem every oracle solves: a tanh network with softmax cross-entropy, in NumPy and in torch.

    a = tanh(x W1^T + b1);  z = a W2^T + b2;  loss = mean over the batch of -log softmax(z)[label]

Data depend on (seed, worker, step) alone, so a simulation and a real process see the same batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

Params = dict[str, np.ndarray]
BATCH = 8


@lru_cache(maxsize=10_000)
def batch(inputs: int, classes: int, seed: int, worker: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """x: (BATCH, inputs) float32, labels: (BATCH,) int64."""
    rng = np.random.default_rng([seed, 2, worker, step])
    return rng.standard_normal((BATCH, inputs)).astype(np.float32), rng.integers(0, classes, BATCH)


@dataclass(frozen=True)
class Problem:
    """sizes: inputs, hidden units, classes. dead_input: feature 0 is always 0, so gradients are exactly 0.

    noise: relative size of a perturbation of every gradient; it asks whether a trajectory hinges on rounding.
    """

    sizes: tuple[int, int, int] = (6, 9, 5)
    seed: int = 0
    dead_input: bool = False
    noise: float = 0.0
    noise_seed: int = 0

    def initial(self) -> Params:
        """Parameters before the first step, in named_parameters() order; exactly representable in float32."""
        inputs, hidden, classes = self.sizes
        rng = np.random.default_rng([self.seed, 1])
        shapes = {
            "hidden.weight": (hidden, inputs),
            "hidden.bias": (hidden,),
            "out.weight": (classes, hidden),
            "out.bias": (classes,),
        }
        return {
            name: (rng.standard_normal(shape) * 0.4).astype(np.float32).astype(np.float64)
            for name, shape in shapes.items()
        }

    def batch(self, worker: int, step: int) -> tuple[np.ndarray, np.ndarray]:
        """x: (BATCH, inputs) float32, labels: (BATCH,) int64 of this worker at this step."""
        x, labels = batch(self.sizes[0], self.sizes[2], self.seed, worker, step)
        if self.dead_input:
            x = x * (np.arange(self.sizes[0]) > 0).astype(np.float32)
        return x, labels

    def gradient(self, w: Params, worker: int, step: int) -> Params:
        """Gradient of the mean loss of this worker's batch, float64 forward and backward."""
        x, labels = self.batch(worker, step)
        x = x.astype(np.float64)
        a = np.tanh(x @ w["hidden.weight"].T + w["hidden.bias"])  # (BATCH, hidden)
        z = a @ w["out.weight"].T + w["out.bias"]  # (BATCH, classes)
        p = np.exp(z - z.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        dz = (p - np.eye(self.sizes[2])[labels]) / BATCH  # (BATCH, classes)
        da = (dz @ w["out.weight"]) * (1 - a * a)  # (BATCH, hidden)
        gradient = {"hidden.weight": da.T @ x, "hidden.bias": da.sum(axis=0)}
        gradient |= {"out.weight": dz.T @ a, "out.bias": dz.sum(axis=0)}
        if self.noise:
            rng = np.random.default_rng([self.noise_seed, 3, worker, step])
            for g in gradient.values():  # exact zeros stay exact: they are exact in float32 too
                g += self.noise * np.abs(g).max() * rng.uniform(-1, 1, g.shape) * (g != 0)
        return gradient

    def module(self) -> torch.nn.Module:
        """The same network in torch, float32, parameters named and ordered as initial()."""
        import torch

        class Network(torch.nn.Module):
            def __init__(self, inputs: int, hidden: int, classes: int) -> None:
                super().__init__()
                self.hidden = torch.nn.Linear(inputs, hidden)
                self.out = torch.nn.Linear(hidden, classes)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.out(torch.tanh(self.hidden(x)))

        model = Network(*self.sizes)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(torch.from_numpy(self.initial()[name]))
        return model

    def loss(self, model: torch.nn.Module, worker: int, step: int) -> torch.Tensor:
        """The torch loss whose gradient is gradient(): model may be wrapped in DDP."""
        import torch

        x, labels = self.batch(worker, step)
        return torch.nn.functional.cross_entropy(model(torch.from_numpy(x)), torch.from_numpy(labels))


@dataclass(frozen=True)
class SharpProblem(Problem):
    """Gradients are those of other parameters, as with SAM: ``away`` from the ones that they are for."""

    def away(self, step: int) -> Params:
        """What lies between them; exactly representable in float32."""
        rng = np.random.default_rng([self.seed, 4, step])
        shapes = {name: value.shape for name, value in self.initial().items()}
        return {
            name: (rng.standard_normal(shape) * 0.05).astype(np.float32).astype(np.float64)
            for name, shape in shapes.items()
        }

    def gradient(self, w: Params, worker: int, step: int) -> Params:
        away = self.away(step)
        return super().gradient({name: value + away[name] for name, value in w.items()}, worker, step)
