"""The user's optimizers, read at every step and left as they are.

Where a method applies momentum and weight decay in front of the compression, an optimizer's own are switched off, but
only while its ``step()`` runs: schedulers, checkpoints and the user see their own values at all other times.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from thinwire.engine.context import Hyper
from thinwire.engine.layout import flat_like, shaped_like
from thinwire.engine.momentum_switched_off import SwitchedOff
from thinwire.engine.several_optimizers import owners_of
from thinwire.engine.shards import local_of, sharded_like

RATE_ONE, NOT_TRAINED = Hyper(lr=1.0), Hyper()

TakesVelocity = Callable[[dict[str, Tensor]], None]  # (numel,) float32 by parameter name


class OptimizerView:
    """Reads the hyper-parameters of a model's parameters from the optimizers that own them.


    ``sgd`` are the names of those whose optimizer is torch.optim.SGD: their momentum can be taken over. Of sharded
    parameters and their state this rank's part is handed over.
    """

    def __init__(self, optimizers: Sequence[Optimizer], parameters: dict[str, Tensor]) -> None:
        self.parameters = parameters
        self._owners = owners_of(optimizers, parameters)
        with_some = set(map(id, self._owners.values()))
        self.optimizers = tuple(optimizer for optimizer in optimizers if id(optimizer) in with_some)
        self.sgd = frozenset(name for name, owner in self._owners.items() if isinstance(owner, SGD))
        self._off: dict[int, SwitchedOff] = {}  # by the optimizer's id, while its step() runs
        self._handles: list[Any] = []

    @property
    def optimizer_names(self) -> str:
        return " and ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in self.optimizers))

    @property
    def sharded(self) -> bool:
        """Whether an optimizer steps a part of the parameters on each rank, as ZeroRedundancyOptimizer does."""
        return any(hasattr(optimizer, "consolidate_state_dict") for optimizer in self.optimizers)

    def owned_by(self, optimizer: Optimizer) -> frozenset[str]:
        return frozenset(name for name, owner in self._owners.items() if owner is optimizer)

    def hypers(self) -> dict[str, Hyper]:
        """What the optimizers say about every parameter now, by name; those of one group share one object.

        Groups may be added, and parameters moved, at any time. The values are the user's own, also while they are
        switched off (a closure runs inside step()). A parameter that is in no group any more has a learning rate of 0.
        """
        by_id: dict[int, Hyper] = {}
        for optimizer in self.optimizers:
            sgd, off = isinstance(optimizer, SGD), self._off.get(id(optimizer))
            for group in optimizer.param_groups:
                own = group if off is None else off.as_it_was(group)
                rate = own.get("lr")
                hyper = Hyper(
                    lr=float(rate) if rate is not None else RATE_ONE.lr,
                    momentum=float(own.get("momentum", 0.0)) if sgd else 0.0,
                    nesterov=bool(own.get("nesterov", False)) and sgd,
                    weight_decay=float(own.get("weight_decay", 0.0)) if sgd else 0.0,
                    maximize=bool(own.get("maximize", False)),
                )
                by_id.update((id(parameter), hyper) for parameter in group["params"])
        return {name: by_id.get(id(parameter), NOT_TRAINED) for name, parameter in self.parameters.items()}

    def check_takeover(self, method: str, instead: Callable[[], str], names: Collection[str]) -> None:
        """Raise when the momentum of these parameters cannot be moved in front of the compression; ``instead`` says
        what else to take."""
        others = [name for name in names if name not in self.sgd]
        if others:
            kind = type(self._owners[others[0]]).__name__
            whose = "the optimizer is" if len(self.optimizers) == 1 else f"that of parameter {others[0]!r} is"
            apart = "" if len(self.optimizers) == 1 else "give such parameters another method in thinwire.PerLayer: "
            raise ValueError(f"{method}: momentum correction needs torch.optim.SGD, {whose} {kind}; {apart}{instead()}")
        for optimizer in self.optimizers:
            self._check_dampening(method, names, optimizer, optimizer.param_groups)

    def _check_dampening(
        self, method: str, names: Collection[str], optimizer: Optimizer, values: Iterable[Mapping[str, Any]]
    ) -> None:
        """Refuse it in these values, one for each of the optimizer's groups, where these parameters have it."""
        taken = {id(self.parameters[name]) for name in names}
        for group, new in zip(optimizer.param_groups, values, strict=False):  # torch itself checks their number
            if new.get("dampening") and not taken.isdisjoint(map(id, group["params"])):
                raise ValueError(
                    f"{method}: momentum correction needs dampening=0, a group has {new['dampening']}; use "
                    "dampening=0, or momentum_correction=False where the method has it"
                )

    def take_over(
        self, method: str, *, momentum: Collection[str], weight_decay: Collection[str], given: TakesVelocity
    ) -> None:
        """From now on switch momentum and weight decay of these parameters off while their optimizer's step() runs.

        Momentum buffers of theirs that ``load_state_dict`` brings into an optimizer are ``given`` away.
        """
        for optimizer in self.optimizers:
            own = self.owned_by(optimizer)
            self._take_over(method, optimizer, own.intersection(momentum), own.intersection(weight_decay), given)

    def _take_over(
        self,
        method: str,
        optimizer: Optimizer,
        momentum: Collection[str],
        weight_decay: Collection[str],
        given: TakesVelocity,
    ) -> None:
        options = {
            key: {id(self.parameters[name]) for name in names}
            for key, names in (("momentum", momentum), ("weight_decay", weight_decay)) if names
        }  # fmt: skip
        if not options:
            return

        def switch_off(*_: Any) -> None:
            self._restore(optimizer)  # a step that failed half-way has left them off
            self._check_dampening(method, momentum, optimizer, optimizer.param_groups)
            self._off[id(optimizer)] = SwitchedOff(optimizer, options)

        def switch_on(*_: Any) -> None:
            self._restore(optimizer)

        def check_loaded(_: Any, state: Mapping[str, Any]) -> None:
            self._restore(optimizer)
            self._check_dampening(method, momentum, optimizer, state["param_groups"])

        self._handles += [
            optimizer.register_step_pre_hook(switch_off),
            optimizer.register_step_post_hook(switch_on),
            optimizer.register_state_dict_pre_hook(switch_on),
        ]
        if momentum:
            self._handles += [
                optimizer.register_load_state_dict_pre_hook(check_loaded),
                optimizer.register_load_state_dict_post_hook(lambda _: given(self.give_velocity(momentum))),
            ]

    def _restore(self, optimizer: Optimizer) -> None:
        """Put the user's values back."""
        off = self._off.pop(id(optimizer), None)
        if off is not None:
            off.restore()

    def release(self) -> None:
        """Undo take_over."""
        for optimizer in self.optimizers:
            self._restore(optimizer)
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def before_step(self, hook: Callable[..., Any]) -> Any:
        """Call this before every optimizer's step, with the optimizer."""
        return _Together([optimizer.register_step_pre_hook(hook) for optimizer in self.optimizers])

    def after_step(self, hook: Callable[..., Any]) -> Any:
        """Call this after every optimizer's step, with the optimizer."""
        return _Together([optimizer.register_step_post_hook(hook) for optimizer in self.optimizers])

    def _states(self) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
        """What the optimizers keep of every parameter."""
        for name, parameter in self.parameters.items():
            yield name, parameter, self._owners[name].state.get(parameter, {})

    def states_like_parameters(self) -> list[Tensor]:
        """The optimizers' real-valued state of the shape of its parameter: momentum, Adam's moments."""
        return [
            local_of(value)
            for _, parameter, state in self._states()
            for value in state.values()
            if isinstance(value, Tensor) and value.is_floating_point() and value.shape == parameter.shape
        ]

    def weights(self, names: Collection[str]) -> list[Tensor]:
        """All weights of these parameters: a schedule-free optimizer keeps a second set, z, of which it makes the
        others, so whoever changes one set must change both."""
        second = [
            local_of(state["z"])
            for name, _, state in self._states()
            if name in names and "z" in state and "train_mode" in self._owners[name].param_groups[0]
        ]
        return [*(local_of(parameter) for name, parameter in self.parameters.items() if name in names), *second]

    def give_velocity(self, names: Collection[str]) -> dict[str, Tensor]:
        """Hand the momentum buffers of these parameters over: they leave the optimizers."""
        buffers = {}
        for name, parameter, state in self._states():
            buffer = state.pop("momentum_buffer", None) if name in names else None
            if buffer is not None:
                buffers[name] = flat_like(local_of(parameter), local_of(buffer)).to(torch.float32, copy=True)
        return self._turned(buffers)

    def _turned(self, velocity: dict[str, Tensor]) -> dict[str, Tensor]:
        """SGD's buffer of a maximised objective belongs to the negated gradient; ours never does."""
        hypers = self.hypers()
        return {name: -buffer if hypers[name].maximize else buffer for name, buffer in velocity.items()}

    def take_velocity(self, velocity: dict[str, Tensor]) -> None:
        """Take momentum buffers back, (numel,) float32 each; torch has none of parameters without momentum."""
        hypers = self.hypers()
        for name, buffer in self._turned(velocity).items():
            if not hypers[name].momentum:
                continue
            parameter = self.parameters[name]
            own = sharded_like(shaped_like(buffer, local_of(parameter).detach()), parameter)
            self._owners[name].state[parameter]["momentum_buffer"] = own


class _Together:
    """The handles of one hook on several optimizers."""

    def __init__(self, handles: Sequence[Any]) -> None:
        self._handles = handles

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


class NoOptimizer:
    """The null object: a learning rate of 1, no momentum, no weight decay."""

    sharded, optimizer_names = False, "no optimizer"

    def __init__(self, names: Iterable[str]) -> None:
        self._hypers = dict.fromkeys(names, RATE_ONE)
        self.sgd = frozenset(self._hypers)  # of which there is nothing to take over

    def hypers(self) -> dict[str, Hyper]:
        return self._hypers

    def check_takeover(self, method: str, instead: Callable[[], str], names: Collection[str]) -> None:
        return

    def take_over(
        self, method: str, *, momentum: Collection[str], weight_decay: Collection[str], given: TakesVelocity
    ) -> None:
        return

    def release(self) -> None:
        return

    def before_step(self, hook: Callable[..., Any]) -> Any:
        return _NoHandle()

    def after_step(self, hook: Callable[..., Any]) -> Any:
        return _NoHandle()

    def states_like_parameters(self) -> list[Tensor]:
        return []

    def owned_by(self, optimizer: Optimizer) -> frozenset[str]:
        return frozenset()

    def weights(self, names: Collection[str]) -> list[Tensor]:
        return []

    def give_velocity(self, names: Collection[str]) -> dict[str, Tensor]:
        return {}

    def take_velocity(self, velocity: dict[str, Tensor]) -> None:
        return


class _NoHandle:
    def remove(self) -> None:
        return
