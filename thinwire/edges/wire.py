"""What ``thinwire.attach`` gives back, whatever the model: one public face over a reducer and an edge."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor

from thinwire.errors import UNCOPIED
from thinwire.methods import Method
from thinwire.reducer import Reducer
from thinwire.stats import Stats
from thinwire.transport.failures import FailureDetector


class Edge(Protocol):
    """Where gradients come from: hooks on a model that take them to a reducer, and their means back."""

    model: Any

    def renew(self) -> None:
        """Another method goes on."""
        ...

    def leave(self) -> None:
        """Take all hooks off."""
        ...

    def saves_own_state(self) -> None:
        """The wire's state was taken."""
        ...

    def given_back(self, rest: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What was not sent, in the form of the model's parameters."""
        ...


class Wire:
    """Made by ``thinwire.attach``. All methods that change something are collective: every rank calls them alike."""

    def __init__(self, reducer: Reducer, edge: Edge) -> None:
        self.reducer, self.edge, self.model = reducer, edge, edge.model

    @property
    def method(self) -> Method:
        return self.reducer.method

    @property
    def attached(self) -> bool:
        """Whether gradients go through this wire; not any more after ``detach``."""
        return self.reducer.attached

    def __repr__(self) -> str:
        return repr(self.reducer).replace("thinwire.Reducer", "thinwire.Wire")

    def __reduce__(self) -> Any:
        raise TypeError(UNCOPIED)

    @property
    def failure_detector(self) -> FailureDetector | None:
        """What finds out who is missing when an exchange fails. Other nets over the same ranks may use it, too, until
        this wire is detached."""
        return self.reducer.nets.failure_detector

    # ----------------------------------------------------------------------------------------- what a user calls

    @property
    def stats(self) -> Stats:
        """Totals so far; a snapshot."""
        return self.reducer.snapshot()

    def snapshot(self, residual_norm: bool = True) -> Stats:
        """``stats``, on request without the residual's norm (then nan), which costs a pass over the residual."""
        return self.reducer.snapshot(residual_norm)

    def log_every(self, steps: int, tell: Callable[[str], None] = print) -> None:
        """Every so many steps rank 0 hands a line about what was sent to ``tell`` (see ``Reducer.log_every``)."""
        self.reducer.log_every(steps, tell)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """For the time of the block the model has the mean of all ranks' parameters, to evaluate or to save it.

        Only methods with local gradients or local steps let ranks drift apart; with the others this changes nothing.
        Train outside.
        """
        with self.reducer.averaged():
            yield

    def switch(self, method: Method | str) -> None:
        """Change the method between two steps; nothing that the old one kept is lost (see ``Reducer.switch``)."""
        self.reducer.switch(method)
        self.edge.renew()

    def detach(self) -> dict[str, Tensor]:
        """End compression: momentum goes back to the optimizer; returns what was not sent, as the group's mean by name.

        With local steps all ranks then have the same parameters, after a last exchange in the middle of a round.
        Another training step of the model then needs a new ``attach`` (or a new DDP around the module). After an
        exchange that failed, or when the process group was destroyed before, nothing is communicated any more: this
        rank's own momentum goes back, and {} is returned.
        """
        if not self.attached:
            return {}  # the model may be another wire's by now
        rest = self.reducer.detach()
        self.edge.leave()
        return self.edge.given_back(rest)

    def abandon(self) -> None:
        """End compression without moving a byte: momentum and whatever was not sent are dropped. For measurements."""
        if self.attached:
            self.reducer.abandon()
            self.edge.leave()

    def state_dict(self, all_ranks: bool = False) -> dict[str, Any]:
        """Return everything of this rank that a later run needs, or of all ranks on rank 0 (``Reducer.state_dict``)."""
        self.edge.saves_own_state()
        return self.reducer.state_dict(all_ranks)

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Go on from a state; collective, behind the loading of model and optimizer (``Reducer.load_state_dict``)."""
        self.reducer.load_state_dict(state)

    def load_checkpoint(self, checkpoint_id: str | os.PathLike[str], key: str = "wire") -> None:
        """Load what torch.distributed.checkpoint wrote, also with another number of ranks."""
        self.reducer.load_checkpoint(checkpoint_id, key)
