"""Density over time, in steps counted from 0: constants and the papers' warm-ups. Pure functions of the step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Schedule(Protocol):
    """Maps (step, final density) to the density of that step, in (0, 1]; the final one from ``steps`` on."""

    def density(self, step: int, final: float) -> float: ...


def _check_steps(steps: object) -> None:
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"a warm-up's steps must be a whole number of at least 1, not {steps!r}")


@dataclass(frozen=True)
class ExponentialWarmup:
    """DGC, section 2.3: 25 %, 6.25 %, 1.5625 %, 0.39 % for a quarter of ``steps`` each, never below the final
    density."""

    steps: int

    def __post_init__(self) -> None:
        _check_steps(self.steps)

    def density(self, step: int, final: float) -> float:
        if step >= self.steps:
            return final
        stage = 4 * step // self.steps
        return max(final, 0.25 ** (stage + 1))


@dataclass(frozen=True)
class ListedWarmup:
    """gTop-k, section IV-B: the listed densities for an equal share of ``steps`` each."""

    steps: int
    densities: tuple[float, ...] = (0.25, 0.0725, 0.015, 0.004)

    def __post_init__(self) -> None:
        _check_steps(self.steps)
        if not self.densities or not all(0 < density <= 1 for density in self.densities):
            raise ValueError(f"warm-up densities must lie in (0, 1], not {self.densities!r}")

    def density(self, step: int, final: float) -> float:
        if step >= self.steps:
            return final
        return max(final, self.densities[len(self.densities) * step // self.steps])


@dataclass(frozen=True)
class DropRatioWarmup:
    """Gradient dropping, section 5.1: R_t = R ** max(1, T / t) is dropped at step t = 1, 2, ...; R = 1 - density."""

    steps: int

    def __post_init__(self) -> None:
        _check_steps(self.steps)

    def density(self, step: int, final: float) -> float:
        return 1.0 - (1.0 - final) ** max(1.0, self.steps / (step + 1))
