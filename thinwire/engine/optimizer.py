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
from thinwire.engine.shards import local_of, sharded_like

RATE_ONE, NOT_TRAINED = Hyper(lr=1.0), Hyper()

TakesVelocity = Callable[[dict[str, Tensor]], None]  # (numel,) float32 by parameter name


class OptimizerView:
    """Reads the hyper-parameters of a model's parameters from an optimizer.

    The parameters are the optimizer's own, by name; of sharded ones and their state this rank's part is handed over.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: dict[str, Tensor]) -> None:
        self.optimizer = optimizer
        self.parameters = parameters
        self.is_sgd = isinstance(optimizer, torch.optim.SGD)
        self._off: SwitchedOff | None = None
        self._handles: list[Any] = []
        owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        missing = [name for name, parameter in parameters.items() if id(parameter) not in owned]
        if missing:
            raise ValueError(
                f"the optimizer does not own {len(missing)} of the model's {len(parameters)} parameters, the first is "
                f"{missing[0]!r}; build the optimizer from model.parameters()"
            )

    def hypers(self) -> dict[str, Hyper]:
        """What the optimizer says about every parameter now, by name; those of one group share one object.

        Groups may be added, and parameters moved, at any time. The values are the user's own, also while they are
        switched off (a closure runs inside step()). A parameter that is in no group any more has a learning rate of 0.
        """
        by_id: dict[int, Hyper] = {}
        for group in self.optimizer.param_groups:
            own = group if self._off is None else self._off.as_it_was(group)
            rate = own.get("lr")
            hyper = Hyper(
                lr=float(rate) if rate is not None else RATE_ONE.lr,
                momentum=float(own.get("momentum", 0.0)) if self.is_sgd else 0.0,
                nesterov=bool(own.get("nesterov", False)) and self.is_sgd,
                weight_decay=float(own.get("weight_decay", 0.0)) if self.is_sgd else 0.0,
                maximize=bool(own.get("maximize", False)),
            )
            by_id.update((id(parameter), hyper) for parameter in group["params"])
        return {name: by_id.get(id(parameter), NOT_TRAINED) for name, parameter in self.parameters.items()}

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
            local_of(value)
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
                buffers[name] = flat_like(local_of(parameter), local_of(buffer)).to(torch.float32, copy=True)
        return self._turned(buffers)

    def _turned(self, velocity: dict[str, Tensor]) -> dict[str, Tensor]:
        """SGD's buffer of a maximised objective belongs to the negated gradient; ours never does."""
        hypers = self.hypers()
        return {name: -buffer if hypers[name].maximize else buffer for name, buffer in velocity.items()}

    def take_velocity(self, velocity: dict[str, Tensor]) -> None:
        """Take momentum buffers back, (numel,) float32 each."""
        for name, buffer in self._turned(velocity).items():
            parameter = self.parameters[name]
            own = shaped_like(buffer, local_of(parameter).detach())
            self.optimizer.state[parameter]["momentum_buffer"] = sharded_like(own, parameter)


class NoOptimizer:
    """The null object: a learning rate of 1, no momentum, no weight decay."""

    is_sgd = True  # of which there is nothing to take over

    def __init__(self, names: Iterable[str]) -> None:
        self._hypers = dict.fromkeys(names, RATE_ONE)

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

    def give_velocity(self, names: Collection[str]) -> dict[str, Tensor]:
        return {}

    def take_velocity(self, velocity: dict[str, Tensor]) -> None:
        return


class _NoHandle:
    def remove(self) -> None:
        return
