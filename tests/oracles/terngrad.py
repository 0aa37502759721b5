"""TernGrad (Wen et al.): N workers in NumPy. Both topologies compute the same mean."""

from __future__ import annotations

import numpy as np

from oracles.optimizers import SGD, Adam
from oracles.problem import Params, Problem
from oracles.random_numbers import key, uniform
from oracles.selection import copy, excluded


def clipped(g: np.ndarray, c: float | None) -> np.ndarray:
    """Eq. 21, f(g), as float32; sigma is the population standard deviation of this tensor on this worker."""
    if c is None:
        return g.astype(np.float32)
    limit = np.float32(c * g.std())
    return np.clip(g.astype(np.float32), -limit, limit)


def trits(g: np.ndarray, s: np.float32, u: np.ndarray) -> np.ndarray:
    """Eq. 1 and 3 without the scaler: sign(g) with probability |g| / s, else 0. Compared in float32."""
    assert g.dtype == u.dtype == np.float32 and isinstance(s, np.float32)
    b = u * s < np.abs(g)  # Eq. 3
    return np.sign(g) * b


def simulate(
    problem: Problem,
    N: int,
    steps: int,
    optimizer: SGD | Adam,
    *,
    seed: int,
    clip_sigma: float | None = 2.5,
    share_scaler: bool = True,
    scaler: str = "tensor",
    dense_below: int = 1024,
    exclude: tuple[str, ...] = (),
    topology: str = "sharded",
) -> list[Params]:
    """Parameters after each step; all workers hold the same ones."""
    w = problem.initial()
    after = optimizer.start()
    trajectory = []
    for t in range(steps):
        g = [problem.gradient(w, r, t) for r in range(N)]  # Alg. 1 lines 1-2
        mean: Params = {}
        # 3.3, "a large global maximum scaler": of everything that is ternarized, on each worker
        small = {name for name, x in w.items() if dense_below > 0 and (x.ndim <= 1 or x.size < dense_below)}
        coded = [name for name in w if name not in small and not excluded(name, exclude)]
        magnitudes = [[np.abs(clipped(g[r][name].ravel(), clip_sigma)).max() for name in coded] for r in range(N)]
        largest = [max(found, default=np.float32(0)) for found in magnitudes]
        for name in w:
            if name not in coded:  # "the last layer in float", and what is small
                mean[name] = np.mean([g[r][name] for r in range(N)], axis=0)
                continue
            f = [clipped(g[r][name].ravel(), clip_sigma) for r in range(N)]  # Eq. 21
            s = [np.abs(x).max() for x in f] if scaler == "tensor" else list(largest)  # Eq. 2
            if share_scaler:
                s = [max(s)] * N  # Eq. 4
            u = [uniform(key(seed, t, r, name), f[r].size) for r in range(N)]
            ternary = [float(s[r]) * trits(f[r], s[r], u[r]) for r in range(N)]  # Alg. 1 line 3, Eq. 1
            mean[name] = (np.sum(ternary, axis=0) / N).reshape(w[name].shape)  # Alg. 1 line 7
        after(w, mean, t)  # Alg. 1 line 6, with any optimizer
        trajectory.append(copy(w))
    return trajectory
