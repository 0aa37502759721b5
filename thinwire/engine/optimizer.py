"""The user's optimizer, read at every step and left as it is.

Where a method applies momentum and weight decay in front of the compression, the optimizer's own are switched off, but
only while ``optimizer.step()`` runs: schedulers, checkpoints and the user see their own values at all other times.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire.engine.context import Hyper
from thinwire.engine.layout import flat_like, shaped_like
from thinwire.engine.momentum_switched_off import SwitchedOff

RATE_ONE = Hyper(lr=1.0)

TakesVelocity = Callable[[dict[str, Tensor]], None]  # (numel,) float32 by parameter name


class OptimizerView:
    """Reads the hyper-parameters of a model's parameters from an optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: dict[str, Tensor]) -> None:
        self.optimizer = optimizer
        self.parameters = parameters
        self.is_sgd = isinstance(optimizer, torch.optim.SGD)
        self._places: dict[int, tuple[int, int]] = {}  # by id: a parameter's group, and its place there
        self._off: SwitchedOff | None = None
        self._handles: list[Any] = []
        missing = [name for name, p in parameters.items() if self._group(p) is None]
        if missing:
            raise ValueError(
                f"the optimizer does not own {len(missing)} of the model's {len(parameters)} parameters, the first is "
                f"{missing[0]!r}; build the optimizer from model.parameters()"
            )

    def _group(self, parameter: Tensor) -> dict[str, Any] | None:
        """The group that a parameter is in at this moment: groups may be added, and parameters moved, at any time."""
        group = self._remembered(parameter)
        if group is None:
            self._places = {
                id(p): (index, place)
                for index, each in enumerate(self.optimizer.param_groups)
                for place, p in enumerate(each["params"])
            }
            group = self._remembered(parameter)
        return group

    def _remembered(self, parameter: Tensor) -> dict[str, Any] | None:
        """The group where the parameter was seen last, where it still is there."""
        groups = self.optimizer.param_groups
        index, place = self._places.get(id(parameter), (len(groups), 0))
        owned = groups[index]["params"] if index < len(groups) else ()
        return groups[index] if place < len(owned) and owned[place] is parameter else None

    def hypers(self, parameters: Iterable[Tensor]) -> list[Hyper]:
        """What the optimizer says about each of these now; parameters of one group share one object.

        The values are the user's own, also while they are switched off (a closure runs inside step()). A parameter that
        is in no group any more has a learning rate of 0.
        """
        by_group: dict[int, Hyper] = {}
        result = []
        for parameter in parameters:
            group = self._group(parameter)
            if id(group) not in by_group:
                by_group[id(group)] = self._hyper(group) if group is not None else Hyper()
            result.append(by_group[id(group)])
        return result

    def _hyper(self, group: Mapping[str, Any]) -> Hyper:
        if self._off is not None:
            group = self._off.as_it_was(group)
        rate = group.get("lr")
        return Hyper(
            lr=float(rate) if rate is not None else RATE_ONE.lr,
            momentum=float(group.get("momentum", 0.0)) if self.is_sgd else 0.0,
            nesterov=bool(group.get("nesterov", False)) and self.is_sgd,
            weight_decay=float(group.get("weight_decay", 0.0)) if self.is_sgd else 0.0,
            maximize=bool(group.get("maximize", False)),
        )

    def hyper(self, parameter: Tensor) -> Hyper:
        return self.hypers([parameter])[0]

    def check_takeover(self, method: str, instead: Callable[[], str], names: Collection[str]) -> None:
        """Raise when the momentum of these parameters cannot be moved in front of the compression; ``instead`` says
        what else to take."""
        if not self.is_sgd:
            raise ValueError(
                f"{method}: momentum correction needs torch.optim.SGD, the optimizer is "
                f"{type(self.optimizer).__name__}; {instead()}"
            )
        self._check_dampening(method, names, self.optimizer.param_groups)

    def _check_dampening(self, method: str, names: Collection[str], values: Iterable[Mapping[str, Any]]) -> None:
        """Refuse it in these values, one for each of the optimizer's groups, where these parameters have it."""
        taken = {id(self.parameters[name]) for name in names}
        for group, new in zip(self.optimizer.param_groups, values, strict=False):  # torch itself checks their number
            if new.get("dampening") and not taken.isdisjoint(map(id, group["params"])):
                raise ValueError(
                    f"{method}: momentum correction needs dampening=0, a group has {new['dampening']}; use "
                    "dampening=0, or momentum_correction=False where the method has it"
                )

    def take_over(
        self, method: str, *, momentum: Collection[str], weight_decay: Collection[str], given: TakesVelocity
    ) -> None:
        """From now on switch momentum and weight decay of these parameters off while step() runs.

        Momentum buffers of theirs that ``load_state_dict`` brings into the optimizer are ``given`` away.
        """
        options = {
            key: {id(self.parameters[name]) for name in names}
            for key, names in (("momentum", momentum), ("weight_decay", weight_decay)) if names
        }  # fmt: skip
        if not options:
            return
        optimizer = self.optimizer

        def switch_off(*_: Any) -> None:
            self.restore()  # a step that failed half-way has left them off
            self._check_dampening(method, momentum, optimizer.param_groups)
            self._off = SwitchedOff(optimizer, options)

        def switch_on(*_: Any) -> None:
            self.restore()

        def check_loaded(_: Any, state: Mapping[str, Any]) -> None:
            self.restore()
            self._check_dampening(method, momentum, state["param_groups"])

        self._handles = [
            optimizer.register_step_pre_hook(switch_off),
            optimizer.register_step_post_hook(switch_on),
            optimizer.register_state_dict_pre_hook(switch_on),
        ]
        if momentum:
            self._handles += [
                optimizer.register_load_state_dict_pre_hook(check_loaded),
                optimizer.register_load_state_dict_post_hook(lambda _: given(self.give_velocity(momentum))),
            ]

    def restore(self) -> None:
        """Put the user's values back."""
        if self._off is not None:
            self._off.restore()
            self._off = None

    def release(self) -> None:
        """Undo take_over."""
        self.restore()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def before_step(self, hook: Callable[..., Any]) -> Any:
        return self.optimizer.register_step_pre_hook(hook)

    def after_step(self, hook: Callable[..., Any]) -> Any:
        return self.optimizer.register_step_post_hook(hook)

    def states_like_parameters(self) -> list[Tensor]:
        """The optimizer's real-valued state of the shape of its parameter: momentum, Adam's moments."""
        return [
            value
            for parameter in self.parameters.values()
            for value in self.optimizer.state.get(parameter, {}).values()
            if isinstance(value, Tensor) and value.is_floating_point() and value.shape == parameter.shape
        ]

    def give_velocity(self, names: Collection[str]) -> dict[str, Tensor]:
        """Hand the momentum buffers of these parameters over: they leave the optimizer."""
        buffers = {}
        for name, parameter in self.parameters.items():
            state = self.optimizer.state.get(parameter, {}) if name in names else {}
            buffer = state.pop("momentum_buffer", None)
            if buffer is not None:
                buffers[name] = self._turned(parameter, flat_like(parameter, buffer).to(torch.float32, copy=True))
        return buffers

    def _turned(self, parameter: Tensor, velocity: Tensor) -> Tensor:
        """SGD's buffer of a maximised objective belongs to the negated gradient; ours never does."""
        return -velocity if self.hyper(parameter).maximize else velocity

    def take_velocity(self, velocity: dict[str, Tensor]) -> None:
        """Take momentum buffers back, (numel,) float32 each."""
        for name, buffer in velocity.items():
            parameter = self.parameters[name]
            buffer = shaped_like(self._turned(parameter, buffer), parameter.detach())
            self.optimizer.state[parameter]["momentum_buffer"] = buffer


class NoOptimizer:
    """The null object: a learning rate of 1, no momentum, no weight decay."""

    is_sgd = True  # of which there is nothing to take over

    def hypers(self, parameters: Iterable[Tensor]) -> list[Hyper]:
        return [self.hyper(parameter) for parameter in parameters]

    def hyper(self, parameter: Tensor) -> Hyper:
        return RATE_ONE

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

    def give_velocity(self, names: Collection[str]) -> dict[str, Tensor]:
        return {}

    def take_velocity(self, velocity: dict[str, Tensor]) -> None:
        return


class _NoHandle:
    def remove(self) -> None:
        return
