"""SparseLoCo (Sarfi et al., 2025)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from thinwire.engine.outer_step import OuterRule
from thinwire.methods.adviser_traits import Advised
from thinwire.methods.base import Method
from thinwire.methods.choices import Values
from thinwire.methods.dropping import GradientDropping
from thinwire.methods.registry import method
from thinwire.methods.rounds import BEHIND, RoundMethod, check_rule, first_steps, start_in_steps


@method("sparseloco")
@dataclass(frozen=True, kw_only=True)
class SparseLoCo(RoundMethod):
    """SparseLoCo: local steps whose differences travel as the largest of every 4,096 elements, in 2 bits each.

    every        optimizer steps between two exchanges
    density      share of each 4,096 consecutive elements of a tensor that is sent, in (0, 1]
    values       how they travel, see DGC
    error_decay  what is kept from round to round of what was not sent
    outer_lr     rate of the common step
    exclude      names of parameters that travel dense, with * and ?: ("4.weight", "head.*")
    start        first steps, or "2 epochs", behind each of which the ranks exchange: while the learning rate rises
    qsr          None, or a rate: rounds have (qsr / learning rate)^2 steps where that is more than ``every``
    most_apart   None, or a share of |theta|: rounds in which ranks go further (Stats.round_distance) become shorter

    It is ``LocalSteps`` with ``GradientDropping(scope="chunk")``. What ranks send is divided by their number. A part of
    what was not sent is lost, by design.
    """

    benched: ClassVar[tuple[str, ...]] = ()
    advised: ClassVar[Advised] = Advised(
        sgd=("sparseloco:every=3,density=0.06,error_decay=1.0",),
        why_not_other=BEHIND,
        rank=2,
        wants="its ranks differ between two exchanges, so evaluate and save inside wire.averaged()",
    )

    every: int = 15
    density: float = 0.0156
    values: Values = "int2"
    error_decay: float = 0.95
    outer_lr: float = 1.0
    exclude: tuple[str, ...] = ()
    start: int | str = 0
    qsr: float | None = None
    most_apart: float | None = None

    def __post_init__(self) -> None:
        check_rule(self)
        try:
            object.__setattr__(self, "exclude", self.inner.exclude)
        except ValueError as problem:
            raise ValueError(f"{self.name}: {str(problem).removeprefix('dropping: ')}") from None

    @cached_property
    def inner(self) -> GradientDropping:
        return GradientDropping(density=self.density, scope="chunk", values=self.values, exclude=self.exclude)

    @property
    def decay(self) -> float:
        return self.error_decay

    @property
    def outer_rule(self) -> OuterRule:
        return OuterRule(
            self.every, self.outer_lr, start=first_steps(self.start), qsr=self.qsr, most_apart=self.most_apart
        )

    def in_steps(self, steps_per_epoch: int | None) -> Method:
        return replace(self, start=start_in_steps(self, steps_per_epoch))
