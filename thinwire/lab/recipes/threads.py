"""All workers of a run as threads of one process, for comparing methods: no sockets, one GPU well used.

The engine's parts are the very ones that ``thinwire.attach`` puts together (memory, compressor, codec, collective), and
so are the bytes they count. What is left out is what lies around them in a real run: DDP, its buckets, the network. So
losses, metrics and bytes are those of a run with processes, but the seconds are not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.edges.optimizer import OptimizerView
from thinwire.engine.context import ExchangeContext
from thinwire.engine.fixed_groups import fixed_groups
from thinwire.engine.layout import memory_flat
from thinwire.engine.local_gradients import average_parameters
from thinwire.lab.recipes.base import Batch, Recipe, samples_in
from thinwire.lab.recipes.events import Report
from thinwire.lab.recipes.joint import JointStep
from thinwire.lab.recipes.loop import Plan, Training
from thinwire.methods import Method
from thinwire.stats import Stats
from thinwire.transport import ThreadNet, ThreadWorld


class ThreadWire:
    """What ``thinwire.attach`` is to a DDP model, to a bare module of a rank that is a thread.

    The whole gradient is one exchange, as if DDP had made a single bucket, unless the method's result depends on what
    travels together: then the groups are those of ``attach``. ``exchange`` is called after backward.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, method: Method, net: ThreadNet) -> None:
        self.method, self.net = method, net
        self.parameters: dict[str, Tensor] = {name: p for name, p in module.named_parameters() if p.requires_grad}
        method.check_exclude(list(self.parameters))
        self.view = OptimizerView(optimizer, self.parameters)
        sgd = self.view.is_sgd
        if method.takes_momentum(sgd):
            self.view.check_takeover(method.name)
        self.aggregator = method.aggregator(net, sgd)
        rows = [(name, place, p.shape) for place, (name, p) in enumerate(self.parameters.items())]
        groups: list[tuple[int, ...]] = [tuple(range(len(rows)))]
        if not method.bucket_independent and not self.aggregator.whole_model:
            groups = fixed_groups([p.numel() for p in self.parameters.values()])
        self.layouts = [method.layout([rows[place] for place in sorted(group)], model=rows) for group in groups]
        self.numel = sum(layout.numel for layout in self.layouts)
        self.steps = 0
        self._flat: dict[str, tuple[Tensor, Tensor]] = {}  # a gradient and its elements in the order of memory
        self.view.take_over(momentum=method.takes_momentum(sgd), weight_decay=method.takes_weight_decay(sgd))
        self._handle = optimizer.register_step_post_hook(self._after_step)

    @torch.no_grad()
    def exchange(self) -> None:
        """Replace every .grad by the mean over the ranks, as the method makes it."""
        for layout in self.layouts:
            names = [segment.name for segment in layout.segments]
            weights = tuple(self.parameters[name] for name in names)
            context = ExchangeContext(layout, self.steps, tuple(self.view.hypers(weights)), weights)
            self.aggregator.reduce(context, [self._part(name, self.parameters[name].grad) for name in names])
        self.steps += 1

    def _part(self, name: str, grad: Tensor | None) -> Tensor:  # any shape -> (numel,)
        """The gradient's elements as they lie in memory; the same view as long as the gradient is the same tensor."""
        assert grad is not None, "every parameter must have a gradient"
        known = self._flat.get(name)
        if known is None or known[0] is not grad:
            part = memory_flat(grad)
            assert part.data_ptr() == grad.data_ptr(), "a gradient must lie in one stretch of memory"
            known = self._flat[name] = (grad, part)
        return known[1]

    def _after_step(self, *_: Any) -> None:
        interval = self.method.averaging_interval
        if interval and self.steps % interval == 0:
            average_parameters(self.parameters.values(), self.net)

    def snapshot(self, residual_norm: bool = True) -> Stats:
        traffic, clock = self.net.traffic, self.aggregator.clock
        return Stats(
            steps=self.steps,
            world_size=self.net.size,
            frame_bytes=traffic.handed,
            dense_bytes=4 * self.numel * self.steps,
            bytes_sent=traffic.sent,
            bytes_received=traffic.received,
            bytes_inside=0,
            seconds_compensating=clock.compensating,
            seconds_compressing=clock.compressing,
            seconds_communicating=traffic.seconds,
            seconds_waiting=0.0,
            residual_norm=self.aggregator.residual_square_sum() ** 0.5 if residual_norm else math.nan,
        )

    def detach(self) -> None:
        self.view.release()
        self._handle.remove()


class ThreadTraining(Training):
    """A rank's part of a training whose ranks are threads.

    The ranks take turns where they draw random numbers, and each has its own state of torch's generators, which all
    threads of a process share. ``joint`` computes the gradients of all ranks together, where given.
    """

    def __init__(
        self, recipe: Recipe, spec: str, plan: Plan, net: ThreadNet, report: Report, joint: JointStep | None = None
    ) -> None:
        self.world: ThreadWorld = net.world
        self.joint = joint
        self._rng: list[Tensor] = []
        # An exchange's bytes are counted apart from those of small agreements.
        self._wire_net = ThreadNet(net.world, net.rank)
        with self._own_turn(net.rank, recipe.device):
            super().__init__(recipe, spec, plan, net, report)

    def _distributed(self) -> nn.Module:
        return self.module

    def _attached(self) -> ThreadWire:
        return ThreadWire(self.module, self.optimizer, self.method, self._wire_net)

    @contextmanager
    def _own_turn(self, rank: int, device: torch.device) -> Iterator[None]:
        """This rank's turn, with its own random numbers."""
        with self.world.turn(rank):
            if self._rng:
                torch.set_rng_state(self._rng[0])
                if device.type == "cuda":
                    torch.cuda.set_rng_state(self._rng[1], device)
            yield
            self._rng = [torch.get_rng_state()]
            if device.type == "cuda":
                self._rng.append(torch.cuda.get_rng_state(device))

    def _gradients(self, batches: Iterator[Batch]) -> tuple[Tensor, int]:
        if self.joint is not None:
            with self._own_turn(self.net.rank, self.recipe.device):
                batch = next(batches)
            loss, samples = self.joint.run(self.net.rank, self.recipe, self.module, batch), samples_in(batch)
        else:
            with self._own_turn(self.net.rank, self.recipe.device):
                loss, samples = super()._gradients(batches)
        self.wire.exchange()
        return loss, samples
