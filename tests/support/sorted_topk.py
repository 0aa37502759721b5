"""Vectors of every kind, and what a stable sort says of their largest elements."""

from __future__ import annotations

import numpy as np

NAN, INF = float("nan"), float("inf")
ODD = [0.0, -0.0, 1e-45, -1e-45, 1e-40, -1e-40, 2.0**-126, INF, -INF, NAN, -NAN, 3.4028235e38, 1.0, -1.0, 0.5]


def oracle(x: np.ndarray, k: int) -> list[int]:
    """A stable sort by falling magnitude, nan as large as inf: of equals the lower index comes first."""
    magnitude = np.abs(x)
    magnitude[np.isnan(magnitude)] = np.inf
    return sorted(np.argsort(-magnitude, kind="stable")[:k].tolist())


def vector(seed: int, size: int, flavour: str) -> np.ndarray:
    generator = np.random.default_rng(seed)
    x = generator.standard_normal(size).astype(np.float32)
    if flavour == "ties":
        return np.round(x).astype(np.float32)
    if flavour == "zeros":
        return np.where(generator.random(size) < 0.9, 0, x).astype(np.float32) * np.float32(-1)
    if flavour == "odd":
        return generator.choice(np.array(ODD, dtype=np.float32), size)
    if flavour == "denormal":
        return (x * np.float32(1e-42)).astype(np.float32)
    if flavour == "equal":
        return np.full(size, -2.5, dtype=np.float32)
    if flavour == "wide":
        return (x * 10.0 ** generator.integers(-37, 37, size)).astype(np.float32)
    return x


FLAVOURS = ["plain", "ties", "zeros", "odd", "denormal", "equal", "wide"]
