"""The user's optimizer, read at every step and left as it is.

Where a method applies momentum and weight decay in front of the compression, the optimizer's own are switched off, but
only while ``optimizer.step()`` runs: schedulers, checkpoints and the user see their own values at all other times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from thinwire.engine.context import Hyper
from thinwire.engine.layout import flat_like, shaped_like


class OptimizerView:
    """Reads the hyper-parameters of a model's parameters from an optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: dict[str, Tensor]) -> None:
        self.optimizer = optimizer
        self.parameters = parameters
        self.is_sgd = isinstance(optimizer, torch.optim.SGD)
        self._group_of: dict[int, int] = {}
        self._saved: list[dict[str, Any]] | None = None
        self._handles: list[Any] = []
        self._refresh()
        missing = [name for name, p in parameters.items() if id(p) not in self._group_of]
        if missing:
            raise ValueError(
                f"the optimizer does not own {len(missing)} of the model's {len(parameters)} parameters, the first is "
                f"{missing[0]!r}; build the optimizer from model.parameters()"
            )

    def _refresh(self) -> None:
        self._group_of = {
            id(p): index for index, group in enumerate(self.optimizer.param_groups) for p in group["params"]
        }

    def hypers(self, parameters: Iterable[Tensor]) -> list[Hyper]:
        """What the optimizer says about each of these now; parameters of one group share one object.

        The values are the user's own, also while they are switched off (a closure runs inside step()).
        """
        by_group: dict[int, Hyper] = {}
        result = []
        for parameter in parameters:
            index = self._group_of.get(id(parameter))
            if index is None:
                self._refresh()
                index = self._group_of[id(parameter)]
            if index not in by_group:
                group = self.optimizer.param_groups[index]
                if self._saved is not None:
                    group = {**group, **self._saved[index]}
                by_group[index] = Hyper(
                    lr=float(group.get("lr", 0.0)),
                    momentum=float(group.get("momentum", 0.0)) if self.is_sgd else 0.0,
                    nesterov=bool(group.get("nesterov", False)) and self.is_sgd,
                    weight_decay=float(group.get("weight_decay", 0.0)) if self.is_sgd else 0.0,
                    maximize=bool(group.get("maximize", False)),
                )
            result.append(by_group[index])
        return result

    def hyper(self, parameter: Tensor) -> Hyper:
        return self.hypers([parameter])[0]

    def check_takeover(self, method: str, instead: Callable[[], str]) -> None:
        """Raise when momentum cannot be moved in front of the compression; ``instead`` says what else to take."""
        if not self.is_sgd:
            raise ValueError(
                f"{method}: momentum correction needs torch.optim.SGD, the optimizer is "
                f"{type(self.optimizer).__name__}; {instead()}"
            )
        own = {id(p) for p in self.parameters.values()}
        for group in self.optimizer.param_groups:
            if group.get("dampening"):
                raise ValueError(
                    f"{method}: momentum correction needs dampening=0, a group has {group['dampening']}; use "
                    "dampening=0, or momentum_correction=False where the method has it"
                )
            foreign = [p for p in group["params"] if id(p) not in own and p.requires_grad]
            if foreign and (group["momentum"] or group["weight_decay"]):
                raise ValueError(
                    f"{method}: the optimizer has {len(foreign)} parameters that are not the model's in a group with "
                    "momentum or weight decay, which would be switched off for them; give them their own optimizer, or "
                    "use momentum_correction=False where the method has it"
                )

    def take_over(self, *, momentum: bool, weight_decay: bool) -> None:
        """From now on switch the named values off while step() runs."""
        keys = [key for key, taken in (("momentum", momentum), ("weight_decay", weight_decay)) if taken]
        if not keys:
            return

        def switch_off(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            self.restore()  # a step that failed half-way has left them off
            self._saved = [{key: group[key] for key in keys} for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group.update(dict.fromkeys(keys, 0.0))

        def switch_on(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            self.restore()

        self._handles = [
            self.optimizer.register_step_pre_hook(switch_off),
            self.optimizer.register_step_post_hook(switch_on),
            self.optimizer.register_state_dict_pre_hook(switch_on),
        ]

    def restore(self) -> None:
        """Put the user's values back."""
        if self._saved is not None:
            for group, saved in zip(self.optimizer.param_groups, self._saved, strict=True):
                group.update(saved)
            self._saved = None

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

    def give_velocity(self) -> dict[str, Tensor]:
        """Hand the momentum buffers over: they leave the optimizer."""
        buffers = {}
        for name, parameter in self.parameters.items():
            state = self.optimizer.state.get(parameter, {})
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
        return _RATE_ONE

    def check_takeover(self, method: str, instead: Callable[[], str]) -> None:
        return

    def take_over(self, *, momentum: bool, weight_decay: bool) -> None:
        return

    def release(self) -> None:
        return

    def before_step(self, hook: Callable[..., Any]) -> Any:
        return _NoHandle()

    def after_step(self, hook: Callable[..., Any]) -> Any:
        return _NoHandle()

    def states_like_parameters(self) -> list[Tensor]:
        return []

    def give_velocity(self) -> dict[str, Tensor]:
        return {}

    def take_velocity(self, velocity: dict[str, Tensor]) -> None:
        return


_RATE_ONE = Hyper(lr=1.0)


class _NoHandle:
    def remove(self) -> None:
        return
