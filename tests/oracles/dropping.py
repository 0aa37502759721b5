"""Gradient dropping with local gradients (Aji and Heafield), Algorithms 1 and 2: N nodes in NumPy, in means.

The paper's G is a sum over nodes; here it is a mean, and so every local gradient enters divided by N.
"""

from __future__ import annotations

import numpy as np

from oracles.dgc import clip
from oracles.optimizers import SGD, Adam
from oracles.problem import Params, Problem
from oracles.selection import copy, drop_ratio, excluded, flatten, largest, quotas, unflatten


def simulate(
    problem: Problem,
    N: int,
    steps: int,
    optimizer: SGD | Adam,
    *,
    density: float,
    local: str | None = None,
    sync_every: int | None = 500,
    warmup: int | None = None,
    momentum_correction: bool = False,
    clip_norm: float | None = None,
    scope: str = "model",
    dense_below: int = 0,
    exclude: tuple[str, ...] = (),
    values: str = "fp32",
) -> list[list[Params]]:
    """Parameters after each step, one dict per node: with local gradients they differ between averagings."""
    assert values == "fp32", "nothing is rounded here"
    w = [problem.initial() for _ in range(N)]
    names = list(w[0])
    n = sum(x.size for x in w[0].values())
    place = unflatten(np.arange(n), w[0], names)
    small = {name for name, x in w[0].items() if dense_below > 0 and (x.ndim < 2 or x.size < dense_below)}
    dense = [name for name in names if name in small or excluded(name, exclude)]
    coded = [name for name in names if name not in dense]
    scopes = [flatten(place, some) for some in ([coded] if scope == "model" else [[name] for name in coded]) if some]
    u = [np.zeros(n) for _ in range(N)]
    E = [np.zeros(n) for _ in range(N)]
    after = [optimizer.start() for _ in range(N)]  # each node has its own optimizer state
    trajectory = []
    for t in range(steps):
        share = drop_ratio(t, density, warmup)
        L, S = [], []
        for r in range(N):
            g = problem.gradient(w[r], r, t)  # line 2
            if clip_norm is not None:
                g = clip(g, clip_norm * N**0.5)  # as in DGC 2.2; L is the clipped gradient, too
            x = flatten(g, names)
            if momentum_correction:  # DGC's Eq. 4 / Eq. 7 in front, without masking
                assert isinstance(optimizer, SGD) and not optimizer.bias_group
                m, d = optimizer.momentum_at(t), x + optimizer.weight_decay * flatten(w[r], names)
                u[r] = m * u[r] + d
                x = m * u[r] + d if optimizer.nesterov else u[r]
            L.append(x)
            E[r] += x  # line 3
            mask = np.zeros(n)
            for where, k in zip(scopes, quotas(scope, share, [each.size for each in scopes]), strict=True):
                mask[where[largest(scope, E[r][where], k, share)]] = 1  # lines 4-5
            for name in dense:
                mask[place[name]] = 1
            S.append(mask * E[r])  # line 6
            E[r] = (1 - mask) * E[r]  # line 7
        G = np.sum(S, axis=0) / N  # line 8
        for r in range(N):
            if local == "sum":
                combined = (G + L[r] / N) / 2  # line 11
                for name in dense:
                    combined[place[name]] = G[place[name]]  # all of L is in G
            elif local == "partial":
                combined = G - S[r] / N + L[r] / N  # line 13
            elif local == "error":
                combined = G + E[r] / N  # line 15
                E[r] = np.zeros(n)  # line 16
            else:
                combined = G  # Algorithm 1 line 9
            gradient = unflatten(combined, w[r], names)
            if momentum_correction:
                assert isinstance(optimizer, SGD)
                for name in names:
                    w[r][name] -= optimizer.lr_at(t, name) * gradient[name]
            else:
                after[r](w[r], gradient, t)  # line 17
        if local and sync_every and (t + 1) % sync_every == 0:  # 3: "we periodically average the parameters"
            average = {name: np.mean([w[r][name] for r in range(N)], axis=0) for name in names}
            w = [copy(average) for _ in range(N)]
        trajectory.append([copy(x) for x in w])
    return trajectory
