"""DiLoCo (Douillard et al., 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from thinwire.engine.outer_step import OuterRule
from thinwire.methods.adviser_traits import Advised
from thinwire.methods.choices import DenseType
from thinwire.methods.dense import Dense
from thinwire.methods.registry import method
from thinwire.methods.rounds import NOT_COMPARED, RoundMethod, check_rule


@method("diloco")
@dataclass(frozen=True, kw_only=True)
class DiLoCo(RoundMethod):
    """DiLoCo: many local steps, and Nesterov momentum on the mean of the differences.

    every           optimizer steps between two exchanges
    dtype           how differences travel: "fp32", "bf16", "fp16"
    outer_lr        rate of the common step
    outer_momentum  its momentum, which is Nesterov's

    It is ``LocalSteps`` with ``Dense``.
    """

    benched: ClassVar[tuple[str, ...]] = ()
    advised: ClassVar[Advised] = NOT_COMPARED

    every: int = 100
    dtype: DenseType = "fp32"
    outer_lr: float = 0.7
    outer_momentum: float = 0.9

    def __post_init__(self) -> None:
        check_rule(self)
        try:
            Dense(dtype=self.dtype)
        except ValueError as problem:
            raise ValueError(f"{self.name}: {str(problem).removeprefix('dense: ')}") from None

    @cached_property
    def inner(self) -> Dense:
        return Dense(dtype=self.dtype)

    @property
    def outer_rule(self) -> OuterRule:
        return OuterRule(self.every, self.outer_lr, self.outer_momentum)
