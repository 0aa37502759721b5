"""Exact mean inside a machine, compressed mean between machines."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.engine.aggregators import write_flat
from thinwire.engine.context import ExchangeContext
from thinwire.engine.layout import Layout
from thinwire.engine.named_state import KeptVector, StateKind
from thinwire.engine.norms import UNMEASURED, Measured
from thinwire.engine.protocols import Aggregator
from thinwire.engine.traffic_plan import Plan
from thinwire.errors import ExchangeError, NonFiniteError
from thinwire.kernels import first_nonfinite
from thinwire.transport import Net

Groups = tuple[tuple[int, ...], ...]


def machine_groups(hierarchy: str | int | Sequence[Sequence[int]] | None, size: int) -> Groups | None:
    """Return the ranks of every machine, or None for a flat group.

    ``"auto"`` reads LOCAL_WORLD_SIZE (torchrun sets it), a number gives the ranks per machine, a list of lists names
    them.
    """
    if hierarchy is None:
        return None
    if hierarchy == "auto":
        text = os.environ.get("LOCAL_WORLD_SIZE")
        if text is None:
            raise ValueError('hierarchy="auto" needs LOCAL_WORLD_SIZE, which torchrun sets; or give ranks per machine')
        if not text.isdecimal():
            raise ValueError(f'hierarchy="auto" needs a whole number in LOCAL_WORLD_SIZE, not {text!r}')
        hierarchy = int(text)
    if isinstance(hierarchy, int) and not isinstance(hierarchy, bool):
        if hierarchy < 1 or size % hierarchy:
            raise ValueError(
                f"hierarchy={hierarchy} ranks per machine does not divide the {size} ranks; give a list of groups"
            )
        return tuple(tuple(range(first, first + hierarchy)) for first in range(0, size, hierarchy))
    unreadable = f'hierarchy must be None, "auto", a number of ranks or a list of groups, not {hierarchy!r}'
    if isinstance(hierarchy, (str, bool)):
        raise ValueError(unreadable)
    try:
        groups = tuple(tuple(sorted(int(rank) for rank in group)) for group in hierarchy)
    except (TypeError, ValueError):
        raise ValueError(unreadable) from None
    if not all(groups) or sorted(rank for group in groups for rank in group) != list(range(size)):
        raise ValueError(f"hierarchy {groups} must name each of the ranks 0 to {size - 1} exactly once")
    return groups


def sends_nothing(groups: Groups | None) -> bool:
    """Whether no gradient leaves the one machine that there is."""
    return groups is not None and len(groups) == 1


class Hierarchy:
    """A policy around an aggregator that runs between the machines' first ranks.

    The machine's sum is scaled so that the mean over machines is the mean over all ranks, also when machines differ
    in size. Residuals live on the first rank of each machine.

    Where all ranks are on one machine the mean is there before the inner aggregator begins, so the wire compresses
    nothing (``sends_nothing``): the trajectory is the dense one, also where a method has taken the momentum over.
    """

    fusible = False

    def __init__(self, inner: Aggregator, local: Net, machines: Groups) -> None:
        self.inner, self.local, self._largest = inner, local, max(map(len, machines))
        self._ranks = sum(map(len, machines)) / len(machines)
        self.weight = 1 / self._ranks
        self.whole_model = inner.whole_model
        self.leads = local.rank == 0

    @property
    def clock(self) -> Any:
        return self.inner.clock

    @property
    def frames_grow(self) -> bool:
        return self.inner.frames_grow

    @property
    def sums_by_place(self) -> bool:
        """The same on all ranks, whatever their own machine's size."""
        return self._largest > 2 or self.inner.sums_by_place

    def plan(self, layout: Layout, size: int) -> Plan:
        """Between ``size`` machines; what travels inside them takes no thin link."""
        return self.inner.plan(layout, size)

    def waits(self, layout: Layout) -> float:
        return self.inner.waits(layout)

    def reduce(self, context: ExchangeContext, parts: Sequence[Tensor], norms: Measured = UNMEASURED) -> Measured:
        grad = torch.cat(list(parts))
        self.local.stage = "average inside the machine"
        self.local.all_reduce(grad)
        grad.div_(self._ranks)
        alarm: Exception | None = None
        if self.leads:
            try:
                norms = self.inner.reduce(context, context.layout.split(grad), norms)
            except Exception as error:
                # The other ranks of the machine wait for the mean: what they get tells them.
                alarm = error
                grad.fill_(float("nan") if isinstance(error, NonFiniteError) else float("inf"))
        self._hand_down(grad, alarm)
        # Also on the leader, where a method that looks at no gradient passes a nan on: all ranks end alike.
        if alarm is None and first_nonfinite([grad], math.inf) is not None:
            alarm = self._alarm(context, failed=bool(torch.isposinf(grad).all()))
        if alarm is not None:
            raise alarm
        write_flat(context, parts, grad)
        return norms

    def _hand_down(self, grad: Tensor, alarm: Exception | None) -> None:
        self.local.stage = "hand down inside the machine"
        try:
            self.local.broadcast(grad, 0)
        except ExchangeError:
            if alarm is None:  # else the first error is the one to tell; the others have given up waiting for it
                raise

    @staticmethod
    def _alarm(context: ExchangeContext, failed: bool) -> Exception:
        if failed:
            sentence = f"the exchange of step {context.step} failed on this machine's first rank, which says why"
            return ExchangeError(sentence, step=context.step, stage="hand down inside the machine")
        return NonFiniteError(f"a gradient of this machine, or the mean, holds an inf or a nan at step {context.step}")

    def residual_square_sum(self) -> float:
        return self.inner.residual_square_sum()

    def leftover(self, numels: dict[str, int], rates: dict[str, float]) -> dict[str, Tensor]:
        return self.share(self.inner.leftover(numels, rates))

    def share(self, vectors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The first rank's vectors stand for its whole machine, so that the mean over all ranks is the machines'."""
        return {name: tensor / self.weight for name, tensor in vectors.items()} if self.leads else {}

    def kinds(self) -> dict[str, dict[str, StateKind]]:
        return self.inner.kinds()

    def vectors(self, numels: Mapping[str, int], coded: Collection[str]) -> Iterator[KeptVector]:
        return self.inner.vectors(numels, coded) if self.leads else iter(())

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)
