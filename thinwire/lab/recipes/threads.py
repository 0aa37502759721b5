"""All workers of a run as threads of one process, for comparing methods: no sockets, one GPU well used.

The engine's parts are the very ones that ``thinwire.attach`` puts together (memory, compressor, codec, collective), and
so are the bytes they count. What is left out is what lies around them in a real run: DDP, its buckets, the network. So
losses, metrics and bytes are those of a run with processes, but the seconds are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.edges.local import optimizers_for
from thinwire.edges.local_edge import LocalEdge
from thinwire.edges.wire import Wire
from thinwire.lab.recipes.base import Batch, Recipe, samples_in
from thinwire.lab.recipes.events import Report
from thinwire.lab.recipes.joint import JointStep
from thinwire.lab.recipes.loop import Training, TrainingPlan
from thinwire.reducer import EdgeTerms, Reducer
from thinwire.transport import ThreadNet, ThreadWorld


class ThreadTraining(Training):
    """A rank's part of a training whose ranks are threads.

    The ranks take turns where they draw random numbers, and each has its own state of torch's generators, which all
    threads of a process share. ``joint`` computes the gradients of all ranks together, where given.
    """

    def __init__(
        self,
        recipe: Recipe,
        spec: str,
        plan: TrainingPlan,
        net: ThreadNet,
        report: Report,
        joint: JointStep | None = None,
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

    def _attached(self) -> Any:
        trained = ((name, p) for name, p in self.module.named_parameters() if p.requires_grad)
        if self.method.outer_rule is None:
            return Reducer(trained, self.method, self._wire_net, self.optimizer)
        reducer = Reducer(trained, self.method, self._wire_net, terms=EdgeTerms(in_rounds=True))
        view = optimizers_for(reducer.parameters, self.optimizer, self.method)
        return Wire(reducer, LocalEdge(self.module, reducer, view))

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
        if self.method.outer_rule is None:  # else the optimizer's step takes differences to the others
            self.wire.reduce({name: p.grad for name, p in self.wire.parameters.items()})
        return loss, samples
