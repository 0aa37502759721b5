"""dist-EF-blockSGDM (Zheng et al.), Algorithm 4: N workers and the server in NumPy.

With an optimizer that keeps its own momentum and weight decay (Adam) it is Algorithm 3: q is the gradient itself, and
what the server answers is what the optimizer gets.
"""

from __future__ import annotations

import numpy as np

from oracles.dgc import clip
from oracles.optimizers import SGD, Adam
from oracles.problem import Params, Problem
from oracles.selection import copy, excluded

WHOLE_BELOW = 4096  # a smaller tensor is served whole, by one rank


def runs(start: int, stop: int, block: int | str) -> list[slice]:
    """The blocks G_b of elements start .. stop-1: all in one, or runs of `block` (the last one shorter)."""
    if block == "tensor":
        return [slice(start, stop)]
    return [slice(b, min(b + int(block), stop)) for b in range(start, stop, int(block))]


def C(v: np.ndarray, blocks: list[slice]) -> np.ndarray:
    """3.2: ||v_Gb||_1 / d_b * sign(v_Gb) for each block b; sign(0) = +1."""
    out = np.empty_like(v)
    for b in blocks:
        out[b] = np.abs(v[b]).sum() / v[b].size * np.where(v[b] < 0, -1.0, 1.0)
    return out


def simulate(
    problem: Problem,
    N: int,
    steps: int,
    optimizer: SGD | Adam,
    *,
    block: int | str = "tensor",
    two_way: bool = True,
    topology: str = "sharded",
    clip_norm: float | None = None,
    dense_below: int = 1024,
    exclude: tuple[str, ...] = (),
    ledger: list[tuple[Params, Params]] | None = None,
) -> list[Params]:
    """Parameters after each step. ledger: per step the mean of what entered and all errors kept (Lemma 3)."""
    adam = optimizer.start() if isinstance(optimizer, Adam) else None
    sgd = optimizer if isinstance(optimizer, SGD) else SGD(lr=optimizer.lr)  # its rate; no momentum, no decay in front
    x = problem.initial()
    zeros = {name: np.zeros(w.size) for name, w in x.items()}
    m = [copy(zeros) for _ in range(N)]  # line 2
    e = [copy(zeros) for _ in range(N)]
    e_server = copy(zeros)
    trajectory = []
    for t in range(steps):
        mu = sgd.momentum_at(t)
        g = [problem.gradient(x, i, t) for i in range(N)]
        if clip_norm is not None:
            g = [clip(gradient, clip_norm * N**0.5) for gradient in g]  # as in DGC 2.2
        entered, answered = copy(zeros), copy(x)
        for name, w in x.items():
            eta = sgd.lr_at(t, name)
            ratio = sgd.lr_at(t - 1, name) / eta if t > 0 else 0.0  # line 1: eta_{-1} = 0
            small = dense_below > 0 and (w.ndim <= 1 or w.size < dense_below)
            is_dense = small or excluded(name, exclude)  # no compression, so no error
            worker_blocks = runs(0, w.size, block)
            server_blocks = worker_blocks
            if topology == "sharded" and w.size >= WHOLE_BELOW:  # slice r is served by rank r
                cuts = [(w.size * r // N, w.size * (r + 1) // N) for r in range(N)]
                server_blocks = [b for start, stop in cuts for b in runs(start, stop, block)]
            pushed = np.zeros(w.size)
            for i in range(N):
                d = (g[i][name] + sgd.weight_decay_of(name) * w).ravel()
                m[i][name] = mu * m[i][name] + d  # line 5
                q = mu * m[i][name] + d if sgd.nesterov else m[i][name]  # the paper's form is Nesterov's
                p = q + ratio * e[i][name]  # line 6
                delta = p if is_dense else C(p, worker_blocks)  # line 7
                e[i][name] = p - delta  # line 9
                pushed += delta
                entered[name] += q / N
            p_server = pushed / N + ratio * e_server[name]  # line 11
            delta_server = C(p_server, server_blocks) if two_way and not is_dense else p_server  # line 12
            e_server[name] = p_server - delta_server  # line 13
            answered[name] = delta_server.reshape(w.shape)
            if adam is None:
                w -= eta * answered[name]  # line 8
        if adam is not None:
            adam(x, answered, t)
        trajectory.append(copy(x))
        if ledger is not None:
            ledger.append((entered, {k: e_server[k] + sum(e[i][k] for i in range(N)) / N for k in x}))
    return trajectory
