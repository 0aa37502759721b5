"""The live connection between a DDP model, its optimizer and a method."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from thinwire.ddp import Bucket, Router, Worker, router_of
from thinwire.groups import check_agreement, own_net
from thinwire.hierarchy import Groups, Hierarchy
from thinwire.layout import Layout, Turn
from thinwire.local import average_parameters
from thinwire.methods import Method, parse_method
from thinwire.optimizers import OptimizerView
from thinwire.protocols import Aggregator
from thinwire.stats import Stats
from thinwire.transport import TorchNet

STATE_FORMAT = 1


class Wire:
    """Made by ``thinwire.attach``. All methods that change something are collective: every rank calls them alike."""

    def __init__(
        self, model: DistributedDataParallel, view: OptimizerView, method: Method, net: TorchNet, groups: Groups | None
    ) -> None:
        self.model, self.method = model, method
        self._view, self._net, self._groups = view, net, groups
        self._parameters = view.parameters  # name -> parameter, in the model's order
        self._names = list(self._parameters)
        self._ordinals = {id(p): ordinal for ordinal, p in enumerate(self._parameters.values())}
        self._layouts: dict[tuple[int, ...], Layout] = {}
        self._step = 0
        self._optimizer_steps = 0
        self._dense_bytes = 0
        self._pending: dict[str, Tensor] = {}
        self._waiting: list[Bucket] = []
        self._handles: list[Any] = []
        self._used: set[int] = set()
        self._local_net, self._wire_net = self._make_nets(groups)
        self._aggregator = self._build(method)
        self._worker = Worker(net.compute_device)
        self._router: Router = router_of(model)
        self._router.target = self._on_bucket
        self._install()
        if method.takes_momentum(view.is_sgd):
            self._set_velocity(view.give_velocity())

    # ----------------------------------------------------------------------------------------- what a user calls

    @property
    def stats(self) -> Stats:
        """Totals so far; a snapshot."""
        self._worker.wait()
        traffic, clock = self._wire_net.traffic, self._aggregator.clock
        inside = self._local_net.traffic if self._local_net is not None else None
        return Stats(
            steps=self._step,
            world_size=self._wire_net.size,
            frame_bytes=traffic.handed,
            dense_bytes=self._dense_bytes,
            bytes_sent=traffic.sent,
            bytes_received=traffic.received,
            bytes_inside=inside.sent if inside is not None else 0,
            seconds_compensating=clock.compensating,
            seconds_compressing=clock.compressing,
            seconds_communicating=traffic.seconds + (inside.seconds if inside is not None else 0.0),
            residual_norm=self._aggregator.residual_square_sum() ** 0.5,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return everything of this rank that a later run needs: residuals, velocities, errors, counters, method."""
        self._worker.wait()
        return {
            "format": STATE_FORMAT,
            "method": str(self.method),
            "world_size": self._net.size,
            "rank": self._net.rank,
            "step": self._step,
            "optimizer_steps": self._optimizer_steps,
            "pending": {name: tensor.clone() for name, tensor in self._pending.items()},
            "aggregator": self._aggregator.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where ``state_dict`` left off; a state that does not fit raises and changes nothing."""
        self._worker.wait()
        self._check_state(state)
        self._step = state["step"]
        self._optimizer_steps = state["optimizer_steps"]
        self._pending = {name: t.to(self._net.compute_device).clone() for name, t in state["pending"].items()}
        self._aggregator.load_state_dict(state["aggregator"])

    def switch(self, method: Method | str) -> None:
        """Change the method between two steps; what the old one kept goes into the next gradient."""
        error, chosen = None, None
        try:
            chosen = parse_method(method) if isinstance(method, str) else method
            if not isinstance(chosen, Method):
                raise ValueError(f"method must be a thinwire method or its string form, not {method!r}")
            chosen.check_exclude(self._names)
            if chosen.takes_momentum(self._view.is_sgd):
                self._view.check_takeover(chosen.name)
        except ValueError as problem:
            error = str(problem)
        self._worker.wait()
        check_agreement(self._net, {"method": repr(chosen)}, error)
        assert chosen is not None
        if self.method.averaging_interval:
            average_parameters(self._parameters.values(), self._net)
        velocity = self._velocity()
        for name, rest in self._leftover().items():
            self._pending[name] = self._pending[name] + rest if name in self._pending else rest
        self._uninstall()
        if self.method.takes_momentum(self._view.is_sgd):
            if not chosen.takes_momentum(self._view.is_sgd):
                self._view.take_velocity(self._mean_over_ranks(velocity))
        else:
            velocity = self._view.give_velocity() if chosen.takes_momentum(self._view.is_sgd) else {}
        self.method, self._layouts = chosen, {}
        self._aggregator = self._build(chosen)
        self._install()
        if chosen.takes_momentum(self._view.is_sgd):
            self._set_velocity(velocity)

    def detach(self) -> dict[str, Tensor]:
        """End compression: momentum goes back to the optimizer; returns what was not sent, as the group's mean by name.

        Another training step of the model then needs a new ``attach`` (or a new DDP around the module).
        """
        if self._router.target is None:
            return {}
        self._worker.wait()
        if self.method.takes_momentum(self._view.is_sgd):
            self._view.take_velocity(self._mean_over_ranks(self._velocity()))
        rest = self._leftover()
        for name, pending in self._pending.items():
            rest[name] = rest[name] + pending if name in rest else pending
        mean = self._mean_over_ranks(rest)
        self._router.target = None
        self._uninstall()
        self._worker.stop()
        return {name: tensor.view_as(self._parameters[name]) for name, tensor in mean.items()}

    # ------------------------------------------------------------------------------------------------- assembling

    def _make_nets(self, groups: Groups | None) -> tuple[TorchNet | None, TorchNet]:
        """Return the net inside this machine (None without a hierarchy) and the net that is compressed on."""
        if groups is None:
            return None, self._net
        local: TorchNet | None = None
        for group in groups:
            net = own_net(self._net, group)
            if self._net.rank in group:
                local = net
        leaders = own_net(self._net, [group[0] for group in groups])
        assert local is not None
        return local, leaders

    def _build(self, method: Method) -> Aggregator:
        aggregator = method.aggregator(self._wire_net, self._view.is_sgd)
        if self._local_net is None or self._groups is None:
            return aggregator
        return Hierarchy(aggregator, self._local_net, weight=len(self._groups) / self._net.size)

    def _install(self) -> None:
        sgd = self._view.is_sgd
        self._view.take_over(momentum=self.method.takes_momentum(sgd), weight_decay=self.method.takes_weight_decay(sgd))
        self._handles.append(self._view.optimizer.register_step_post_hook(self._after_optimizer_step))
        if self._may_have_unused:
            for parameter in self._parameters.values():
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._mark_used))

    def _uninstall(self) -> None:
        self._view.release()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @property
    def _may_have_unused(self) -> bool:
        return bool(self.model.find_unused_parameters or self.model.static_graph)

    # --------------------------------------------------------------------------------------------------- stepping

    def _mark_used(self, parameter: Tensor) -> None:
        self._used.add(id(parameter))

    def _on_bucket(self, bucket: Bucket) -> None:
        """Called by DDP inside backward, in the same bucket order on every rank."""
        if not self._aggregator.whole_model:
            self._submit([bucket], self._step)
        else:
            if self._waiting and any(p is bucket.parameters[0] for b in self._waiting for p in b.parameters):
                self._waiting = []  # an earlier backward pass was broken off
            self._waiting.append(bucket)
            if bucket.is_last:
                buckets, self._waiting = self._waiting, []
                self._submit(buckets, self._step)
        if bucket.is_last:
            self._step += 1

    def _submit(self, buckets: list[Bucket], step: int) -> None:
        parameters = [p for bucket in buckets for p in bucket.parameters]
        # Read now: when the job runs, a closure's step() or a scheduler may have gone on.
        hypers = {self._ordinals[id(p)]: self._view.hyper(p) for p in parameters}
        used = [id(p) in self._used for p in parameters] if self._may_have_unused else None
        self._used.difference_update(map(id, parameters))

        def work(buckets: list[Bucket]) -> None:
            gradients = {
                self._ordinals[id(p)]: g for b in buckets for p, g in zip(b.parameters, b.gradients, strict=True)
            }
            if used is not None:
                self._drop_unused(gradients, used)
            if gradients:
                self._exchange(gradients, hypers, step)

        self._worker.submit(buckets, work)

    def _drop_unused(self, gradients: dict[int, Tensor], used: list[bool]) -> None:
        """Take out the parameters that no rank used: DDP leaves their .grad alone, so nothing may be sent for them."""
        flags = torch.tensor(used, dtype=torch.uint8, device=self._net.compute_device)
        self._net.all_reduce(flags, largest=True)
        for ordinal, flag in zip(list(gradients), flags.tolist(), strict=True):
            if not flag:
                del gradients[ordinal]

    def _layout(self, ordinals: tuple[int, ...]) -> Layout:
        layout = self._layouts.get(ordinals)
        if layout is None:
            rows = []
            for ordinal in ordinals:
                name = self._names[ordinal]
                shape = self._parameters[name].shape
                rows.append((name, ordinal, shape.numel(), self.method.is_coded(name, shape)))
            layout = self._layouts[ordinals] = Layout.of(rows)
        return layout

    def _exchange(self, gradients: dict[int, Tensor], hypers: dict[int, Any], step: int) -> None:
        # By name order, not bucket order: the same flat vector whatever the buckets were.
        layout = self._layout(tuple(sorted(gradients)))
        turn = Turn(
            layout,
            step,
            tuple(hypers[segment.ordinal] for segment in layout.segments),
            tuple(self._parameters[segment.name] for segment in layout.segments),
        )
        with torch.no_grad():
            lying = [gradients[segment.ordinal] for segment in layout.segments]
            parts = [part.to(torch.float32) for part in lying]  # the gradient itself where it is float32 already
            for segment, part in zip(layout.segments, parts, strict=True):
                if segment.name in self._pending:
                    part.add_(self._pending.pop(segment.name))
            self._dense_bytes += 4 * layout.numel
            self._aggregator.reduce(turn, parts)
            for gradient, part in zip(lying, parts, strict=True):
                if gradient is not part:
                    gradient.copy_(part)

    def _after_optimizer_step(self, *_: Any) -> None:
        self._optimizer_steps += 1
        interval = self.method.averaging_interval
        if interval and self._optimizer_steps % interval == 0:
            self._worker.wait()
            average_parameters(self._parameters.values(), self._net)

    # -------------------------------------------------------------------------------------- what is kept, by name

    @property
    def _memory(self) -> Any:
        """The memory of the method; None where it has none."""
        inner = self._aggregator.inner if isinstance(self._aggregator, Hierarchy) else self._aggregator
        return getattr(inner, "memory", None)

    def _velocity(self) -> dict[str, Tensor]:
        return dict(self._memory.state.named.get("velocity", {})) if self._memory is not None else {}

    def _set_velocity(self, velocity: dict[str, Tensor]) -> None:
        if velocity:
            self._memory.load_state_dict({**self._memory.state_dict(), "velocity": velocity})

    def _leftover(self) -> dict[str, Tensor]:
        numels = {name: p.numel() for name, p in self._parameters.items()}
        return self._aggregator.leftover(numels, {name: self._view.hyper(p).lr for name, p in self._parameters.items()})

    def _mean_over_ranks(self, mine: dict[str, Tensor]) -> dict[str, Tensor]:
        """The mean of per-parameter vectors over all ranks; a rank without one counts as zero."""
        sizes = [p.numel() for p in self._parameters.values()]
        flat = torch.zeros(sum(sizes), dtype=torch.float32, device=self._net.compute_device)
        views = dict(zip(self._names, flat.split(sizes), strict=True))
        for name, tensor in mine.items():
            views[name].copy_(tensor.reshape(-1))
        self._net.all_reduce(flat)
        flat.div_(self._net.size)
        return {name: view.clone() for name, view in views.items()}

    def _check_state(self, state: dict[str, Any]) -> None:
        if not isinstance(state, dict) or state.get("format") != STATE_FORMAT:
            raise ValueError("this is not a wire's state_dict, or one of another format version")
        if state["method"] != str(self.method):
            raise ValueError(f"the state belongs to method {state['method']}, the wire uses {self.method}")
        for key, mine in (("world_size", self._net.size), ("rank", self._net.rank)):
            if state[key] != mine:
                raise ValueError(f"the state was saved with {key} {state[key]}, this process has {key} {mine}")
        named = dict(state["pending"])
        for vectors in (state["aggregator"].get("memory") or {}).values():
            named.update({name: v for name, v in vectors.items() if isinstance(v, Tensor)})
        for name, tensor in named.items():
            parameter = self._parameters.get(name)
            if parameter is None:
                raise ValueError(f"the state has a parameter {name!r} that the model does not have")
            if tensor.numel() != parameter.numel():
                raise ValueError(
                    f"the state has {tensor.numel()} elements for {name!r}, the model has {parameter.numel()}"
                )
