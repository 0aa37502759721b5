"""The engine without a framework: gradients by name in, the group's mean out."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.checkpoint.dcp import read_states
from thinwire.checkpoint.format import STATE_FORMAT, StateShape, pack, state_for
from thinwire.engine.context import ExchangeContext, Hyper
from thinwire.engine.fixed_groups import fixed_groups
from thinwire.engine.hierarchy import machine_groups
from thinwire.engine.layout import Layout, memory_flat, shaped_like
from thinwire.engine.local_gradients import average_parameters, averaged
from thinwire.engine.norms import UNMEASURED, Measured
from thinwire.engine.optimizer import NoOptimizer, OptimizerView
from thinwire.engine.stages import Clock
from thinwire.engine.step_skipper import Scaler, StepSkipper, check_skipping
from thinwire.engine.worker import Worker
from thinwire.errors import DetachedError
from thinwire.methods import Method, parse_method
from thinwire.methods.running import RunningMethod
from thinwire.monitor.health import Guard, check_watched
from thinwire.monitor.monitors import Monitors
from thinwire.monitor.stragglers import SAMPLE_EVERY
from thinwire.stats import Stats
from thinwire.transport import Net, TorchNet, overhead
from thinwire.transport.groups import check_agreement
from thinwire.transport.nets import GroupNets, Nets

HierarchySpec = str | int | Sequence[Sequence[int]] | None


@dataclass
class Progress:
    """How far the training is."""

    step: int = 0  # exchanged, with those of the run whose state was loaded
    steps_before: int = 0  # of them were made by that run
    passes: int = 0  # that were exchanged here, also those that were passed over: the same on all ranks
    optimizer_steps: int = 0
    dense_bytes: int = 0
    spent: Clock = field(default_factory=Clock)  # by the methods before the last switch


class Entering(Protocol):
    """What an edge knows of gradients that enter an exchange, where not all of them is new."""

    def new_only(self, layout: Layout, parts: Sequence[Tensor]) -> None:
        """Take what is not new out of the gradients."""
        ...

    def enter(
        self, layout: Layout, parts: Sequence[Tensor], hypers: tuple[Hyper, ...], weights: tuple[Tensor, ...]
    ) -> tuple[tuple[Hyper, ...], tuple[Tensor, ...]]:
        """Put what is to be exchanged into the parts; return the hyper-parameters, and the weights that decay."""
        ...

    def leave(self, layout: Layout, parts: Sequence[Tensor]) -> None:
        """Add what lay in the gradients to the mean."""
        ...

    def written(self, layout: Layout, gradients: Sequence[Tensor]) -> None:
        """The mean is in the gradients."""
        ...


@dataclass(frozen=True)
class EdgeTerms:
    """What an edge adds to what all ranks must agree on before anything is changed, or the error that it found."""

    description: Mapping[str, object] = field(default_factory=dict)
    error: str | None = None


class Reducer:
    """Replaces gradients by their mean over a group, as a method makes it, and keeps what was not sent.

    All methods that change something are collective: every rank calls them alike.

    ``named_tensors`` are the parameters, by name, in an order that is the same on every rank: a mapping or what
    ``named_parameters()`` gives. ``group`` is a process group (the default one unless given). With an ``optimizer``
    its learning rates are read at every step and, where the method applies momentum and weight decay in front of the
    compression, its own are switched off while ``optimizer.step()`` runs; without one the learning rate is 1 and there
    is neither momentum nor weight decay.

    ``hierarchy``, ``on_nonfinite``, ``scaler``, ``guard``, ``guard_every`` and ``check_replicas_every`` are those of
    ``thinwire.attach``.

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
        optimizer: torch.optim.Optimizer | None = None,
        *,
        hierarchy: HierarchySpec = None,
        on_nonfinite: str = "raise",
        scaler: Scaler | None = None,
        guard: str | None = None,
        guard_every: int = 20,
        check_replicas_every: int | None = None,
        terms: EdgeTerms | None = None,
    ) -> None:
        terms = terms or EdgeTerms()
        self.parameters: dict[str, Tensor] = dict(named_tensors)
        parent, ranks, make_nets = _group_of(group, self.parameters)
        error, machines, view, chosen = terms.error, None, None, None
        try:
            if error is None:
                chosen = parse_method(method) if isinstance(method, str) else method
                view = _checked(self.parameters, optimizer, chosen)
                machines = machine_groups(hierarchy, ranks)
                check_skipping(on_nonfinite, scaler)
                check_watched(chosen, guard, check_replicas_every, guard_every)
        except (ValueError, RuntimeError) as problem:
            error = str(problem)
        skips = scaler is not None or on_nonfinite == "skip"
        description = {
            "method": repr(chosen),
            "hierarchy": [list(ranks) for ranks in machines] if machines is not None else None,
            "parameters": {name: _form_of(p) for name, p in self.parameters.items()},
            "on_nonfinite": on_nonfinite,
            "gated": str(skips),
            "guard": str(guard),
            "guard_every": str(guard_every),
            "check_replicas_every": str(check_replicas_every),
        }
        if parent is not None:
            check_agreement(parent, {**description, **terms.description}, error)
        elif error is not None:
            raise ValueError(error)
        assert chosen is not None and view is not None
        self.view, self.method = view, chosen
        self.nets = make_nets(machines)
        self.progress = Progress()
        self.skipper = StepSkipper(scaler) if skips else None
        health = Guard(guard, guard_every) if guard is not None else None
        self.monitors = Monitors(self.nets, health, check_replicas_every, lambda: self.parameters)
        self.running = RunningMethod(chosen, self.parameters, self.nets, view.is_sgd)
        self.worker = Worker(self.nets.compute_device, self.nets.report)
        self.stepped: Callable[[], None] = lambda: None  # called after every step of the optimizer that counts
        self.drifted = False  # the ranks' parameters differ, and this is not inside averaged()
        self._pending: dict[str, Tensor] = {}  # gradients that enter the next exchange
        self._attached = True
        self._handles: list[Any] = []
        self._install()
        if self.running.takes_momentum:
            self.running.keep("velocity", view.give_velocity())

    def __repr__(self) -> str:
        state = "" if self._attached else ", detached"
        own = self.nets.own
        return f"<thinwire.Reducer {self.method}, rank {own.rank} of {own.size}, {self.progress.step} steps{state}>"

    @property
    def attached(self) -> bool:
        """Whether gradients go through this reducer; not any more after ``detach``."""
        return self._attached

    # ---------------------------------------------------------------------------------------------------- one step

    def reduce(self, gradients: Mapping[str, Tensor]) -> None:
        """Replace every gradient by the group's mean, in place; one step. All ranks give the same names."""
        self._wait()
        ordinals = self._ordinals(gradients)
        parts = {place: _flat_like(self.parameters[name], gradients[name]) for place, name in ordinals.items()}
        hypers = dict(zip(ordinals, self.view.hypers(self.parameters[name] for name in ordinals.values()), strict=True))
        scale = self.skipper.scale() if self.skipper is not None else 1.0
        step = self.progress.step
        self.progress.step += 1
        self.progress.passes += 1

        def work() -> None:
            self.nets.step = step
            if self.skipper is not None and not self.skipper.passes(list(parts.values()), self.nets.own):
                self.progress.step -= 1  # the step did not happen: schedules and random numbers stay where they were
                return
            for group in self._groups(tuple(sorted(ordinals))):
                self.exchange({place: parts[place] for place in group}, hypers, step, scale)
            self.monitors.step_exchanged(step, self.running)
            if self.progress.passes % SAMPLE_EVERY == 0 and self.monitors.compares_pace(self.running):
                self.monitors.sample_pace()

        self.worker.run(work)
        for place, name in ordinals.items():
            _copy_back(parts[place], self.parameters[name], gradients[name])

    def _ordinals(self, gradients: Mapping[str, Tensor]) -> dict[int, str]:
        """The names by their places in the model; a ValueError where a gradient is not one of theirs."""
        places = {name: place for place, name in enumerate(self.parameters)}
        for name, gradient in gradients.items():
            if name not in places:
                raise ValueError(f"reduce got a gradient {name!r}, which is none of the reducer's tensors")
            if not isinstance(gradient, Tensor) or gradient.shape != self.parameters[name].shape:
                form = tuple(gradient.shape) if isinstance(gradient, Tensor) else type(gradient).__name__
                expected = tuple(self.parameters[name].shape)
                raise ValueError(f"reduce got {form} for {name!r}, whose shape is {expected}; give a gradient as large")
            if not gradient.is_floating_point() or gradient.is_sparse:
                raise ValueError(f"reduce got a gradient of {name!r} that is not of dense real numbers; make it so")
        if not gradients:
            raise ValueError("reduce got no gradients: give at least one, by the name of its tensor")
        return {places[name]: name for name in gradients}

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
        hypers: Mapping[int, Hyper],
        step: int,
        scale: float = 1.0,
        *,
        apply: bool = False,
        entering: Entering | None = None,
    ) -> None:
        """Replace flat gradients, by their places in the model, by the group's mean.

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
            entered = tuple(hypers[segment.ordinal] for segment in segments)
            if entering is not None:
                entered, weights = entering.enter(layout, parts, entered, weights)
            if self._pending:
                self._add_pending(segments, parts)
            context = ExchangeContext(layout, step, entered, weights)
            norms: Measured = UNMEASURED
            if self.monitors.health is not None:
                norms = self.monitors.norms(step).of_gradients(parts)
            self.progress.dense_bytes += 4 * layout.numel
            self.monitors.add(step, self.running.aggregator.reduce(context, parts, norms))
            if apply and self.running.takes_weight_decay:
                # No step follows here, but this rank's share of the weight decay needs the parameters of the moment.
                self._apply({segment.name: part for segment, part in zip(segments, parts, strict=True)})
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
        return self.running.copy_of(name), self._pending.get(name)

    def put_back(self, name: str, copies: Any) -> None:
        """Keep again what ``copy_of`` gave."""
        kept, pending = copies
        self.running.put_back(name, kept)
        if pending is not None:
            self._pending[name] = pending

    def _add_pending(self, segments: Iterable[Any], parts: Sequence[Tensor]) -> None:
        for segment, part in zip(segments, parts, strict=True):
            pending = self._pending.pop(segment.name, None)
            if pending is not None:
                part.add_(pending)
                if pending.is_cuda:  # made on another stream
                    pending.record_stream(torch.cuda.current_stream(pending.device))

    def _after_optimizer_step(self, *_: Any) -> None:
        if self.skipper is not None and self.skipper.was_skipped():
            return
        self.stepped()
        progress, interval = self.progress, self.method.averaging_interval
        progress.optimizer_steps += 1
        averages = interval is not None and progress.optimizer_steps % interval == 0
        self.drifted = interval is not None and not averages and self.nets.own.size > 1
        if averages:
            self.worker.wait()
            average_parameters(self.parameters.values(), self.nets.own)
        equal = interval is None or averages  # replicas that drift are equal after an averaging
        if self.monitors.checks_replicas(progress.passes, equal):
            self.worker.wait()
        self.monitors.after_optimizer_step(progress.passes, progress.optimizer_steps, equal)

    # ------------------------------------------------------------------------------------------ looking, evaluating

    @property
    def stats(self) -> Stats:
        """Totals so far; a snapshot."""
        return self.snapshot()

    def snapshot(self, residual_norm: bool = True) -> Stats:
        """``stats``, on request without the residual's norm (then nan), which costs a pass over the residual."""
        if self._attached:
            self.worker.wait()
        nets, progress, aggregator = self.nets, self.progress, self.running.aggregator
        traffic, communicating = nets.between.traffic, nets.seconds
        pace = self.monitors.stragglers.pace
        slowest, because = pace.slowest or (None, "")
        compensating = progress.spent.compensating + aggregator.clock.compensating
        compressing = progress.spent.compressing + aggregator.clock.compressing
        busy = self.worker.busy_s
        if busy is not None:  # the host's clock would count the wait for the backward pass, too
            compensating, compressing = 0.0, max(0.0, busy - communicating)
        guard = self.monitors.health
        health = guard.health if guard is not None else None
        return Stats(
            steps=progress.step - progress.steps_before,
            world_size=nets.between.size,
            frame_bytes=traffic.handed,
            dense_bytes=progress.dense_bytes,
            bytes_sent=traffic.sent,
            bytes_received=traffic.received,
            bytes_inside=nets.inside.traffic.sent if nets.inside is not None else 0,
            seconds_compensating=compensating,
            seconds_compressing=compressing,
            seconds_communicating=communicating,
            seconds_waiting=self.worker.waited_s,
            residual_norm=aggregator.residual_square_sum() ** 0.5 if residual_norm else math.nan,
            steps_skipped=self.skipper.skipped if self.skipper is not None else 0,
            residual_to_gradient=health.residual_to_gradient if health is not None else None,
            compression_error=health.compression_error if health is not None else None,
            staleness=health.staleness if health is not None else None,
            runaways=guard.runaways if guard is not None else 0,
            density=self.running.density(progress.step),
            waited_s=pace.waited_s,
            slowest_rank=slowest,
            slow_because=because,
            bytes_overhead=nets.bytes_overhead,
            steps_before=max(0, progress.steps_before),
        )

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """For the time of the block the parameters are their mean over all ranks, to evaluate or to save them.

        Only methods with local gradients let ranks drift apart; with the others this changes nothing. Train outside.
        """
        self._wait()
        with ExitStack() as stack:
            if self.method.replicas_drift:
                with overhead(self.nets.own):
                    stack.enter_context(averaged(list(self.parameters.values()), self.nets.own))
            stack.callback(setattr, self, "drifted", self.drifted)
            self.drifted = False
            yield

    # ---------------------------------------------------------------------------------------- changing the method

    def switch(self, method: Method | str) -> None:
        """Change the method between two steps; nothing that the old one kept is lost.

        Gradients that were not sent go into the next gradient. What momentum has acted on already stays a residual
        where the new method has one of that kind, and is applied to the parameters at once where it has not. Warm-ups
        count steps from the beginning, not from the switch.
        """
        self._wait()
        chosen = self._agree_on(method)
        self._reunite()
        old, own = self.running, self.nets.own
        took, takes = old.takes_momentum, chosen.takes_momentum(self.view.is_sgd)
        velocity, rest = old.kept("velocity"), self._leftover()
        if took and not takes:
            self.view.take_velocity(self._mean_velocity())
        elif takes and not took:
            velocity = self.view.give_velocity()
        self._uninstall()
        self.drifted = False
        self.progress.spent.compensating += old.aggregator.clock.compensating
        self.progress.spent.compressing += old.aggregator.clock.compressing
        self.method = chosen
        self.running = RunningMethod(chosen, self.parameters, self.nets, self.view.is_sgd)
        self.monitors.restart()
        self._install()
        if takes:
            self.running.keep("velocity", velocity)
        if not took:
            for name, tensor in rest.items():
                self._pending[name] = self._pending[name] + tensor if name in self._pending else tensor
        elif takes and "residual" in self.running.memory.state.kinds:
            self.running.keep("residual", {name: tensor * self.running.weight for name, tensor in rest.items()})
        else:
            self._apply(self._mean_over_ranks(rest, own))

    def _agree_on(self, method: Method | str) -> Method:
        """The method that all ranks switch to; the same ValueError on all of them where one cannot."""
        error, chosen = None, None
        try:
            chosen = parse_method(method) if isinstance(method, str) else method
            if not isinstance(chosen, Method):
                raise ValueError(f"method must be a thinwire method or its string form, not {method!r}")
            chosen.check_exclude(list(self.parameters))
            guard = self.monitors.health
            check_watched(chosen, guard.mode if guard is not None else None, self.monitors.check_every)
            if chosen.takes_momentum(self.view.is_sgd):
                self.view.check_takeover(chosen.name)
        except ValueError as problem:
            error = str(problem)
        with overhead(self.nets.own):
            check_agreement(self.nets.own, {"method": repr(chosen)}, error)
        assert chosen is not None
        return chosen

    def detach(self) -> dict[str, Tensor]:
        """End compression: momentum goes back to the optimizer; returns what was not sent, as the group's mean by name.

        After an exchange that failed, or when the process group was destroyed before, nothing is communicated any
        more: this rank's own momentum goes back, and {} is returned.
        """
        if not self._attached:
            return {}
        self.worker.wait()
        if self.worker.out_of_step or not self.nets.alive:
            if self.running.takes_momentum:
                self.view.take_velocity(self.running.kept("velocity"))
            self._leave()
            return {}
        self._reunite()
        if self.running.takes_momentum:
            self.view.take_velocity(self._mean_velocity())
        rest = self._leftover()
        for name, pending in self._pending.items():
            rest[name] = rest[name] + pending if name in rest else pending
        mean = self._mean_over_ranks(rest, self.nets.own)
        self.abandon()
        return {name: shaped_like(tensor, self.parameters[name].detach()) for name, tensor in mean.items()}

    def abandon(self) -> None:
        """End compression without moving a byte: momentum and whatever was not sent are dropped. For measurements."""
        self.worker.wait()
        self._leave()
        if not self.worker.broken:  # else something may still be under way on them
            self.nets.release()

    def _wait(self) -> None:
        """Return when all exchanges so far are done; refuse where there will be no more."""
        if not self._attached:
            raise DetachedError("this wire was detached; call thinwire.attach again")
        self.worker.wait()

    def _leave(self) -> None:
        self._attached = False
        self._uninstall()
        self.worker.stop()
        self.nets.close()

    def _install(self) -> None:
        running = self.running
        self.view.take_over(momentum=running.takes_momentum, weight_decay=running.takes_weight_decay)
        if self.skipper is not None:
            self._handles.append(self.view.before_step(self.skipper.before_optimizer_step))
        self._handles.append(self.view.after_step(self._after_optimizer_step))

    def _uninstall(self) -> None:
        self.view.release()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # ------------------------------------------------------------------------------------------- what it keeps

    def _mean_velocity(self) -> dict[str, Tensor]:
        return self._mean_over_ranks(self.running.shared(self.running.kept("velocity")), self.nets.own)

    def _leftover(self) -> dict[str, Tensor]:
        numels = {name: p.numel() for name, p in self.parameters.items()}
        rates = {name: self.view.hyper(p).lr for name, p in self.parameters.items()}
        return self.running.aggregator.leftover(numels, rates)

    def _reunite(self) -> None:
        """Make the replicas equal again after a method that lets them drift apart: parameters and optimizer state."""
        if self.method.replicas_drift:
            tensors = [*self.parameters.values(), *self.view.states_like_parameters()]
            with overhead(self.nets.own):
                average_parameters(tensors, self.nets.own)

    def _apply(self, mean: Mapping[str, Tensor]) -> None:
        """Step by an update that momentum has acted on already: w -= lr * mean."""
        with torch.no_grad():
            for name, update in mean.items():
                parameter = self.parameters[name]
                hyper = self.view.hyper(parameter)
                rate = hyper.lr if hyper.maximize else -hyper.lr
                parameter.add_(shaped_like(update, parameter.detach()), alpha=rate)

    def _mean_over_ranks(self, mine: Mapping[str, Tensor], net: Any) -> dict[str, Tensor]:
        """The mean of per-parameter vectors over all ranks; a rank without one counts as zero."""
        sizes = [p.numel() for p in self.parameters.values()]
        flat = torch.zeros(sum(sizes), dtype=torch.float32, device=self.nets.compute_device)
        views = dict(zip(self.parameters, flat.split(sizes), strict=True))
        for name, tensor in mine.items():
            views[name].copy_(tensor.reshape(-1))
        net.stage = "move what was not sent"
        with overhead(net):
            net.all_reduce(flat)
        flat.div_(net.size)
        return {name: view.clone() for name, view in views.items()}

    # ------------------------------------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return everything of this rank that a later run needs: residuals, velocities, errors, counters, method.

        The state of a moment has the same keys and shapes as that of any other, and what belongs to a rank lies under
        the rank's own key: torch.distributed.checkpoint takes a reducer as it is, ``dcp.save({"wire": wire}, ...)``.
        """
        self._wait()
        plain = {
            **self._terms(),
            "step": self.progress.step,
            "optimizer_steps": self.progress.optimizer_steps,
            "density_factor": self.running.density_factor,
            "pending": {name: tensor.clone() for name, tensor in self._pending.items()},
            "aggregator": self.running.aggregator.state_dict(),
        }
        return pack(plain, self._shape())

    def _terms(self) -> dict[str, Any]:
        """What a state must have in common with the one that is loaded."""
        return {
            "format": STATE_FORMAT,
            "method": self.method.in_full,
            "parameters": tuple((name, p.numel()) for name, p in self.parameters.items()),
            "world_size": self.nets.own.size,
            "rank": self.nets.own.rank,
            "hierarchy": self.nets.groups,
        }

    def _shape(self) -> StateShape:
        shapes = {name: p.shape for name, p in self.parameters.items()}
        between = self.nets.between
        return StateShape.of(self.running, shapes, between.rank, between.size, self.nets.compute_device)

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Take up where ``state_dict`` left off; a state that does not fit raises and changes nothing.

        ``state`` is what this rank saved, or the list of all ranks' states. With the list the group may have another
        size or hierarchy than the one that saved it: what was not sent is then redistributed, and none of it is lost.
        """
        self._wait()
        progress = self.progress
        one = state_for(state, self._terms(), self._shape())
        progress.steps_before = one["step"] - (progress.step - progress.steps_before)
        progress.step, progress.optimizer_steps = one["step"], one["optimizer_steps"]
        self._pending = {name: t.to(self.nets.compute_device).clone() for name, t in one["pending"].items()}
        self.running.aggregator.load_state_dict(one["aggregator"])
        self.monitors.restart(one["density_factor"])
        self.running.density_factor = one["density_factor"]

    def load_checkpoint(self, checkpoint_id: str | os.PathLike[str], key: str = "wire") -> None:
        """Load what ``dcp.save({key: wire, ...}, checkpoint_id=...)`` wrote, also with another number of ranks.

        ``dcp.load`` itself is enough where the group is the one that saved. Nothing is communicated here: every rank
        reads its own part, or all parts where the group is another one.
        """
        group = {"world_size": self.nets.own.size, "hierarchy": self.nets.groups}
        self.load_state_dict(read_states(checkpoint_id, key, self.nets.own.rank, group))


def _group_of(group: Any, parameters: Mapping[str, Tensor]) -> tuple[TorchNet | None, int, Callable[[Any], Nets]]:
    """A net for small agreements (None where all ranks run in one process, from one call), the number of ranks, and
    what makes the nets of the exchanges when all ranks have agreed."""
    if group is None or isinstance(group, dist.ProcessGroup):
        if not dist.is_initialized():
            raise ValueError(
                "a Reducer needs a process group: call torch.distributed.init_process_group first, or start the script "
                "with torchrun"
            )
        process_group: Any = group if group is not None else dist.group.WORLD
        device = next((p.device for p in parameters.values()), torch.device("cpu"))
        parent = TorchNet(process_group, device)
        return parent, parent.size, lambda machines: GroupNets(process_group, device, machines)
    return None, group.size, lambda machines: Nets(group)


def _form_of(parameter: Tensor) -> str:
    return f"{list(parameter.shape)} {str(parameter.dtype).removeprefix('torch.')}"


def _checked(
    parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer | None, method: Any
) -> OptimizerView | NoOptimizer:
    """The optimizer as the engine reads it; a ValueError where parameters, optimizer and method do not fit."""
    if isinstance(method, type) and issubclass(method, Method):
        raise ValueError(f"method is the class {method.__name__}; make one of it: thinwire.{method.__name__}()")
    if not isinstance(method, Method):
        raise ValueError(f"method must be a thinwire method such as thinwire.DGC() or its string form, not {method!r}")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"attach needs a torch optimizer, not {type(optimizer).__name__}")
    for name, parameter in parameters.items():
        if not parameter.is_floating_point():
            kind = str(parameter.dtype).removeprefix("torch.")
            raise ValueError(
                f"parameter {name!r} is {kind}; gradients are exchanged as float32, so use real parameters"
            )
    method.check_exclude(list(parameters))
    view = OptimizerView(optimizer, dict(parameters)) if optimizer is not None else NoOptimizer()
    if optimizer is None and method.averaging_interval is not None:
        raise ValueError(
            f"{method} averages the parameters every {method.averaging_interval} optimizer steps and must see them; "
            "give optimizer="
        )
    if method.takes_momentum(view.is_sgd):
        view.check_takeover(method.name)
    return view


def _flat_like(parameter: Tensor, gradient: Tensor) -> Tensor:  # -> (numel,)
    """The gradient's elements in the order in which the parameter's lie in memory: a view where that is theirs."""
    gradient = gradient.detach()
    if gradient.stride() == parameter.stride():
        return memory_flat(gradient)
    return memory_flat(torch.empty_like(parameter, dtype=gradient.dtype, device=gradient.device).copy_(gradient))


def _copy_back(part: Tensor, parameter: Tensor, gradient: Tensor) -> None:
    """Put the mean where the gradient lies, where it is not there already."""
    if part.untyped_storage().data_ptr() != gradient.untyped_storage().data_ptr():
        with torch.no_grad():
            gradient.copy_(shaped_like(part, parameter.detach()))
