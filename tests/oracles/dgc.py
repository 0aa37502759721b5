"""Deep Gradient Compression (Lin et al.): N workers in NumPy. Equation and line numbers are the paper's."""

from __future__ import annotations

import numpy as np

from oracles.optimizers import SGD
from oracles.problem import Params, Problem
from oracles.selection import copy, excluded, exponential, flatten, largest, quotas, unflatten


def rate_ratio(sgd: SGD, t: int, name: str) -> float:
    """eta_{t-1} / eta_t, as in dist-EF-blockSGDM, Algorithm 4: what waits keeps the weight of its own steps."""
    return sgd.lr_at(t - 1, name) / sgd.lr_at(t, name) if t else 1.0


def steady_decay(sgd: SGD, t: int, name: str) -> float:
    """wd (1 + m + m^2 + ...): how many times its weights momentum takes off a parameter that stands still. The paper
    does not speak of weight decay; its authors' code applies it beside the gradients that are compressed."""
    return sgd.weight_decay_of(name) / (1 - sgd.momentum_at(t))


def clip(g: Params, threshold: float) -> Params:
    """2.2, Local Gradient Clipping, with the rule of torch.nn.utils.clip_grad_norm_."""
    norm = np.sqrt(sum((x * x).sum() for x in g.values()))
    factor = min(1.0, threshold / (norm + 1e-6))
    return {name: factor * x for name, x in g.items()}


def simulate(
    problem: Problem,
    N: int,
    steps: int,
    sgd: SGD,
    *,
    density: float,
    momentum_correction: bool = True,
    factor_masking: bool = True,
    lr_rescaling: bool = False,
    direct_decay: bool = True,
    clip_norm: float | None = None,
    warmup: int | None = None,
    dense_below: int = 0,
    exclude: tuple[str, ...] = (),
    values: str = "fp32",
    scope: str = "balanced",
) -> list[Params]:
    """Parameters after each step; all workers hold the same ones."""
    assert values == "fp32", "nothing is rounded here"
    w = problem.initial()
    dense = {n for n, x in w.items() if dense_below > 0 and (x.ndim < 2 or x.size < dense_below)}
    dense |= {name for name in w if excluded(name, exclude)}
    coded = [name for name in w if name not in dense]
    scopes = [coded] if scope == "model" else [[name] for name in coded]
    u = [{name: np.zeros_like(x) for name, x in w.items()} for _ in range(N)]  # Alg. 3 line 1
    v = [{name: np.zeros_like(x) for name, x in w.items()} for _ in range(N)]
    # u and v as in Eq. 4 and 7; Algorithms 3 and 4 swap the letters
    after = sgd.start()  # Alg. 1 line 15, when momentum is not corrected
    trajectory = []
    for t in range(steps):
        m = sgd.momentum_at(t)
        for name in w if lr_rescaling else ():
            for r in range(N):
                v[r][name] *= rate_ratio(sgd, t, name)
        total = {name: np.zeros_like(x) for name, x in w.items()}
        for r in range(N):
            g = problem.gradient(w, r, t)  # Alg. 3 lines 3-7
            if clip_norm is not None:
                # "We scale the threshold by N^-1/2", before accumulation; Eq. 3's gradients carry 1/N, ours do not.
                g = clip(g, clip_norm * N**-0.5 * N)
            for name in w:
                if momentum_correction:
                    apart = direct_decay and factor_masking and name not in dense  # masking must not clear it
                    d = g[name] + (0 if apart else sgd.weight_decay_of(name)) * w[name]
                    u[r][name] = m * u[r][name] + d  # Eq. 4 and Eq. 7, first term
                    v[r][name] += m * u[r][name] + d if sgd.nesterov else u[r][name]  # second term
                    if direct_decay and not apart:
                        v[r][name] -= steady_decay(sgd, t, name) * w[name]  # which all workers apply now
                else:
                    v[r][name] += g[name]  # Eq. 6, first term (Alg. 1 lines 3-7)
            for name in dense:
                total[name] += v[r][name]  # all of v, never masked
                v[r][name][...] = 0
            sizes = [sum(w[name].size for name in names) for names in scopes]
            share = exponential(t, density, warmup)
            for names, k in zip(scopes, quotas(scope, share, sizes), strict=True):
                x = flatten(v[r], names)
                sent = np.zeros(x.size, bool)
                sent[largest(scope, x, k, share)] = True  # Alg. 3 lines 12-13
                for name, mask in unflatten(sent, w, names).items():
                    total[name] += np.where(mask, v[r][name], 0)  # Alg. 3 lines 14 and 17
                    v[r][name][mask] = 0  # Alg. 3 line 15
                    if factor_masking:
                        u[r][name][mask] = 0  # 2.3, Momentum Factor Masking
        mean = {name: x / N for name, x in total.items()}
        if momentum_correction:
            for name in w:
                if direct_decay:
                    mean[name] = mean[name] + steady_decay(sgd, t, name) * w[name]
                w[name] -= sgd.lr_at(t, name) * mean[name]  # third term of Eq. 4 / Eq. 7
        else:
            after(w, mean, t)  # Eq. 6: momentum and weight decay behind the aggregation
        trajectory.append(copy(w))
    return trajectory
