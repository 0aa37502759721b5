"""A wire's part in a training step: DDP's buckets in, the group's means out, in the same order on every rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thinwire.edges.amp import StepSkipper
from thinwire.edges.bucket_fusion import BucketFusion, Meter
from thinwire.edges.ddp import THAWED, Router
from thinwire.edges.fixed_buckets import FixedBuckets
from thinwire.edges.saving import Saver
from thinwire.engine.context import ExchangeContext
from thinwire.engine.layout import Layout
from thinwire.engine.local_gradients import DRIFTED, average_parameters
from thinwire.engine.norms import UNMEASURED, Measured, Norms
from thinwire.engine.worker import Bucket
from thinwire.errors import ExchangeError, NonFiniteError
from thinwire.monitor.clip_warning import ClipAfterExchangeWarning
from thinwire.monitor.stragglers import SAMPLE_EVERY, StragglerMonitor
from thinwire.monitor.user_warning import warn_user
from thinwire.transport import TorchNet
from thinwire.transport.failures import FailureDetector


class Stepper(Saver):
    """The part of a wire that exchanges; ``thinwire.edges.wire`` sets its attributes and registers its hooks."""

    _skipper: StepSkipper | None
    _changes: ClipAfterExchangeWarning | None  # on one rank, where nothing else changes gradients
    _frozen: list[tuple[str, Tensor]]  # parameters that DDP does not exchange
    _ordinals: dict[int, int]  # by id: a parameter's place in the model
    _layouts: dict[tuple[int, ...], Layout]  # by ordinals
    _local_net: TorchNet | None  # inside this machine
    _failure_detector: FailureDetector
    _fusion: BucketFusion | None
    _fixed_buckets: FixedBuckets | None
    _stragglers: StragglerMonitor
    _router: Router
    _waiting: list[Bucket]  # of this pass, until their exchange begins
    _measured: tuple[int, Measured]  # the last exchange's step, and its norms
    _used: set[int]  # ids of the parameters that this pass used, where that is tracked
    _tracks_use: bool
    _dense_bytes: int
    _drifted: bool  # the ranks' parameters differ, and this is not inside averaged()
    _warned_of_drift: bool

    def _before_forward(self, *_: Any) -> None:
        """Refuse what would hang or be wrong, let go of what a backward pass that was broken off left behind, and warn
        once when a model is evaluated whose ranks differ."""
        if torch.is_grad_enabled():
            thawed = next((name for name, p in self._frozen if p.requires_grad), None)
            if thawed is not None:
                raise ValueError(THAWED.format(thawed))
            if torch._C._current_graph_task_id() == -1:  # no backward pass is running
                self._waiting = []
                if self._fixed_buckets is not None:
                    self._fixed_buckets.forget()
        if self.model._join_config.enable:
            self._check_join()
        if self._drifted and not self._warned_of_drift and not self.model.training and not torch.is_grad_enabled():
            self._warned_of_drift = True
            warn_user(DRIFTED)

    def _check_join(self) -> None:
        """Refuse what cannot be done once a rank runs out of inputs (torch.distributed.algorithms.Join)."""
        if getattr(self.method, "local", None) is not None:
            raise ValueError(
                f"{self.method} applies every rank's own gradient, which ranks without inputs do not have; "
                "use a method without local gradients inside a join, or even inputs"
            )
        if not getattr(self.model, "_divide_by_initial_world_size", True):
            raise ValueError(
                "join(divide_by_initial_world_size=False) cannot be done here: ranks without inputs go on sending what "
                "they kept, so the mean is always over all ranks; leave it at its default, True"
            )

    @property
    def _shadows(self) -> bool:
        """Whether this rank has run out of inputs and only answers the exchanges of the others, with zeros."""
        return bool(self.model._join_config.enable) and not self._router.saw_forward

    def _on_bucket(self, bucket: Bucket) -> None:
        """Called by DDP inside backward, in the same bucket order on every rank."""
        if self._fixed_buckets is not None:
            for pieces in self._fixed_buckets.arrived(bucket, [self._ordinals[id(p)] for p in bucket.parameters]):
                self._submit(pieces, self._step)
        else:
            self._gather(bucket)
        if bucket.is_last:
            if self._changes is not None:
                self._changes.after_backward()
            self._step += 1
            self._passes += 1
            # With NCCL the host does not wait inside a collective, so it has nothing to compare.
            waits = self._net.device.type == "cpu" and self.method.name != "noop"
            if waits and self._passes % SAMPLE_EVERY == 0:
                self._worker.submit([], self._compare_pace)

    def _gather(self, bucket: Bucket) -> None:
        """Hold whole buckets back until their exchange begins: at once, with the merger's group, or with the last."""
        if self._waiting and any(p is bucket.parameters[0] for b in self._waiting for p in b.parameters):
            self._waiting = []  # an earlier backward pass was broken off
        self._waiting.append(bucket)
        begins = bucket.is_last
        if self._fusion is not None:
            ordinal = self._ordinals[id(bucket.parameters[0])]
            begins = self._fusion.arrived(ordinal, bucket.buffer.numel(), bucket.is_last)
        elif not self._aggregator.whole_model and self._skipper is None:
            begins = True
        if begins:
            buckets, self._waiting = self._waiting, []
            self._submit(buckets, self._step)

    def _compare_pace(self, buckets: list[Bucket]) -> None:
        nets = {id(net): net for net in (self._net, self._local_net, self._wire_net) if net is not None}
        waited_s = sum(net.traffic.seconds for net in nets.values())
        self._stragglers.sample(self._net, waited_s, self._wire_net.traffic.handed, links=self._local_net is None)

    def _submit(self, buckets: list[Bucket], step: int) -> None:
        parameters = [p for bucket in buckets for p in bucket.parameters]
        # Read now: when the job runs, a closure's step() or a scheduler may have gone on.
        ordinals = [self._ordinals[id(p)] for p in parameters]
        hypers = dict(zip(ordinals, self._view.hypers(parameters), strict=True))
        used = [id(p) in self._used for p in parameters] if self._tracks_use else None
        self._used.difference_update(map(id, parameters))
        scale = self._skipper.scale() if self._skipper is not None else 1.0
        merger = self._fusion
        measured = self._guard is not None and self._guard.measures(step)
        is_last, shadows = buckets[-1].is_last, self._shadows

        def work(buckets: list[Bucket]) -> None:
            self._failure_detector.step = step
            try:
                exchange(buckets)
            except (ExchangeError, NonFiniteError):
                raise
            except Exception as error:  # of this rank alone: the others would wait for it
                self._failure_detector.report(error)
                raise

        def exchange(buckets: list[Bucket]) -> None:
            gradients = {
                self._ordinals[id(p)]: g for b in buckets for p, g in zip(b.parameters, b.gradients, strict=True)
            }
            if used is not None:
                self._drop_unused(gradients, used)
            if gradients:
                if self._skipper is not None and not self._skipper.passes(list(gradients.values()), self._net):
                    self._step -= 1  # the step did not happen: schedules and random numbers stay where they were
                    return
                meter = Meter(self._wire_net)
                self._exchange(gradients, hypers, step, scale, measured, shadows)
                if merger is not None:
                    merger.exchanged(meter.spent(), is_last, self._wire_net)
            if measured and is_last:
                self._watch(step, self._norms_of(step))

        self._worker.submit(buckets, work)

    def _drop_unused(self, gradients: dict[int, Tensor], used: list[bool]) -> None:
        """Take out the parameters that no rank used: DDP leaves their .grad alone, so nothing may be sent for them."""
        flags = torch.tensor(used, dtype=torch.uint8, device=self._net.compute_device)
        self._net.stage = "agree on used parameters"
        self._net.all_reduce(flags, largest=True)
        for ordinal, flag in zip(list(gradients), flags.tolist(), strict=True):
            if not flag:
                del gradients[ordinal]

    def _layout(self, ordinals: tuple[int, ...]) -> Layout:
        layout = self._layouts.get(ordinals)
        if layout is None:
            model = [(name, place, self._parameters[name].shape) for place, name in enumerate(self._names)]
            layout = self.method.layout([model[place] for place in ordinals], model=model, compress=self._compresses)
            self._layouts[ordinals] = layout
        return layout

    def _exchange(
        self,
        gradients: dict[int, Tensor],
        hypers: dict[int, Any],
        step: int,
        scale: float,
        measured: bool,
        shadows: bool,
    ) -> None:
        # By name order, not bucket order: the same flat vector whatever the buckets were.
        layout = self._layout(tuple(sorted(gradients)))
        context = ExchangeContext(
            layout,
            step,
            tuple(hypers[segment.ordinal] for segment in layout.segments),
            tuple(self._parameters[segment.name] for segment in layout.segments),
        )
        with torch.no_grad():
            lying = [gradients[segment.ordinal] for segment in layout.segments]
            parts = [part.to(torch.float32) for part in lying]  # the gradient itself where it is float32 already
            if scale != 1.0:
                torch._foreach_div_(parts, scale)
            for segment, part in zip(layout.segments, parts, strict=True):
                pending = self._pending.pop(segment.name, None)
                if pending is not None:
                    part.add_(pending)
                    if pending.is_cuda:  # made on another stream
                        pending.record_stream(torch.cuda.current_stream(pending.device))
            norms = self._norms_of(step).of_gradients(parts) if measured else UNMEASURED
            self._dense_bytes += 4 * layout.numel
            self._measured = step, self._aggregator.reduce(context, parts, norms)
            if shadows and self.method.takes_weight_decay(self._view.is_sgd):
                # No step follows here, but this rank's share of the weight decay needs the parameters of the moment.
                self._apply({segment.name: part for segment, part in zip(layout.segments, parts, strict=True)})
            if scale != 1.0:
                torch._foreach_mul_(parts, scale)
            for gradient, part in zip(lying, parts, strict=True):
                if gradient is not part:
                    gradient.copy_(part)

    def _norms_of(self, step: int) -> Norms:
        """What the exchanges of this step have added up so far."""
        last, norms = self._measured
        return norms if last == step and isinstance(norms, Norms) else Norms.nothing()

    def _before_optimizer_step(self, *_: Any) -> None:
        if self._changes is not None:
            self._changes.before_step(self.method)

    def _after_optimizer_step(self, *_: Any) -> None:
        if self._skipper is not None and self._skipper.was_skipped():
            return
        self._optimizer_steps += 1
        interval = self.method.averaging_interval
        averages = interval is not None and self._optimizer_steps % interval == 0
        self._drifted = interval is not None and not averages and self._net.size > 1
        if averages:
            self._worker.wait()
            average_parameters(self._parameters.values(), self._net)
        sentence = self._guard.take_sentence() if self._guard is not None else None
        if sentence is not None and self._net.rank == 0:
            warn_user(sentence)
        self._check_replicas(equal=interval is None or averages)
