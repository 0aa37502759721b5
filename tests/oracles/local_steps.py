"""Local steps with an outer step, in NumPy: the algorithm line by line, for any inner optimizer and any coding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Vector = np.ndarray


def local_steps(
    x0: Vector,
    gradient: Callable[[int, Vector, int], Vector],
    step: Callable[[int], Callable[[Vector, Vector], Vector]],
    *,
    ranks: int,
    steps: int,
    every: int | Callable[[int], int],
    code: Callable[[Vector], Vector] = lambda a: a,
    beta: float = 1.0,
    outer_lr: float = 1.0,
    mu: float = 0.0,
    nesterov: bool = True,
) -> dict[str, Any]:
    """``step(rank)`` makes an optimizer's step(x, g) -> x; ``code`` is what of a vector is sent and arrives; ``every``
    is how many steps a round has, or says it of the n-th step."""
    theta, m = x0.copy(), np.zeros_like(x0)
    x = [theta.copy() for _ in range(ranks)]
    e = [np.zeros_like(x0) for _ in range(ranks)]
    optimizers = [step(rank) for rank in range(ranks)]
    trajectory, sent, put_in = [], np.zeros_like(x0), np.zeros_like(x0)
    in_round, ends = 0, []
    for n in range(steps):
        for i in range(ranks):
            x[i] = optimizers[i](x[i], gradient(i, x[i], n))
        in_round += 1
        ends.append(in_round >= (every(n) if callable(every) else every))
        if ends[-1]:
            in_round = 0
            d = np.zeros_like(x0)
            for i in range(ranks):
                put_in += theta - x[i]
                a = beta * e[i] + (theta - x[i])
                v = code(a)
                e[i] = a - v
                sent += v
                d += v / ranks
            m = mu * m + d
            theta = theta - outer_lr * (d if not mu else d + mu * m if nesterov else m)
            x = [theta.copy() for _ in range(ranks)]
        trajectory.append([one.copy() for one in x])
    return {"x": trajectory, "theta": theta, "m": m, "e": e, "sent": sent, "put_in": put_in, "ends": ends}


def sgd(lr: float, momentum: float = 0.0) -> Callable[[int], Callable[[Vector, Vector], Vector]]:
    def make(_: int) -> Callable[[Vector, Vector], Vector]:
        buffer: list[Vector] = []

        def step(x: Vector, g: Vector) -> Vector:
            if momentum:
                buffer[:] = [momentum * buffer[0] + g if buffer else g]
                g = buffer[0]
            return x - lr * g

        return step

    return make


def adamw(lr: float, decay: float) -> Callable[[int], Callable[[Vector, Vector], Vector]]:
    """With betas of .9 and .999, and eps 1e-8."""

    def make(_: int) -> Callable[[Vector, Vector], Vector]:
        state: dict[str, Any] = {"t": 0, "m": 0.0, "v": 0.0}

        def step(x: Vector, g: Vector) -> Vector:
            state["t"] += 1
            state["m"] = 0.9 * state["m"] + 0.1 * g
            state["v"] = 0.999 * state["v"] + 0.001 * g * g
            root = np.sqrt(state["v"] / (1 - 0.999 ** state["t"])) + 1e-8
            return x * (1 - lr * decay) - lr * state["m"] / (1 - 0.9 ** state["t"]) / root

        return step

    return make


def largest(share: float) -> Callable[[Vector], Vector]:
    """The largest k = max(1, round(share n)) of all elements, the lower index first where they are equal."""

    def code(a: Vector) -> Vector:
        k = max(1, round(share * a.size))
        kept = np.argsort(-np.abs(a), kind="stable")[:k]
        v = np.zeros_like(a)
        v[kept] = a[kept]
        return v

    return code
