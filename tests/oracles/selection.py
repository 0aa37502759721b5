"""What the sparse methods share: k, the top-k rule, left-out names, the model as one vector, warm-ups."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

import numpy as np

from oracles.problem import Params


def kept(density: float, numel: int) -> int:
    """k of a scope of numel elements; Python's round, so halves go to the even side."""
    return max(1, round(density * numel))


def balanced(density: float, sizes: list[int]) -> list[int]:
    """k = min(n, c sqrt(n)) of every size n, c by bisection so that they are density * sum(n) together."""
    n = np.array(sizes, float)
    low, high = 0.0, float(np.sqrt(n.max(initial=1.0)))
    for _ in range(200):
        c = (low + high) / 2
        low, high = (c, high) if np.minimum(n, c * np.sqrt(n)).sum() < density * n.sum() else (low, c)
    return [max(1, round(float(k))) for k in np.minimum(n, high * np.sqrt(n))]


def quotas(scope: str, density: float, sizes: list[int]) -> list[int]:
    return balanced(density, sizes) if scope == "balanced" else [kept(density, size) for size in sizes]


def top_k(x: np.ndarray, k: int) -> np.ndarray:
    """Indices of the k largest |x| of a vector; of equal ones the lower index wins (a stable sort)."""
    return np.argsort(-np.abs(x), kind="stable")[:k]


def largest(scope: str, x: np.ndarray, k: int, density: float) -> np.ndarray:
    """Indices of the k largest |x|; with "chunk", of the largest of each 4,096 consecutive ones."""
    if scope != "chunk":
        return top_k(x, k)
    parts = [(start, x[start : start + 4096]) for start in range(0, x.size, 4096)]
    return np.concatenate([start + top_k(part, kept(density, part.size)) for start, part in parts])


def excluded(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def flatten(tensors: Params, names: list[str]) -> np.ndarray:
    """The named tensors, row-major, one behind the other."""
    return np.concatenate([tensors[name].ravel() for name in names])


def unflatten(vector: np.ndarray, like: Params, names: list[str]) -> Params:
    parts = np.split(vector, np.cumsum([like[name].size for name in names])[:-1])
    return {name: part.reshape(like[name].shape) for name, part in zip(names, parts, strict=True)}


def copy(w: Params) -> Params:
    return {name: value.copy() for name, value in w.items()}


def exponential(t: int, final: float, length: int | None) -> float:
    """DGC 2.3: 25 %, 6.25 %, 1.5625 %, 0.4 % in four equal stages, then the final density."""
    return max(final, 0.25 ** (4 * t // length + 1)) if length and t < length else final


def listed(t: int, final: float, length: int | None) -> float:
    """gTop-k IV: the densities [0.25, 0.0725, 0.015, 0.004] in four equal stages, never below the final one."""
    return max(final, (0.25, 0.0725, 0.015, 0.004)[4 * t // length]) if length and t < length else final


def drop_ratio(t: int, final: float, length: int | None) -> float:
    """Local gradients 5.1: R_t = R^max(1, T/t) is dropped, counting steps from 1, so 1 - R_t is kept."""
    return 1 - (1 - final) ** max(1.0, length / (t + 1)) if length else final
