"""The live connection between a DDP model, its optimizer and a method."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from thinwire.edges.amp import StepSkipper
from thinwire.edges.bucket_fusion import BucketFusion, choice
from thinwire.edges.ddp import Router, router_of
from thinwire.edges.fixed_buckets import FixedBuckets
from thinwire.edges.optimizer import OptimizerView
from thinwire.edges.stepping import Stepper
from thinwire.engine.aggregators import Exchange, NoopMean
from thinwire.engine.hierarchy import Groups, Hierarchy
from thinwire.engine.layout import Layout, shaped_like
from thinwire.engine.local_gradients import averaged
from thinwire.engine.norms import UNMEASURED
from thinwire.engine.protocols import Aggregator
from thinwire.engine.stages import Clock
from thinwire.engine.worker import Bucket, Worker
from thinwire.errors import DetachedError
from thinwire.methods import Method, parse_method
from thinwire.monitor.clip_warning import ClipAfterExchangeWarning
from thinwire.monitor.health import Guard, check_watched
from thinwire.monitor.stragglers import StragglerMonitor
from thinwire.stats import Stats
from thinwire.transport import TorchNet, overhead
from thinwire.transport.failures import FailureDetector, failure_detector_of
from thinwire.transport.groups import acquire_group, check_agreement, release_group, timeout_of


class Wire(Stepper):
    """Made by ``thinwire.attach``. All methods that change something are collective: every rank calls them alike."""

    def __init__(
        self,
        model: DistributedDataParallel,
        view: OptimizerView,
        method: Method,
        net: TorchNet,
        groups: Groups | None,
        gate: StepSkipper | None,
        guard: Guard | None = None,
        check_replicas_every: int | None = None,
    ) -> None:
        self.model, self.method, self._skipper, self._guard = model, method, gate, guard
        self._check_every = check_replicas_every
        self._checked = 0  # passes at the last check of the replicas
        self._view, self._net, self._groups = view, net, groups
        self._parameters = view.parameters  # name -> parameter, in the model's order
        self._names = list(self._parameters)
        ignored: set[str] = getattr(model, "parameters_to_ignore", set())
        self._frozen = [(n, p) for n, p in model.module.named_parameters() if not p.requires_grad and n not in ignored]
        self._ordinals = {id(p): ordinal for ordinal, p in enumerate(self._parameters.values())}
        self._layouts: dict[tuple[int, ...], Layout] = {}
        self._step, self._steps_before = 0, 0
        self._passes = 0  # backward passes that were exchanged, also those that a gate passed over
        self._stragglers = StragglerMonitor()
        self._optimizer_steps = 0
        self._dense_bytes = 0
        self._drifted = self._warned_of_drift = False
        self._attached = True
        self._spent = Clock()  # by the methods before the last switch
        self._pending: dict[str, Tensor] = {}
        # A scaler unscales gradients before the step, so where there is one nothing can be told.
        watches = net.rank == 0 and (gate is None or gate.scaler is None)
        self._changes = ClipAfterExchangeWarning(view.parameters.values()) if watches else None
        self._waiting: list[Bucket] = []
        self._handles: list[Any] = []
        self._used: set[int] = set()
        self._measured = (-1, UNMEASURED)
        self._tracks_use = False
        self._machine_nets: list[tuple[TorchNet, tuple[int, ...]]] = []
        self._local_net, self._wire_net = self._make_nets(groups)
        timeout = timeout_of(model.process_group, net.device)
        self._failure_detector = failure_detector_of(
            net.group, net.device, timeout.total_seconds() if timeout is not None else None
        )
        for watched in (self._net, self._local_net, self._wire_net):
            if watched is not None:
                watched.failure_detector = self._failure_detector
        self._aggregator = self._build(method)
        self._merging = choice()
        self._fusion, self._fixed_buckets = self._make_merger(), self._make_regrouper()
        self._worker = Worker(net.compute_device)
        self._router: Router = router_of(model)
        self._router.target = self._on_bucket
        self._install()
        if method.takes_momentum(view.is_sgd):
            self._set_memory("velocity", view.give_velocity())

    @property
    def attached(self) -> bool:
        """Whether gradients go through this wire; not any more after ``detach``."""
        return self._attached

    def __repr__(self) -> str:
        state = "" if self._attached else ", detached"
        return f"<thinwire.Wire {self.method}, rank {self._net.rank} of {self._net.size}, {self._step} steps{state}>"

    @property
    def failure_detector(self) -> FailureDetector:
        """What finds out who is missing when an exchange fails. Other nets over the same ranks may use it, too, until
        this wire is detached."""
        return self._failure_detector

    # ----------------------------------------------------------------------------------------- what a user calls

    @property
    def stats(self) -> Stats:
        """Totals so far; a snapshot."""
        return self.snapshot()

    def snapshot(self, residual_norm: bool = True) -> Stats:
        """``stats``, on request without the residual's norm (then nan), which costs a pass over the residual."""
        if self._attached:
            self._worker.wait()
        traffic, clock = self._wire_net.traffic, self._aggregator.clock
        pace = self._stragglers.pace
        slowest, because = pace.slowest or (None, "")
        inside = self._local_net.traffic if self._local_net is not None else None
        communicating = self._wire_net.seconds + (self._local_net.seconds if self._local_net is not None else 0.0)
        compensating, compressing = (
            self._spent.compensating + clock.compensating,
            self._spent.compressing + clock.compressing,
        )
        busy = self._worker.busy_s
        if busy is not None:  # the host's clock would count the wait for the backward pass, too
            compensating, compressing = 0.0, max(0.0, busy - communicating)
        health = self._guard.health if self._guard is not None else None
        return Stats(
            steps=self._step - self._steps_before,
            world_size=self._wire_net.size,
            frame_bytes=traffic.handed,
            dense_bytes=self._dense_bytes,
            bytes_sent=traffic.sent,
            bytes_received=traffic.received,
            bytes_inside=inside.sent if inside is not None else 0,
            seconds_compensating=compensating,
            seconds_compressing=compressing,
            seconds_communicating=communicating,
            seconds_waiting=self._worker.waited_s,
            residual_norm=self._aggregator.residual_square_sum() ** 0.5 if residual_norm else math.nan,
            steps_skipped=self._skipper.skipped if self._skipper is not None else 0,
            residual_to_gradient=health.residual_to_gradient if health is not None else None,
            compression_error=health.compression_error if health is not None else None,
            staleness=health.staleness if health is not None else None,
            runaways=self._guard.runaways if self._guard is not None else 0,
            density=self._density(),
            waited_s=pace.waited_s,
            slowest_rank=slowest,
            slow_because=because,
            bytes_aside=sum(net.traffic.overhead for net in {id(n): n for n in (self._net, self._wire_net)}.values()),
            steps_before=max(0, self._steps_before),
        )

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """For the time of the block the model has the mean of all ranks' parameters, to evaluate or to save it.

        Only methods with local gradients let ranks drift apart; with the others this changes nothing. Train outside.
        """
        self._wait()
        with ExitStack() as stack:
            if self.method.replicas_drift:
                with overhead(self._net):
                    stack.enter_context(averaged(list(self._parameters.values()), self._net))
            stack.callback(setattr, self, "_drifted", self._drifted)
            self._drifted = False
            yield

    def switch(self, method: Method | str) -> None:
        """Change the method between two steps; nothing that the old one kept is lost.

        Gradients that were not sent go into the next gradient. What momentum has acted on already stays a residual
        where the new method has one of that kind, and is applied to the parameters at once where it has not. Warm-ups
        count steps from ``attach``, not from the switch.
        """
        self._wait()
        error, chosen = None, None
        try:
            chosen = parse_method(method) if isinstance(method, str) else method
            if not isinstance(chosen, Method):
                raise ValueError(f"method must be a thinwire method or its string form, not {method!r}")
            chosen.check_exclude(self._names)
            check_watched(chosen, self._guard.mode if self._guard is not None else None, self._check_every)
            if chosen.takes_momentum(self._view.is_sgd):
                self._view.check_takeover(chosen.name)
        except ValueError as problem:
            error = str(problem)
        with overhead(self._net):
            check_agreement(self._net, {"method": repr(chosen)}, error)
        assert chosen is not None
        self._reunite()
        took, takes = self.method.takes_momentum(self._view.is_sgd), chosen.takes_momentum(self._view.is_sgd)
        velocity, rest, old = self._velocity(), self._leftover(), self._aggregator
        if took and not takes:
            self._view.take_velocity(self._mean_velocity())
        elif takes and not took:
            velocity = self._view.give_velocity()
        self._uninstall()
        self._drifted = False
        self._spent.compensating += old.clock.compensating
        self._spent.compressing += old.clock.compressing
        self.method, self._layouts = chosen, {}
        self._aggregator = self._build(chosen)
        self._fusion, self._fixed_buckets = self._make_merger(), self._make_regrouper()
        if self._guard is not None:
            self._guard.restart()
        self._install()
        if takes:
            self._set_memory("velocity", velocity)
        if not took:
            for name, tensor in rest.items():
                self._pending[name] = self._pending[name] + tensor if name in self._pending else tensor
        elif takes and "residual" in self._memory.state.kinds:
            self._set_memory("residual", _scaled(rest, self._weight))
        else:
            self._apply(self._mean_over_ranks(rest))

    def detach(self) -> dict[str, Tensor]:
        """End compression: momentum goes back to the optimizer; returns what was not sent, as the group's mean by name.

        Another training step of the model then needs a new ``attach`` (or a new DDP around the module). After an
        exchange that failed, or when the process group was destroyed before, nothing is communicated any more: this
        rank's own momentum goes back, and {} is returned.
        """
        if not self._attached:
            return {}
        self._worker.wait()
        if self._worker.out_of_step or not self._net.alive:
            if self.method.takes_momentum(self._view.is_sgd):
                self._view.take_velocity(self._velocity())
            self._leave()
            return {}
        self._reunite()
        if self.method.takes_momentum(self._view.is_sgd):
            self._view.take_velocity(self._mean_velocity())
        rest = self._leftover()
        for name, pending in self._pending.items():
            rest[name] = rest[name] + pending if name in rest else pending
        mean = self._mean_over_ranks(rest)
        self._leave()
        self._give_back_nets()
        return {name: shaped_like(tensor, self._parameters[name].detach()) for name, tensor in mean.items()}

    def abandon(self) -> None:
        """End compression without moving a byte: momentum and whatever was not sent are dropped. For measurements."""
        self._worker.wait()
        self._leave()
        self._give_back_nets()

    def _give_back_nets(self) -> None:
        if not self._worker.broken:  # else something may still be under way on them
            for net, members in self._machine_nets:
                release_group(self._net, net, members)
            release_group(TorchNet(self.model.process_group, self._net.compute_device), self._net)

    def _wait(self) -> None:
        """Return when all exchanges so far are done; refuse where there will be no more."""
        if not self._attached:
            raise DetachedError("this wire was detached; call thinwire.attach again")
        self._worker.wait()

    def _leave(self) -> None:
        self._attached = False
        self._router.target = None
        self._uninstall()
        self._worker.stop()
        self._failure_detector.close()

    # ------------------------------------------------------------------------------------------------- assembling

    def _make_nets(self, groups: Groups | None) -> tuple[TorchNet | None, TorchNet]:
        """Return the net inside this machine (None without a hierarchy) and the net that is compressed on."""
        if groups is None:
            return None, self._net
        leaders = tuple(group[0] for group in groups)
        self._machine_nets = [(acquire_group(self._net, members), members) for members in (*groups, leaders)]
        local = next(net for net, members in self._machine_nets if self._net.rank in members)
        return local, self._machine_nets[-1][0]

    def _build(self, method: Method) -> Aggregator:
        aggregator = method.aggregator(self._wire_net, self._view.is_sgd)
        if self._local_net is None or self._groups is None:
            return aggregator
        if not self._compresses and not isinstance(aggregator, Exchange):
            aggregator = NoopMean(self._wire_net)  # the machine's mean as it is, in no shorter type
        return Hierarchy(aggregator, self._local_net, ranks_a_machine=self._net.size / len(self._groups))

    def _make_merger(self) -> BucketFusion | None:
        """What decides which buckets travel together; None where that is fixed, or would change the result."""
        aggregator, net = self._aggregator, self._net
        if not isinstance(aggregator, Exchange) or aggregator.whole_model or not self.method.bucket_independent:
            return None
        on_host = net.compute_device.type == "cpu"  # elsewhere a call's end says nothing about its duration
        fixed = self._skipper is not None or self._may_have_unused or net.size == 1
        return BucketFusion(self._merging, rounds=aggregator.rounds) if on_host and not fixed else None

    def _make_regrouper(self) -> FixedBuckets | None:
        """What keeps exchanges the same whatever DDP's buckets are; None where they are, or do not matter."""
        if self.method.bucket_independent or self._aggregator.whole_model or self._skipper is not None:
            return None
        return FixedBuckets([parameter.numel() for parameter in self._parameters.values()])

    def _install(self) -> None:
        sgd = self._view.is_sgd
        self._view.take_over(momentum=self.method.takes_momentum(sgd), weight_decay=self.method.takes_weight_decay(sgd))
        if self._skipper is not None:
            self._handles.append(self._view.optimizer.register_step_pre_hook(self._skipper.before_optimizer_step))
        self._handles.append(self._view.optimizer.register_step_pre_hook(self._before_optimizer_step))
        self._handles.append(self._view.optimizer.register_step_post_hook(self._after_optimizer_step))
        self._handles.append(self.model.register_forward_pre_hook(self._before_forward))
        self._tracks_use = self._may_have_unused  # asked once: what was not tracked must not count as unused
        if self._tracks_use:
            used = self._used  # not self: a parameter's hook that knows its wire would keep both alive for ever
            for parameter in self._parameters.values():
                self._handles.append(parameter.register_post_accumulate_grad_hook(lambda p: used.add(id(p))))

    def _uninstall(self) -> None:
        self._view.release()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @property
    def _may_have_unused(self) -> bool:
        return bool(self.model.find_unused_parameters or self.model.static_graph)


def _scaled(vectors: dict[str, Tensor], factor: float) -> dict[str, Tensor]:
    return {name: tensor * factor for name, tensor in vectors.items()}
