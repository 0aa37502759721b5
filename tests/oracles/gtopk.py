"""gTop-k S-SGD (Shi et al.): N workers in NumPy, with the butterfly for any N and the corrected put-back.

Algorithm 4 line 10 compares with the final mask only. An index rejected on my path can come back through
another pair; my contribution is then not in the result and must stay with me. So a rank tracks which of its
entries are still alive.
"""

from __future__ import annotations

import numpy as np

from oracles.dgc import clip, rate_ratio, steady_decay
from oracles.optimizers import SGD, Adam
from oracles.problem import Params, Problem
from oracles.selection import copy, excluded, flatten, kept, listed, top_k, unflatten

Set = dict[int, float]  # index -> value: a sparse vector [V, I]


def merge(a: Set, b: Set, k: int) -> Set:
    """Definition 1, the operation T: the k largest |a + b|; ties go to the lower index."""
    union = sorted(a.keys() | b.keys())
    values = np.array([a.get(i, 0.0) + b.get(i, 0.0) for i in union])
    return {union[j]: values[j] for j in top_k(values, k)}


def global_top_k(sets: list[Set], k: int) -> tuple[list[Set], list[set[int]]]:
    """Algorithm 3 as a butterfly. Returns per rank the result and its own accepted indices."""
    N = len(sets)
    p2 = 1 << (N.bit_length() - 1)  # the largest power of two <= N
    path = list(sets)  # what each rank holds
    alive = [set(s) for s in sets]  # which of its own entries are in it
    for extra in range(p2, N):  # ranks beyond p2 hand their set to a proxy
        proxy = extra - p2
        path[proxy] = merge(path[proxy], path[extra], k)
        alive[proxy] &= path[proxy].keys()
        alive[extra] &= path[proxy].keys()
    distance = 1
    while distance < p2:  # Alg. 3 lines 4-18: log2 P rounds, here both partners merge
        path[:p2] = [merge(path[r], path[r ^ distance], k) for r in range(p2)]
        for r in range(N):  # an extra's entries live and die on its proxy's path
            alive[r] &= path[r % p2].keys()
        distance *= 2
    return [path[r % p2] for r in range(N)], alive  # Alg. 3 line 19: extras get the result


def simulate(
    problem: Problem,
    N: int,
    steps: int,
    optimizer: SGD | Adam,
    *,
    density: float,
    momentum_correction: bool | None = None,
    factor_masking: bool = False,
    lr_rescaling: bool = False,
    direct_decay: bool = False,
    clip_norm: float | None = None,
    warmup: int | None = None,
    exclude: tuple[str, ...] = (),
    ledger: list[tuple[np.ndarray, np.ndarray, np.ndarray]] | None = None,
) -> list[Params]:
    """Parameters after each step. ledger: (what was put in, what was applied, residuals), sums of ranks."""
    if momentum_correction is None:
        momentum_correction = isinstance(optimizer, SGD)
    w = problem.initial()
    names = [name for name in w if not excluded(name, exclude)]  # the index space of the selection
    dense = [name for name in w if name not in names]
    n = sum(w[name].size for name in names)
    u = [{name: np.zeros_like(x) for name, x in w.items()} for _ in range(N)]
    v = [np.zeros(n) for _ in range(N)]  # Alg. 4 line 1 (G_0 = 0)
    after = optimizer.start()
    trajectory = []
    for t in range(steps):
        k = kept(listed(t, density, warmup), n)
        sets: list[Set] = []
        mean = {name: np.zeros_like(w[name]) for name in dense}
        put_in = np.zeros(n)
        for r in range(N):
            x = problem.gradient(w, r, t)  # Alg. 4 line 3
            if clip_norm is not None:
                x = clip(x, clip_norm * N**0.5)  # as in DGC 2.2
            if momentum_correction:  # DGC's Eq. 4 / Eq. 7 in front
                assert isinstance(optimizer, SGD)
                for name in w:
                    m, decay = optimizer.momentum_at(t), optimizer.weight_decay_of(name)
                    apart = direct_decay and factor_masking and name in names  # as in the oracle of DGC
                    d = x[name] + (0 if apart else decay) * w[name]
                    u[r][name] = m * u[r][name] + d
                    x[name] = m * u[r][name] + d if optimizer.nesterov else u[r][name]
                    if direct_decay and not apart:
                        x[name] = x[name] - steady_decay(optimizer, t, name) * w[name]
            if lr_rescaling:
                assert isinstance(optimizer, SGD)
                v[r] *= flatten({name: np.full_like(w[name], rate_ratio(optimizer, t, name)) for name in names}, names)
            put_in += flatten(x, names)
            v[r] += flatten(x, names)  # Alg. 4 line 4
            sets.append({int(i): v[r][i] for i in top_k(v[r], k)})  # Alg. 4 lines 5-7
            for name in dense:
                mean[name] += x[name] / N
        results, accepted = global_top_k(sets, k)  # Alg. 4 line 9
        for r in range(N):
            v[r][list(accepted[r])] = 0  # Alg. 4 lines 8 and 10 in one, with the corrected put-back
            if factor_masking:  # DGC 2.3, of what this rank sent and everybody applied
                velocity = flatten(u[r], names)
                velocity[list(accepted[r])] = 0
                u[r] |= unflatten(velocity, w, names)
        total = np.zeros(n)
        for i, value in results[0].items():
            total[i] = value
        mean |= unflatten(total / N, w, names)  # Eq. 3: the sum over P workers, divided by P
        if momentum_correction:
            assert isinstance(optimizer, SGD)
            for name in w:
                if direct_decay:
                    mean[name] = mean[name] + steady_decay(optimizer, t, name) * w[name]
                w[name] -= optimizer.lr_at(t, name) * mean[name]
        else:
            after(w, mean, t)  # Alg. 4 line 11
        trajectory.append(copy(w))
        if ledger is not None:
            ledger.append((put_in, total, np.sum(v, axis=0)))
    return trajectory
