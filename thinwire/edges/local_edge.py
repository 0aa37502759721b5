"""The edge of local steps: ranks train alone, and behind every so many optimizer steps they exchange how far they went.

No gradient is exchanged. The tensors of the reducer are the parameters, and what it reduces are their differences to
the common ones, theta.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.edges.ddp_hook import router_of
from thinwire.edges.drift_warning import DriftWarning
from thinwire.edges.local import note_edge
from thinwire.edges.meeting import DETACH, ROUND, Arrival, meeting
from thinwire.edges.running_statistics import RunningStatistics
from thinwire.edges.uncopied_hook import OwnHook
from thinwire.engine.local_gradients import averaged
from thinwire.engine.optimizer import OptimizerView
from thinwire.engine.outer_step import OuterRule, OuterStep
from thinwire.engine.several_optimizers import SharedStep
from thinwire.engine.step_skipper import left_out
from thinwire.engine.worker import Bucket
from thinwire.errors import TRAINED_INSIDE, UNCOPIED, NonFiniteError
from thinwire.reducer import Reducer
from thinwire.torch_private import has_joined
from thinwire.transport import overhead

log = logging.getLogger("thinwire")

THAWED_ALONE = (
    "parameter {!r} is trained, but was frozen when the model was attached, so nothing averages it; call wire.detach() "
    "and attach again"
)
JOINED = (
    "join() is for gradients that DistributedDataParallel exchanges, and local steps exchange none; give all ranks as "
    "many steps"
)
NOT_FINITE = (
    "the parameters of rank {} hold an inf, a nan or a number beyond 1.8e19 after optimizer step {}, so nothing was "
    "exchanged; go on from a checkpoint with a lower learning rate"
)
WENT_BACK = "thinwire: rank {} ended with parameters that are not finite, so all ranks go back to where the round began"
ANEW = (
    "thinwire: the state was saved %d steps after a round had begun, by another group; the round begins anew, and "
    "those steps are lost"
)
APART = (
    "thinwire: ranks went %.3g of the parameters' length in a round of %d steps, and most_apart is %.3g; the next "
    "rounds have %d steps, until ranks go less than half as far"
)


class LocalEdge:
    """Counts optimizer steps, takes differences to a reducer and makes the common step."""

    def __init__(self, model: nn.Module, reducer: Reducer, view: OptimizerView) -> None:
        self.model, self.reducer, self._view = model, reducer, view
        self._ddp = model if isinstance(model, DistributedDataParallel) else None
        module = model.module if isinstance(model, DistributedDataParallel) else model
        self._frozen = {name: p for name, p in module.named_parameters() if not p.requires_grad}
        self._statistics = RunningStatistics(module)
        self._outer = OuterStep(reducer.parameters, dict(module.named_buffers()))
        self._outer.prepare(self._rule)
        self._shared_step, self._passes, self._is_open = SharedStep(), 0, False
        self._rate = 0.0  # the learning rate of the last step, where the rule asks for it
        self._is_leaving = False
        self._apart = False  # some rank has made steps since the last round, as of the last meeting
        self._drift_warning = DriftWarning(lambda: reducer.drifted)
        reducer.rounds = self
        self._handles = [
            view.before_step(self._before_optimizer_step),
            view.after_step(self._after_optimizer_step),
            model.register_forward_pre_hook(OwnHook(self._before_forward)),
            *self._drift_warning.watch(module),
        ]
        note_edge(model, self)
        self._broadcasts = False
        if self._ddp is not None:
            self._router = router_of(self._ddp)
            self._router.target = self._on_bucket
            self._broadcasts, self._ddp.broadcast_buffers = self._ddp.broadcast_buffers, False

    def __reduce__(self) -> Any:
        raise TypeError(UNCOPIED)

    @property
    def _rule(self) -> OuterRule:
        assert self.reducer.method.outer_rule is not None
        return self.reducer.method.outer_rule

    def renew(self) -> None:
        """Another method goes on."""
        self._outer.prepare(self._rule)

    def leave(self) -> None:
        for handle in self._handles:
            handle.remove()
        note_edge(self.model, None)
        if self._ddp is not None:
            self._router.target = None
            self._ddp.broadcast_buffers = self._broadcasts

    def saves_own_state(self) -> None:
        self._drift_warning.saves_own_state()

    def given_back(self, rest: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(rest)

    # ---------------------------------------------------------------------------------------------- steps of a rank

    def _on_bucket(self, bucket: Bucket) -> None:
        """DDP's gradients stay as they are."""
        bucket.complete(ValueError(TRAINED_INSIDE) if self.reducer.shows_mean else None)

    def _before_forward(self, *_: Any) -> None:
        if not torch.is_grad_enabled():
            return
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise ValueError(THAWED_ALONE.format(name))
        if self._ddp is not None and has_joined(self._ddp):
            raise ValueError(JOINED)
        self._passes += 1
        if self._is_open:  # not all optimizers took part in the step
            self._step_is_over()

    def _before_optimizer_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.reducer.shows_mean:
            raise ValueError(TRAINED_INSIDE)
        if self._is_open and self._shared_step.begins_with(optimizer, self._passes):
            self._step_is_over()

    def _after_optimizer_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if left_out(optimizer):
            return
        self._shared_step.stepped(optimizer, self._passes)
        self._is_open = True
        if self._rule.qsr is not None:  # now: behind the step a scheduler goes on, and it may end later
            self._rate = max((hyper.lr for hyper in self._view.hypers().values()), default=0.0)
        if self._shared_step.has_all(self._view.optimizers):
            self._step_is_over()

    @property
    def _length(self) -> int:
        """Of a round that would end behind the step of the moment."""
        return max(1, self._rule.steps(self.reducer.progress.step, self._rate) >> self._outer.halvings)

    def _step_is_over(self) -> None:
        self._is_open = False
        self._outer.in_round += 1
        is_due = self._outer.in_round >= self._length
        self.reducer.step_alone(tells=not is_due)  # else the exchange does
        if is_due:
            self._join(ROUND)
        self.reducer.drifted = self._outer.in_round > 0 and self.reducer.nets.own.size > 1

    # ---------------------------------------------------------------------------------------------- all ranks together

    @property
    def in_round(self) -> int:
        return self._outer.in_round

    @property
    def kinds(self) -> list[str]:
        return self._outer.kinds

    @property
    def count(self) -> int:
        return self._outer.rounds

    @property
    def distance(self) -> float | None:
        return self._outer.distance

    def meet(self, what: str) -> None:
        self._is_leaving = what == DETACH
        if self._is_leaving and self.reducer.worker.broken:  # on all ranks, at the same exchange
            self._apart = False
            return
        if self._is_open:
            self._step_is_over()
        self._join(what)

    def end(self) -> None:
        if self._apart:
            self._join(ROUND, ends=True, keeps_going=self._is_leaving)
            self._apart = self.reducer.drifted = False

    def _join(self, wish: str, *, ends: bool = False, keeps_going: bool = False) -> None:
        """Meet the others, and take part in rounds until all of them have the same wish, or until the one is made that
        is wished for. It ``ends`` in the middle of a round. ``keeps_going`` where a difference is not finite: back to
        theta."""
        while True:
            differences = self._outer.differences()
            arrivals = meeting(self.reducer, wish, self.in_round > 0, differences)
            wishes = {one.wish: rank for rank, one in enumerate(arrivals)}
            self._apart = any(one.apart for one in arrivals)
            if ROUND in wishes:
                self._round(arrivals, differences, ends, keeps_going)
            elif len(wishes) > 1:
                said = " and ".join(f"{what} on rank {rank}" for what, rank in wishes.items())
                raise ValueError(f"ranks do different things, {said}; call the same on all ranks")
            if ROUND not in wishes or wish == ROUND:
                return

    def _round(self, arrivals: list[Arrival], differences: dict[str, Tensor], ends: bool, keeps_going: bool) -> None:
        """The exchange, and the common step."""
        reducer, progress, net = self.reducer, self.reducer.progress, self.reducer.nets.own
        bad = [rank for rank, one in enumerate(arrivals) if not one.finite]
        if bad:
            self._pass_over(bad[0], arrivals[bad[0]].step, keeps_going)
            return
        last = max(one.step for one in arrivals)
        took = last - (progress.step - self.in_round)  # the same on all ranks, also where one passed over a step
        progress.step = last - 1  # the exchange counts the last one
        progress.dense_bytes -= 4 * sum(p.numel() for p in reducer.parameters.values())
        reducer.reduce(differences)
        self._outer.step(differences, self._rule)
        with overhead(net):
            self._statistics.combine(net)
        mean_square = sum(one.square for one in arrivals) / net.size
        length = self._outer.length()
        self._outer.distance = math.sqrt(mean_square) / length if length else None
        if not ends and self._outer.watch(self._rule, took) and net.rank == 0:
            log.warning(APART, self._outer.distance, took, self._rule.most_apart, took // 2)
        reducer.monitors.after_optimizer_step(progress.step, progress.step, True)

    def _pass_over(self, bad: int, step: int, keeps_going: bool) -> None:
        """Go back to theta on all ranks, where that is wanted; else raise on all of them."""
        skipper = self.reducer.skipper
        if skipper is None and not keeps_going:
            raise NonFiniteError(NOT_FINITE.format(bad, step))
        if skipper is not None:
            skipper.skipped += 1
        elif self.reducer.nets.own.rank == 0:
            log.warning(WENT_BACK, bad)
        self._outer.go_back()

    @contextmanager
    def showing_mean(self) -> Iterator[None]:
        if not self._apart:
            yield
            return
        net, reducer = self.reducer.nets.own, self.reducer
        with ExitStack() as stack:
            with overhead(net):
                stack.enter_context(averaged(list(reducer.parameters.values()), net))
                stack.enter_context(self._statistics.combined(net))
            stack.callback(setattr, reducer, "shows_mean", False)
            reducer.shows_mean = True
            yield

    # ---------------------------------------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, dict[str, Any]]:
        return self._outer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, anew: bool) -> None:
        lost = self._outer.load_state_dict(state, anew=anew)
        self._is_open = False
        self.reducer.drifted = self.in_round > 0 and self.reducer.nets.own.size > 1
        if lost and self.reducer.nets.own.rank == 0:
            log.warning(ANEW, lost)
