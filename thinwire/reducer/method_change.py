"""What a method keeps between two steps, handed to the next one, to the optimizer or to the user."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from thinwire.engine.layout import shaped_like
from thinwire.engine.local_gradients import average_parameters
from thinwire.engine.optimizer import NoOptimizer, OptimizerView
from thinwire.methods.running_method import RunningMethod
from thinwire.transport import overhead
from thinwire.transport.reducer_nets import Nets


class HandOver:
    """Vectors by parameter name. What moves bytes is a collective call."""

    def __init__(
        self, parameters: dict[str, Tensor], view: OptimizerView | NoOptimizer, nets: Nets, sharded: bool
    ) -> None:
        self._parameters, self._view, self._nets, self._sharded = parameters, view, nets, sharded

    def mean_velocity(self, running: RunningMethod) -> dict[str, Tensor]:
        """The group's momentum, of the parameters whose method has taken it and that ever had a gradient: as far as a
        rank can tell. One that has a shard's rows alone cannot, and all shards must have a buffer or none."""
        kept = running.kept("velocity")
        mean = self.mean_over_ranks(running.shared(kept))
        own = {name: velocity for name, velocity in mean.items() if name in running.with_momentum}
        if self._sharded:
            return own
        return {name: velocity for name, velocity in own.items() if name in kept or bool(velocity.any())}

    def take(self, old: RunningMethod, takes: Collection[str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The velocities and this rank's leftover that a method which ``takes`` momentum of these parameters begins
        with; all other momentum goes back to the optimizer."""
        rest, own = self.leftover(old), {n: velocity for n, velocity in old.kept("velocity").items() if n in takes}
        if not old.with_momentum.issubset(takes):
            mean = self.mean_velocity(old)
            self._view.take_velocity({name: velocity for name, velocity in mean.items() if name not in takes})
        return {**own, **self._view.give_velocity(set(takes) - old.with_momentum)}, rest

    def give(
        self, old: RunningMethod, new: RunningMethod, velocity: dict[str, Tensor], rest: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Hand what ``take`` gave to the new method; return what has to enter the next gradient.

        What momentum has acted on stays a residual where the new method keeps one of that kind, and is applied at
        once where it does not, as soon as there is a learning rate.
        """
        new.keep("velocity", velocity)
        kinds = {name: new.leftover_kind(name) for name in old.with_momentum & new.with_momentum}
        for kind in dict.fromkeys(filter(None, kinds.values())):
            new.keep(kind, {name: t * new.weight for name, t in rest.items() if kinds.get(name) == kind})
        at_once = {name for name in old.with_momentum if kinds.get(name) is None}
        waiting = {name: tensor for name, tensor in rest.items() if name not in old.with_momentum}
        if at_once:
            mean = self.mean_over_ranks({name: tensor for name, tensor in rest.items() if name in at_once})
            waiting |= self.apply_or_wait({name: update for name, update in mean.items() if name in at_once})
        return waiting

    def leftover(self, running: RunningMethod) -> dict[str, Tensor]:
        """This rank's share of what was not sent, in units of the present learning rates."""
        numels = {name: p.numel() for name, p in self._parameters.items()}
        rates = {name: hyper.lr for name, hyper in self._view.hypers().items()}
        return running.aggregator.leftover(numels, rates)

    def make_equal(self) -> None:
        """Make replicas that drifted apart equal again: parameters and optimizer state."""
        tensors = [*self._parameters.values(), *self._view.states_like_parameters()]
        with overhead(self._nets.own):
            average_parameters(tensors, self._nets.own)

    def apply(self, mean: Mapping[str, Tensor]) -> None:
        """Step by an update that momentum has acted on already: w -= lr * mean."""
        hypers = self._view.hypers()
        with torch.no_grad():
            for name, update in mean.items():
                parameter, hyper = self._parameters[name], hypers[name]
                rate = hyper.lr if hyper.maximize else -hyper.lr
                parameter.add_(shaped_like(update, parameter.detach()), alpha=rate)

    def apply_or_wait(self, mean: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As ``apply``, where there is a learning rate. What has none is returned as gradients for a later step:
        1 - m times the update, which momentum makes the whole of in the steps that follow."""
        self.apply(mean)
        hypers = self._view.hypers()
        return {name: t * (1 - hypers[name].momentum) for name, t in mean.items() if not hypers[name].lr}

    def mean_over_ranks(self, mine: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The mean of per-parameter vectors over all ranks; a rank without one counts as zero."""
        net, sizes = self._nets.own, [p.numel() for p in self._parameters.values()]
        flat = torch.zeros(sum(sizes), dtype=torch.float32, device=self._nets.compute_device)
        views = dict(zip(self._parameters, flat.split(sizes), strict=True))
        for name, tensor in mine.items():
            views[name].copy_(tensor.reshape(-1))
        net.stage = "move what was not sent"
        with overhead(net):
            net.all_reduce(flat)
        flat.div_(net.size)
        return {name: view.clone() for name, view in views.items()}
