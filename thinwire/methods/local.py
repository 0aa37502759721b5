"""Local steps: every rank trains alone for a while, then the ranks exchange how far they went (Local SGD)."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import ClassVar

from thinwire.engine.outer_step import OuterRule
from thinwire.methods.adviser_traits import Advised
from thinwire.methods.base import Method
from thinwire.methods.dense import Dense
from thinwire.methods.options import check_bool, require
from thinwire.methods.registry import method, parse_method
from thinwire.methods.rounds import NOT_COMPARED, RoundMethod, check_rule, first_steps, start_in_steps
from thinwire.methods.spec import spell

_DEFAULT = Dense()


@method("local")
@dataclass(frozen=True, kw_only=True)
class LocalSteps(RoundMethod):
    """Fewer exchanges, for every optimizer: ranks take ``every`` steps alone and exchange the compressed difference.

    every           optimizer steps between two exchanges
    method          how the differences travel: a method, or its string, that leaves momentum to the optimizer
    outer_lr        rate of the common step
    outer_momentum  its momentum; 0: none
    nesterov        whether that is Nesterov's
    error_decay     what is kept from round to round of what was not sent
    start           first steps, or "2 epochs", behind each of which the ranks exchange: while the learning rate rises
    qsr             None, or a rate: rounds have (qsr / learning rate)^2 steps where that is more than ``every``
    most_apart      None, or a share of |theta|: rounds in which ranks go further (Stats.round_distance) become shorter

    With theta the common parameters and x_i those of rank i: d_i = theta - x_i; d is the mean of what ``method`` sends
    of e_i + d_i, and e_i keeps the rest; m = outer_momentum m + d; theta -= outer_lr (d + outer_momentum m); x_i =
    theta. Gradients stay on their rank, and so does the optimizer's state.

    As a string, in quotes in a shell: ``local:every=5,method=(dropping:density=0.1)``. A warm-up of ``method`` counts
    optimizer steps. Between two exchanges ranks have different parameters: evaluate and save inside
    ``wire.averaged()``. With ``error_decay`` below 1 a part of what was not sent is lost, by design.
    """

    benched: ClassVar[tuple[str, ...]] = ()
    advised: ClassVar[Advised] = NOT_COMPARED

    every: int = 15
    method: Method | str = _DEFAULT
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    nesterov: bool = True
    error_decay: float = 1.0
    start: int | str = 0
    qsr: float | None = None
    most_apart: float | None = None

    def __post_init__(self) -> None:
        check_rule(self)
        check_bool(self, "nesterov")
        object.__setattr__(self, "method", _inner(self.method))

    @property
    def inner(self) -> Method:
        assert isinstance(self.method, Method)
        return self.method

    @property
    def decay(self) -> float:
        return self.error_decay

    @property
    def outer_rule(self) -> OuterRule:
        start = first_steps(self.start)
        return OuterRule(
            self.every, self.outer_lr, self.outer_momentum, self.nesterov, start, self.qsr, self.most_apart
        )

    def in_steps(self, steps_per_epoch: int | None) -> Method:
        inner, start = self.inner.in_steps(steps_per_epoch), start_in_steps(self, steps_per_epoch)
        return replace(self, method=inner, start=start)

    def _string(self, options: list[str]) -> str:
        return self._spelled(options, str(self.method))

    @property
    def in_full(self) -> str:
        return self._spelled([f.name for f in fields(self)], self.inner.in_full)

    def _spelled(self, options: list[str], inner: str) -> str:
        spelled = {"method": f"({inner})" if ":" in inner else inner}
        given = [f"{option}={spelled.get(option) or spell(getattr(self, option))}" for option in options]
        return self.name + (":" + ",".join(given) if given else "")


def _inner(one: Method | str) -> Method:
    """The method of the differences; a ValueError where it can be none."""
    if isinstance(one, str):
        spec = one.strip()
        try:
            one = parse_method(spec[1:-1] if spec.startswith("(") and spec.endswith(")") else spec)
        except ValueError as problem:
            raise ValueError(f"local: method: {problem}") from None
    require(
        isinstance(one, Method),
        f"local: method must be a method such as thinwire.GradientDropping() or its string form, not {one!r}",
    )
    require(one.outer_rule is None, f"local: {one.name} has local steps of its own; take a method of single steps")
    require(
        not any(member.takes_momentum(False) for member in one.members),
        f"local: {one.name} takes the optimizer's momentum over, which stays with the optimizer here; give it "
        "momentum_correction=False",
    )
    require(
        one.communicates and not one.replicas_drift,
        f"local: {one} lets ranks drift apart after an exchange; take a method without local gradients",
    )
    return one
