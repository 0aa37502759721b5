"""What methods have in common whose ranks take optimizer steps alone and then exchange how far they went."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from thinwire.engine.layout import Layout
from thinwire.engine.protocols import Aggregator
from thinwire.memory.base import StatefulMemory
from thinwire.memory.clipping import LocalClipping
from thinwire.methods.adviser_traits import Advised
from thinwire.methods.base import Method, Rows
from thinwire.methods.epochs import epochs_in, steps_in
from thinwire.methods.options import is_count, is_number, require
from thinwire.transport import Net

BEHIND = "with AdamW local steps were 15 % behind in perplexity after 2,540 steps"
NOT_COMPARED = Advised(why_not_sgd="of local steps sparseloco's are compared", why_not_other=BEHIND)


class RoundMethod(Method):
    """A method of rounds: its ``inner`` method compresses the differences of the parameters, its ``outer_rule`` says
    what is done with their mean."""

    gives_step_gradient = True  # this rank's own, which a loop may clip as without thinwire

    @property
    def inner(self) -> Method:
        """What compresses the differences."""
        raise NotImplementedError

    @property
    def decay(self) -> float:
        """The factor of what was not sent, before a difference is added to it."""
        return 1.0

    @property
    def averaging_interval(self) -> int | None:
        assert self.outer_rule is not None
        return self.outer_rule.every

    @property
    def replicas_drift(self) -> bool:
        return True

    def aggregator(self, net: Net, optimizer_is_sgd: bool) -> Aggregator:
        try:
            made = self.inner.assembled(net, lambda _: False)  # the optimizer's momentum stays with it
        except ValueError as problem:
            raise ValueError(f"{self.name}: {problem}") from None
        for part in getattr(made, "members", (made,)):
            _let_decay(getattr(part, "memory", None), self.decay)
        return made

    def assembled(self, net: Net, of_sgd: Callable[[Method], bool]) -> Aggregator:
        return self.aggregator(net, False)

    @property
    def estimates_mean(self) -> bool:
        return self.inner.estimates_mean

    @property
    def state_dtype(self) -> torch.dtype:
        return self.inner.state_dtype

    def is_coded(self, name: str, shape: torch.Size) -> bool:
        return self.inner.is_coded(name, shape)

    def layout(self, rows: Rows, *, model: Rows | None = None, compress: bool = True) -> Layout:
        return self.inner.layout(rows, model=model, compress=compress)

    @property
    def bucket_independent(self) -> bool:
        return self.inner.bucket_independent

    @property
    def whole_model(self) -> bool:
        return self.inner.whole_model

    def check_names(self, names: list[str]) -> None:
        self.inner.check_names(names)


def first_steps(start: int | str) -> int:
    """``start`` in optimizer steps; 0 where it is in epochs whose length is not known yet."""
    return start if isinstance(start, int) else 0


def start_in_steps(method: Any, steps_per_epoch: int | None) -> int | str:
    """The option ``start`` in optimizer steps, where it was given in epochs."""
    if epochs_in(method.start) is None:
        return method.start
    return steps_in(f"{method.name}: start", method.start, steps_per_epoch)


def _let_decay(memory: Any, decay: float) -> None:
    while isinstance(memory, LocalClipping):
        memory = memory.inner
    if isinstance(memory, StatefulMemory):
        memory.decay = decay


def check_rule(method: Any) -> None:
    """The options of a rule that a method has."""
    require(
        is_count(method.every, 1),
        f"{method.name}: every must be a number of optimizer steps of at least 1, not {method.every!r}",
    )
    rate, momentum = getattr(method, "outer_lr", 1.0), getattr(method, "outer_momentum", 0.0)
    require(is_number(rate) and rate > 0, f"{method.name}: outer_lr must be above 0, not {rate!r}")
    require(
        is_number(momentum) and 0 <= momentum < 1,
        f"{method.name}: outer_momentum must lie in [0, 1), not {momentum!r}",
    )
    start, qsr = getattr(method, "start", 0), getattr(method, "qsr", None)
    require(
        is_count(start, 0) or epochs_in(start) is not None,
        f'{method.name}: start must be a number of optimizer steps or epochs such as "2 epochs", not {start!r}',
    )
    require(
        qsr is None or (is_number(qsr) and qsr > 0),
        f"{method.name}: qsr must be None or a number above 0, which is divided by the learning rate, not {qsr!r}",
    )
    apart = getattr(method, "most_apart", None)
    require(
        apart is None or (is_number(apart) and apart > 0),
        f"{method.name}: most_apart must be None or a share above 0 of the parameters' length, not {apart!r}",
    )
    decay = getattr(method, "error_decay", 1.0)
    require(
        is_number(decay) and 0 <= decay <= 1,
        f"{method.name}: error_decay is what is kept of a residual from round to round and must lie in [0, 1], not "
        f"{decay!r}",
    )
