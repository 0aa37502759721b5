"""The edge to DistributedDataParallel: buckets in, the group's means out, while the backward pass goes on."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from thinwire.edges.bucket_fusion import BucketFusion, FusedBuckets, Meter, choice
from thinwire.edges.bucket_plan import EachBucket, WholeStep
from thinwire.edges.bypass_warning import BypassWarning
from thinwire.edges.ddp_hook import Router, router_of
from thinwire.edges.drift_warning import DriftWarning
from thinwire.edges.fixed_buckets import FixedBuckets
from thinwire.edges.forward_checks import ForwardChecks
from thinwire.edges.other_optimizer_warning import OtherOptimizerWarning
from thinwire.edges.several_backwards import EnteringOpenStep, Held, OpenStep
from thinwire.edges.uncopied_hook import OwnHook
from thinwire.engine.context import Hyper
from thinwire.engine.layout import shaped_like
from thinwire.engine.optimizer import OptimizerView
from thinwire.engine.worker import Bucket
from thinwire.errors import TRAINED_INSIDE, UNCOPIED
from thinwire.monitor.clip_warning import ClipAfterExchangeWarning
from thinwire.monitor.ranks_differ import UNKNOWN
from thinwire.monitor.size_warning import SizeWarning
from thinwire.monitor.stragglers import SAMPLE_EVERY
from thinwire.reducer import Reducer
from thinwire.reducer.observing import needs_its_optimizer, numbers_to_compare
from thinwire.torch_private import backward_is_running, has_joined, ignored_by_ddp

UNUSED, IDLE, USED = range(3)  # what ranks did with a parameter in a pass: of several ranks the largest counts


class DdpEdge:
    """Takes DDP's buckets to a reducer, and their means back."""

    def __init__(self, model: DistributedDataParallel, reducer: Reducer) -> None:
        self.model, self.reducer = model, reducer
        parameters = reducer.parameters
        self._parameters = list(parameters.values())
        self._ordinals = {id(p): ordinal for ordinal, p in enumerate(self._parameters)}
        self._checks = ForwardChecks(model, parameters)
        self._drift_warning = DriftWarning(lambda: reducer.drifted)
        self._bypass_warning = BypassWarning()
        self._size_warning = SizeWarning()
        self._other_optimizer_warning = OtherOptimizerWarning()
        speaks = reducer.nets.own.rank == 0  # one rank does
        self._clip_warning = ClipAfterExchangeWarning(parameters.values()) if speaks else None
        self._handles: list[Any] = []
        self._hypers: Mapping[str, Hyper] = {}  # of the pass that is running, by name
        self._used: set[int] = set()  # ids of the parameters that this pass used, where that is tracked
        self._open = OpenStep(list(parameters.values()), logs=speaks)
        assert isinstance(reducer.view, OptimizerView)
        optimizers = reducer.view.optimizers
        self._watching = self._open.watch(
            optimizers, self._bypass_warning.backward, self._other_optimizer_warning.stepped
        )
        reducer.stepped = self._open.note_steps_of(optimizers, self._clip_warning)
        reducer.restarted = self._open.restart
        reducer.monitors.replicas = self._replicas
        reducer.unused = self._unused
        self._router: Router = router_of(model)
        self._router.target = self._on_bucket
        self._install()

    def __reduce__(self) -> Any:
        raise TypeError(UNCOPIED)

    def renew(self) -> None:
        """Another method goes on."""
        self._open.another_method(self._taken)
        if self._clip_warning is not None:
            self._clip_warning.restart()
        self._uninstall()
        self._install()

    def saves_own_state(self) -> None:
        self._drift_warning.saves_own_state()

    def leave(self) -> None:
        self._router.target = None
        self._uninstall()
        for handle in self._watching:
            handle.remove()

    def given_back(self, rest: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(rest)

    # ------------------------------------------------------------------------------------------------- assembling

    @property
    def _may_have_unused(self) -> bool:
        return bool(self.model.find_unused_parameters or self.model.static_graph)

    def _install(self) -> None:
        self._plan = self._make_plan()
        if self.reducer.nets.own.rank == 0:  # one rank speaks
            self._handles.append(self.reducer.view.before_step(self._before_optimizer_step))
            self._other_optimizer_warning.matters = needs_its_optimizer(self.reducer)
        if self.reducer.method.averaging_interval is not None:
            self._handles += self._drift_warning.watch(self.model.module)
        self._handles.append(self.model.register_forward_pre_hook(OwnHook(self._before_forward)))
        taken = self.reducer.running.with_momentum | self.reducer.running.with_decay
        self._taken = {ordinal for ordinal, name in enumerate(self.reducer.parameters) if name in taken}
        self._tracks_use = self._may_have_unused  # asked once: what was not tracked must not count as unused
        if self._tracks_use:
            used = self._used  # not self: a parameter's hook that knows its wire would keep both alive for ever
            for parameter in self.reducer.parameters.values():
                self._handles.append(parameter.register_post_accumulate_grad_hook(lambda p: used.add(id(p))))

    def _make_plan(self) -> EachBucket:
        """Which buckets are exchanged together: fixed, all, or what is found to be faster where no result changes."""
        reducer = self.reducer
        aggregator = reducer.running.aggregator
        independent = reducer.method.bucket_independent and not aggregator.sums_by_place
        if aggregator.whole_model or reducer.skipper is not None:  # a step can only be passed over as a whole
            return WholeStep()
        if not independent:
            return FixedBuckets([parameter.numel() for parameter in reducer.parameters.values()])
        on_host = reducer.nets.compute_device.type == "cpu"  # elsewhere a call's end says nothing about its duration
        if on_host and aggregator.fusible and not self._may_have_unused and reducer.nets.own.size > 1:
            whole = reducer.running.layout(tuple(range(len(reducer.parameters))))
            return FusedBuckets(BucketFusion(choice(), rounds=aggregator.waits(whole)))
        return EachBucket()

    def _uninstall(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _unused(self) -> dict[str, Any]:
        names = list(self.reducer.parameters)
        return {names[ordinal]: before for ordinal, before in self._open.unused().items()}

    def _replicas(self) -> Mapping[str, Tensor] | None:
        """What should be equal on all ranks; not while ranks that ran out of inputs take no steps (Join), until DDP
        gives them the others' model."""
        if has_joined(self.model):
            return None
        ignored = ignored_by_ddp(self.model)
        return {name: p for name, p in self.model.module.named_parameters() if name not in ignored}

    # ---------------------------------------------------------------------------------------------------- a pass

    def _before_optimizer_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self.reducer.shared_step.begins_with(optimizer, self.reducer.progress.passes):
            return
        if self._clip_warning is not None:
            scaler = self.reducer.skipper.scaler if self.reducer.skipper is not None else None
            scale = float(scaler.get_scale()) if scaler is not None else 1.0
            self._clip_warning.before_step(self.reducer.method, scale)
        if self.reducer.nets.own.size > 1:
            self._bypass_warning.before_step(self.reducer.progress.passes)
            if self._size_warning.counts(self.reducer.running, self.reducer.progress.step):
                self._size_warning.after_exchange(self.reducer.method, self.reducer.snapshot(residual_norm=False))

    def _before_forward(self, *_: Any) -> None:
        """Refuse what would hang or be wrong, and let go of what a backward pass that was broken off left behind."""
        if torch.is_grad_enabled():
            self._checks.check_parameters()
            self._bypass_warning.forward()
            if not backward_is_running():
                self._plan.reset()
        if has_joined(self.model):
            self._checks.check_join(self.model, self.reducer.method)

    @property
    def _shadows(self) -> bool:
        """Whether this rank has run out of inputs and only answers the exchanges of the others, with zeros."""
        return not self._router.saw_forward and has_joined(self.model)

    def _on_bucket(self, bucket: Bucket) -> None:
        """Called by DDP inside backward, in the same bucket order on every rank."""
        reducer, progress = self.reducer, self.reducer.progress
        if reducer.shows_mean:  # refused by all ranks, and nothing is exchanged
            self._used.clear()
            bucket.complete(ValueError(TRAINED_INSIDE))
            return
        bucket.ordinals = [self._ordinals[id(p)] for p in bucket.parameters]
        if bucket.is_first:
            self._hypers = reducer.view.hypers()  # of the pass
            if self._open.matters or not self._router.saw_forward:
                self._begin_pass()
        step = progress.step
        if bucket.is_last:  # counted before the exchange, which may say that the step did not happen
            progress.step += 1
        for buckets in self._plan.arrived(bucket):
            self._submit(buckets, step)
        if bucket.is_last:
            if self._clip_warning is not None and not self._clip_warning.ended:
                self._clip_warning.after_backward()
            progress.passes += 1
            if progress.passes % SAMPLE_EVERY == 0 and reducer.monitors.compares_ranks(reducer.running):
                numbers = UNKNOWN if self._shadows else numbers_to_compare(reducer)  # read now: a scheduler may go on
                reducer.worker.submit([], lambda _: reducer.monitors.compare_ranks(numbers))

    def _begin_pass(self) -> None:
        """Count a pass to the step that earlier passes have begun, where there was no optimizer step in between."""
        joined = has_joined(self.model)
        if joined and not self._router.saw_forward:  # the others' optimizers step, and nothing here tells
            self._open.stepped()
        # Ranks that have run out of inputs count passes, so there all do.
        if self._open.continues() and not joined:
            self.reducer.progress.step -= 1
        self._open.keeps = () if joined else self.reducer.running.copied

    def _submit(self, buckets: list[Bucket], step: int) -> None:
        """Hand buckets to the worker, with all that must be read now: when it comes to them, a closure's step() or a
        scheduler may have gone on."""
        reducer, shadows = self.reducer, self._shadows
        parameters = [p for bucket in buckets for p in bucket.parameters]
        ordinals = [ordinal for bucket in buckets for ordinal in bucket.ordinals]
        used = [self._use_of(o, p) for o, p in zip(ordinals, parameters, strict=True)] if self._tracks_use else None
        self._used.difference_update(map(id, parameters))
        scale = reducer.skipper.scale() if reducer.skipper is not None else 1.0
        held = self._open.held(ordinals, ends_pass=buckets[-1].is_last, all_used=used is None)
        if shadows:
            held = {}
        work = partial(
            self._exchange, hypers=self._hypers, step=step, scale=scale, used=used, shadows=shadows, held=held,
            plan=self._plan,
        )  # fmt: skip
        reducer.worker.submit(buckets, work)

    def _exchange(
        self,
        buckets: list[Bucket],
        hypers: Mapping[str, Hyper],
        step: int,
        scale: float,
        used: list[int] | None,
        shadows: bool,
        held: dict[int, Held] | None,
        plan: EachBucket,
    ) -> None:
        """On the worker's thread."""
        reducer, is_last = self.reducer, buckets[-1].is_last
        reducer.nets.step = step
        gradients = {
            ordinal: gradient
            for bucket in buckets
            for ordinal, gradient in zip(bucket.ordinals, bucket.gradients, strict=True)
        }
        idle = self._drop_unused(gradients, used) if used is not None else []
        if gradients:
            if reducer.skipper is not None and not reducer.skipper.passes(list(gradients.values()), reducer.nets.own):
                reducer.progress.step -= 1  # the step did not happen: schedules and random numbers stay as they were
                self._open.passed_over()
                return
            between = reducer.nets.between
            meter = Meter(between) if isinstance(plan, FusedBuckets) else None
            entering = None if held is None else EnteringOpenStep(self._open, held, reducer)
            reducer.exchange(gradients, hypers, step, scale, apply=shadows, entering=entering)
            for ordinal in idle:  # DDP itself leaves their .grad alone
                self._write(ordinal, gradients[ordinal])
            if meter is not None and isinstance(plan, FusedBuckets):
                plan.fusion.exchanged(meter.spent(), is_last, between)
        if is_last:
            reducer.monitors.step_exchanged(step, reducer.running)

    def _use_of(self, ordinal: int, parameter: Tensor) -> int:
        """USED in this pass; else IDLE where the optimizer steps all the same, because there is a .grad, and the method
        has taken momentum or weight decay over, which it would then apply; else UNUSED."""
        if id(parameter) in self._used:
            return USED
        return IDLE if parameter.grad is not None and ordinal in self._taken else UNUSED

    def _drop_unused(self, gradients: dict[int, Tensor], used: list[int]) -> list[int]:
        """Take out the parameters that no rank used: DDP leaves their .grad alone, so whatever were sent for them would
        be lost. Return those that no rank used and that stay, because they are idle on some rank."""
        own = self.reducer.nets.own
        flags = torch.tensor(used, dtype=torch.uint8, device=self.reducer.nets.compute_device)
        own.stage = "agree on used parameters"
        own.all_reduce(flags, largest=True)
        idle = []
        for ordinal, flag in zip(list(gradients), flags.tolist(), strict=True):
            if flag == UNUSED:
                del gradients[ordinal]
            elif flag == IDLE:
                idle.append(ordinal)
        return idle

    def _write(self, ordinal: int, gradient: Tensor) -> None:  # (numel,)
        parameter = self._parameters[ordinal]
        if parameter.grad is not None:
            parameter.grad.copy_(shaped_like(gradient, parameter.detach()))
