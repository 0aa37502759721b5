"""signSGD and Signum with majority vote (the baselines of Zheng et al., refs [3, 4]): N workers in NumPy."""

from __future__ import annotations

import numpy as np

from oracles.optimizers import SGD
from oracles.problem import Params, Problem
from oracles.random_numbers import coin, key
from oracles.selection import copy

SERVER = 0xFFFFFFFF  # the "rank" whose coins break a tied vote: the same on every rank


def simulate(problem: Problem, N: int, steps: int, sgd: SGD, topology: str = "sharded") -> list[Params]:
    """Parameters after each step; all workers hold the same ones. Who counts the votes changes nothing."""
    w = problem.initial()
    buffers = [{name: np.zeros(x.size) for name, x in w.items()} for _ in range(N)]
    trajectory = []
    for t in range(steps):
        m = sgd.momentum_at(t)
        g = [problem.gradient(w, r, t) for r in range(N)]
        for name, p in w.items():
            votes = np.zeros(p.size)
            for r in range(N):
                d = g[r][name].ravel()
                buffers[r][name] = m * buffers[r][name] + d  # Signum: the sign of the momentum
                x = d + m * buffers[r][name] if sgd.nesterov else buffers[r][name]
                undecided = coin(key(0, t, r, name), x.size) == 1
                negative = np.where(x == 0, undecided, x < 0)  # one bit: there is no third value
                votes += np.where(negative, -1.0, 1.0)
            undecided = coin(key(0, t, SERVER, name), p.size) == 1
            negative = np.where(votes == 0, undecided, votes < 0)
            vote = np.where(negative, -1.0, 1.0).reshape(p.shape)
            p -= sgd.lr_at(t, name) * (vote + sgd.weight_decay_of(name) * p)  # weight decay is never voted on
        trajectory.append(copy(w))
    return trajectory
