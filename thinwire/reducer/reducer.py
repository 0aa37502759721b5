"""The engine without a framework: gradients by name in, the group's mean out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.checkpoint.dcp import read_states
from thinwire.checkpoint.format import part_key
from thinwire.engine.context import ExchangeContext, Hyper
from thinwire.engine.fixed_groups import fixed_groups
from thinwire.engine.layout import flat_like, shaped_like
from thinwire.engine.local_gradients import average_parameters, averaged
from thinwire.engine.optimizer import NoOptimizer
from thinwire.engine.several_optimizers import SharedStep
from thinwire.engine.step_skipper import Scaler, StepSkipper, in_use, left_out
from thinwire.engine.worker import Worker
from thinwire.errors import TRAINED_INSIDE, UNCOPIED, DetachedError
from thinwire.methods import Method
from thinwire.methods.running_method import RunningMethod
from thinwire.monitor.health import Guard
from thinwire.monitor.monitors import Monitors
from thinwire.monitor.scaler_check import ScalerCheck
from thinwire.monitor.step_log import StepLog
from thinwire.monitor.stragglers import SAMPLE_EVERY
from thinwire.reducer.entering_gradients import Entering
from thinwire.reducer.method_change import HandOver
from thinwire.reducer.named_gradients import copy_back, places_of
from thinwire.reducer.observing import numbers_to_compare
from thinwire.reducer.progress import Progress
from thinwire.reducer.rounds import Rounds
from thinwire.reducer.setup import EdgeTerms, HierarchySpec, Optimizers, Watching, agree, agreed_method
from thinwire.reducer.states import agreed_state, state_of, state_of_all, terms_of
from thinwire.reducer.summary import stats_of
from thinwire.reducer.unused_exchanges import take_back, taken_back
from thinwire.stats import Stats
from thinwire.transport import Net, overhead


class Reducer:
    """Replaces gradients by their mean over a group, as a method makes it, and keeps what was not sent.

    All methods that change something are collective: every rank calls them alike.

    ``named_tensors`` are the parameters, by name, in an order that is the same on every rank: a mapping or what
    ``named_parameters()`` gives. ``group`` is a process group (the default one unless given). With an ``optimizer``, or
    a list of those that own the parameters together, learning rates are read at every step and, where the method
    applies momentum and weight decay in front of the compression, the optimizer's own are switched off while its
    ``step()`` runs; without one the learning rate is 1 and there is neither momentum nor weight decay.

    ``hierarchy``, ``on_nonfinite``, ``scaler``, ``guard``, ``guard_every``, ``check_replicas_every`` and
    ``steps_per_epoch`` are those of ``thinwire.attach``. Without an optimizer ``on_nonfinite="skip"`` leaves all
    gradients of a step that is passed over infinite, on all ranks: do not apply them.

        reducer = thinwire.Reducer(model.named_parameters(), thinwire.DGC(), optimizer=optimizer)
        loss.backward()
        reducer.reduce({name: p.grad for name, p in model.named_parameters()})
        optimizer.step()
    """

    def __init__(
        self,
        named_tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
        method: Method | str,
        group: dist.ProcessGroup | Net | None = None,
        optimizer: Optimizers | None = None,
        *,
        hierarchy: HierarchySpec = None,
        on_nonfinite: str = "raise",
        scaler: Scaler | None = None,
        guard: str | None = None,
        guard_every: int = 20,
        check_replicas_every: int | None = None,
        steps_per_epoch: int | None = None,
        terms: EdgeTerms | None = None,
    ) -> None:
        terms = terms or EdgeTerms()
        self.parameters: dict[str, Tensor] = dict(named_tensors)
        self.shards, self._steps_per_epoch = terms.shards, steps_per_epoch
        scaler = in_use(scaler)
        watching = Watching(on_nonfinite, scaler, guard, guard_every, check_replicas_every)
        agreed = agree(self.parameters, method, group, optimizer, hierarchy, watching, steps_per_epoch, terms)
        self.view, self.method, self.nets = agreed.view, agreed.method, agreed.nets
        self.rounds: Rounds | None = None  # of an edge whose ranks take steps alone, which sets it
        self.progress = Progress()
        self.skipper = StepSkipper(scaler) if watching.skips else None
        health = Guard(guard, guard_every) if guard is not None else None
        replicas = self.parameters  # a function that knew the reducer would keep it alive
        self.monitors = Monitors(self.nets, health, check_replicas_every, lambda: replicas)
        self.running = self.run_of(self.method)
        self.worker = Worker(self.nets.compute_device, self.nets.report)
        self.shared_step = SharedStep()
        # Called after every step of an optimizer that counts, with whether it begins a step of all of them.
        self.stepped: Callable[[torch.optim.Optimizer, bool], None] = lambda optimizer, begins: None
        self.unused: Callable[[], dict[str, Any]] = dict  # what was kept before exchanges that no step used, by name
        self.restarted: Callable[[], None] = lambda: None  # called when another method or another state is there
        self.drifted = False  # the ranks' parameters differ, and this is not inside averaged()
        self.shows_mean = False  # this is inside averaged(), and the ranks' own parameters come back behind it
        self._hand_over = HandOver(self.parameters, self.view, self.nets, sharded=self.shards.of > 1)
        self.pending: dict[str, Tensor] = {}  # gradients that enter the next exchange
        self._attached = True
        self._handles: list[Any] = []
        self._install()
        self.running.keep("velocity", self.view.give_velocity(self.running.with_momentum))

    def __repr__(self) -> str:
        state = "" if self._attached else ", detached"
        own = self.nets.own
        return f"<thinwire.Reducer {self.method}, rank {own.rank} of {own.size}, {self.progress.step} steps{state}>"

    def __reduce__(self) -> Any:
        raise TypeError(UNCOPIED)

    @property
    def attached(self) -> bool:
        """Whether gradients go through this reducer; not any more after ``detach``."""
        return self._attached

    # ---------------------------------------------------------------------------------------------------- one step

    def run_of(self, method: Method) -> RunningMethod:
        """A method at work on these parameters, which keeps nothing yet."""
        wholes = self.shards.wholes(self.parameters)
        return RunningMethod(method, self.parameters, self.nets, self.view.sgd, wholes)

    def reduce(self, gradients: Mapping[str, Tensor], entering: Entering | None = None) -> None:
        """Replace every gradient by the group's mean, in place; one step. All ranks give the same names.

        ``entering`` is for edges, and tells what of the gradients is new.
        """
        self._wait()
        self._refuse_inside()
        self.nets.step = self.progress.step
        with self.nets.reporting():
            ordinals = places_of(gradients, self.parameters)
        parts = {place: flat_like(self.parameters[name], gradients[name]) for place, name in ordinals.items()}
        hypers, scale = self.view.hypers(), self.skipper.scale() if self.skipper is not None else 1.0
        step = self.progress.step
        self.progress.step += 1
        self.progress.passes += 1

        def work() -> None:
            if self.skipper is not None and not self.skipper.passes(
                list(parts.values()), *self.shards.nets(self.nets.own)
            ):
                self.progress.step -= 1  # the step did not happen: schedules and random numbers stay where they were
                return
            for group in self._groups(tuple(sorted(ordinals))):
                self.exchange({place: parts[place] for place in group}, hypers, step, scale, entering=entering)
            self.monitors.step_exchanged(step, self.running)
            if self.progress.passes % SAMPLE_EVERY == 0 and self.monitors.compares_ranks(self.running):
                self.monitors.compare_ranks(numbers_to_compare(self))

        self.worker.run(work)
        for place, name in ordinals.items():
            copy_back(parts[place], self.parameters[name], gradients[name])
        if isinstance(self.view, NoOptimizer):  # else behind the optimizer's step
            self.monitors.warn()
            self._tell(self.progress.step)

    def step_alone(self, *, tells: bool) -> None:
        """Count an optimizer step behind which no gradient is exchanged, as dense training would have done."""
        self.progress.step += 1
        self.progress.dense_bytes += 4 * sum(p.numel() for p in self.parameters.values())
        if tells:
            self._tell(self.progress.step)

    def _groups(self, ordinals: tuple[int, ...]) -> list[tuple[int, ...]]:
        """What travels together: all of it, or where that changes the result, groups that the model alone decides."""
        if self.method.bucket_independent or self.running.aggregator.whole_model:
            return [ordinals]
        given = set(ordinals)
        groups = fixed_groups([p.numel() for p in self.parameters.values()])
        cut = [tuple(sorted(given.intersection(group))) for group in groups]
        return [group for group in cut if group]

    def exchange(
        self,
        gradients: Mapping[int, Tensor],
        hypers: Mapping[str, Hyper],
        step: int,
        scale: float = 1.0,
        *,
        apply: bool = False,
        entering: Entering | None = None,
    ) -> None:
        """Replace flat gradients, by their places in the model, by the group's mean; ``hypers`` are by name.

        They carry a factor ``scale``. With ``apply`` the update is applied at once where weight decay acts in front of
        the compression: on a rank whose optimizer will take no step. ``entering`` tells what of the gradients is new.
        """
        # By name order, not bucket order: the same flat vector whatever the buckets were.
        layout = self.running.layout(tuple(sorted(gradients)))
        segments = layout.segments
        with torch.no_grad():
            given = [gradients[segment.ordinal] for segment in segments]
            parts = [part.to(torch.float32) for part in given]  # the gradient itself where it is float32 already
            if entering is not None:
                entering.new_only(layout, parts)
            if scale != 1.0:
                torch._foreach_div_(parts, scale)
            weights = tuple(self.parameters[segment.name] for segment in segments)
            entered = tuple(hypers[segment.name] for segment in segments)
            if entering is not None:
                entered, weights = entering.enter(layout, parts, entered, weights)
            if self.pending:
                self._add_pending(segments, parts, entered)
            context = ExchangeContext(layout, step, entered, weights)
            norms = self.monitors.norms(step, parts)
            self.progress.dense_bytes += 4 * layout.numel
            self.monitors.add(step, self.running.aggregator.reduce(context, parts, norms))
            if apply:
                # No step follows here, but this rank's share of the weight decay needs the parameters of the moment.
                decays, means = self.running.with_decay, zip(segments, parts, strict=True)
                self._hand_over.apply({segment.name: part for segment, part in means if segment.name in decays})
            if scale != 1.0:
                torch._foreach_mul_(parts, scale)
            if entering is not None:
                entering.leave(layout, parts)
            for gradient, part in zip(given, parts, strict=True):
                if gradient is not part:
                    gradient.copy_(part)
            if entering is not None:
                entering.written(layout, given)

    def copy_of(self, name: str) -> Any:
        """Copies of all that a method with a memory keeps of a parameter."""
        return self.running.copy_of(name), self.pending.get(name)

    def put_back(self, name: str, copies: Any) -> None:
        """Keep again what ``copy_of`` gave."""
        kept, pending = copies
        self.running.put_back(name, kept)
        if pending is not None:
            self.pending[name] = pending

    def _add_pending(self, segments: Iterable[Any], parts: Sequence[Tensor], hypers: Sequence[Hyper]) -> None:
        for segment, part, hyper in zip(segments, parts, hypers, strict=True):
            pending = self.pending.pop(segment.name, None) if hyper.lr else None  # at 0 nothing would come of it
            if pending is not None:
                part.add_(pending)
                if pending.is_cuda:  # made on another stream
                    pending.record_stream(torch.cuda.current_stream(pending.device))

    def _after_optimizer_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """What happens once per step does so behind the first optimizer, because no other one may follow. All
        parameters are averaged then, and behind each further optimizer of the step its own."""
        if left_out(optimizer) or (self.skipper is not None and self.skipper.was_skipped(optimizer)):
            return
        progress, interval = self.progress, self.method.averaging_interval
        begins = self.shared_step.stepped(optimizer, progress.passes)
        self.stepped(optimizer, begins)
        progress.optimizer_steps += begins
        averages = interval is not None and progress.optimizer_steps % interval == 0
        self.drifted = interval is not None and not averages and self.nets.own.size > 1
        if averages:
            self.worker.wait()
            drifting = self.running.drifting if begins else self.running.drifting & self.view.owned_by(optimizer)
            average_parameters(self.view.weights(drifting), self.nets.own)
        if not begins:
            return
        equal = interval is None or averages  # replicas that drift are equal after an averaging
        look = partial(self.monitors.after_optimizer_step, progress.passes, progress.optimizer_steps, equal)
        if self.monitors.checks_replicas(progress.passes, equal):
            self.worker.wait()
            self.shards.together(look)
        else:
            look()
        self._tell(progress.optimizer_steps)

    def _tell(self, step: int) -> None:
        if self.monitors.log is not None:
            self.monitors.log.after_step(step, partial(self.snapshot, residual_norm=False))

    # ------------------------------------------------------------------------------------------ looking, evaluating

    @property
    def stats(self) -> Stats:
        """Totals so far; a snapshot."""
        return self.snapshot()

    def snapshot(self, residual_norm: bool = True) -> Stats:
        """``stats``, on request without the residual's norm (then nan), which costs a pass over the residual."""
        if self._attached:
            self.worker.wait()
        return stats_of(self, residual_norm)

    def log_every(self, steps: int, tell: Callable[[str], None] = print) -> None:
        """Every so many steps rank 0 hands a line about what was sent since the last one to ``tell``.

        All ranks call it alike: they measure the gradient's norm together.
        """
        speaks = self.nets.own.rank == 0 and self.shards.place == 0
        self.monitors.log = StepLog(steps, self.snapshot(False), tell if speaks else None)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """For the time of the block the parameters are their mean over all ranks, to evaluate or to save them.

        Only methods with local gradients let ranks drift apart; with the others this changes nothing. Where ranks
        drift, training inside is refused.
        """
        self._wait()
        if self.rounds is not None:
            self.rounds.meet("averaged()")
        with ExitStack() as stack:
            if self.rounds is not None:
                stack.enter_context(self.rounds.showing_mean())
            elif self.method.replicas_drift:
                with overhead(self.nets.own):
                    stack.enter_context(averaged(list(self.parameters.values()), self.nets.own))
                stack.callback(self.view.before_step(self._refuse_inside).remove)
                stack.callback(setattr, self, "shows_mean", False)
                self.shows_mean = True
            stack.callback(setattr, self, "drifted", self.drifted)
            self.drifted = False
            yield

    def _refuse_inside(self, *_: Any) -> None:
        if self.shows_mean:
            raise ValueError(TRAINED_INSIDE)

    # ---------------------------------------------------------------------------------------- changing the method

    def switch(self, method: Method | str) -> None:
        """Change the method between two steps; nothing that the old one kept is lost.

        Gradients that were not sent go into the next gradient. What momentum has acted on already stays a residual
        where the new method has one of that kind, and is applied to the parameters at once where it has not. While a
        learning rate is 0 both wait until it is not. Warm-ups count steps from the beginning, not from the switch.
        """
        self._wait()
        own, epoch, rounds = self.nets.own, self._steps_per_epoch, self.rounds
        if rounds is not None:
            rounds.meet("switch()")
        in_rounds = rounds is not None
        chosen = agreed_method(method, self.parameters, self.view, self.monitors, own, epoch, self.shards, in_rounds)
        take_back(self)
        hand_over, old = self._hand_over, self.running
        self._make_equal()
        new = self.run_of(chosen)
        velocity, rest = hand_over.take(old, new.with_momentum)
        self._uninstall()
        self.drifted = False
        self.method = chosen
        self._run(new)
        self.monitors.restart()
        self._install()
        for name, tensor in hand_over.give(old, self.running, velocity, rest).items():
            self.pending[name] = self.pending[name] + tensor if name in self.pending else tensor
        self.restarted()

    def detach(self) -> dict[str, Tensor]:
        """End compression: momentum goes back to the optimizer; returns what was not sent, as the group's mean by name.

        After an exchange that failed, or when the process group was destroyed before, nothing is communicated any
        more: this rank's own momentum goes back, and {} is returned.
        """
        if not self._attached:
            return {}
        self.worker.wait()
        if self.worker.out_of_step or not self.nets.alive:
            self.view.take_velocity(self.running.kept("velocity"))
            self._leave()
            return {}
        if self.rounds is not None:
            self.rounds.meet("detach()")
        take_back(self)
        hand_over = self._hand_over
        self._make_equal()
        if self.running.with_momentum:
            self.view.take_velocity(hand_over.mean_velocity(self.running))
        rest = hand_over.leftover(self.running)
        for name, pending in self.pending.items():
            rest[name] = rest[name] + pending if name in rest else pending
        mean = hand_over.mean_over_ranks(rest)
        self.abandon()
        return {name: shaped_like(tensor, self.parameters[name].detach()) for name, tensor in mean.items()}

    def _make_equal(self) -> None:
        """Another method follows, or none: ranks whose parameters differ get equal ones."""
        if self.rounds is not None:
            self.rounds.end()
        elif self.method.replicas_drift:
            self._hand_over.make_equal()

    def abandon(self) -> None:
        """End compression without moving a byte: momentum and whatever was not sent are dropped. For measurements."""
        if not self._attached:
            return
        self.worker.wait()
        self._leave()
        if not self.worker.broken:  # else something may still be under way on them
            self.nets.release()

    def _wait(self) -> None:
        """Return when all exchanges so far are done; refuse where there will be no more."""
        if not self._attached:
            raise DetachedError("this wire or reducer was detached; call thinwire.attach again, or make a Reducer")
        self.worker.wait()

    def _leave(self) -> None:
        self._attached = False
        self._uninstall()
        self.worker.stop()
        self.nets.close()

    def _install(self) -> None:
        running = self.running
        momentum, weight_decay = running.with_momentum, running.with_decay
        self.view.take_over(running.method.name, momentum=momentum, weight_decay=weight_decay, given=self._take_loaded)
        if self.skipper is not None:
            self._handles.append(self.view.before_step(self.skipper.before_optimizer_step))
        if running.keeps and (self.skipper is None or self.skipper.scaler is None):
            self._handles.append(self.view.before_step(ScalerCheck().before_step))
        self._handles.append(self.view.after_step(self._after_optimizer_step))

    def _take_loaded(self, velocity: dict[str, Tensor]) -> None:
        """Momentum that came into the optimizer by its load_state_dict; a state of an attached optimizer has none."""
        if velocity:
            self.worker.wait()
            self.running.keep("velocity", velocity)
            self.restarted()

    def _uninstall(self) -> None:
        self.view.release()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # ------------------------------------------------------------------------------------------------ checkpoints

    def state_dict(self, all_ranks: bool = False) -> dict[str, Any]:
        """Return everything of this rank that a later run needs: residuals, velocities, errors, counters, method.

        The state of a moment has the same keys and shapes as that of any other, and what belongs to a rank lies under
        the rank's own key: torch.distributed.checkpoint takes a reducer as it is, ``dcp.save({"wire": wire}, ...)``.

        ``all_ranks`` is for loops that save one file, on rank 0: every rank calls, rank 0 gets the state with the parts
        of all ranks, in host memory, and the others get {}. Every rank loads it, in a group of any size.
        """
        self._wait()
        if self.rounds is not None and all_ranks:
            self.rounds.meet("state_dict(all_ranks=True)")
        self.progress.states += 1
        with taken_back(self):
            return state_of_all(self) if all_ranks else state_of(self)

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Take up where ``state_dict`` left off; a collective call.

        ``state`` is what this rank saved, what ``all_ranks`` gave rank 0, or the list of all ranks' states. With one of
        the latter the group may have another size or hierarchy than the one that saved it: what was not sent is then
        redistributed, and none of it is lost. A state that is not, to the bit, what was saved, or does not fit on one
        of the ranks, and parameters that differ between the ranks, raise on all ranks and change nothing.
        """
        self._take(lambda: state)

    def load_checkpoint(self, checkpoint_id: str | os.PathLike[str], key: str = "wire") -> None:
        """Load what ``dcp.save({key: wire, ...}, checkpoint_id=...)`` wrote, also with another number of ranks.

        ``dcp.load`` itself is enough where the group is the one that saved. Every rank reads its own part, or all parts
        where the group is another one. A collective call, as ``load_state_dict``.
        """
        own = terms_of(self)
        group = {name: own[name] for name in ("world_size", "shards", "hierarchy")}
        part = part_key(own["rank"], own["shard"], own["shards"])
        self._take(lambda: read_states(checkpoint_id, key, part, group))

    def _take(self, read: Callable[[], Any]) -> None:
        self._wait()
        if self.rounds is not None:
            self.rounds.meet("load_state_dict()")
        loaded, progress = agreed_state(self, read), self.progress
        step = loaded.step
        if self.rounds is not None:
            self.rounds.load_state_dict(loaded.rounds, anew=loaded.anew)
            step += self.rounds.in_round
        progress.steps_before = step - (progress.step - progress.steps_before)
        progress.step, progress.optimizer_steps = step, loaded.optimizer_steps
        self.pending = loaded.pending
        self._run(loaded.running)
        self.monitors.restart(loaded.density_factor)
        self.restarted()

    def _run(self, running: RunningMethod) -> None:
        """Go on with another method, or another state of the same one."""
        self.progress.spent.compensating += self.running.aggregator.clock.compensating
        self.progress.spent.compressing += self.running.aggregator.clock.compressing
        self.running = running
