"""What people use without thinwire, under the same roof, so that a comparison differs in nothing else.

``bf16`` and ``fp16`` are a dense mean with 16 bits on the wire. ``powersgd`` is PyTorch's own PowerSGD hook (Vogels et
al., 2019): its code runs unchanged, on our ordered thread and over a net that counts its bytes and seconds. On Gloo the
hook itself aborts with more than one bucket, because it launches collectives from callbacks; here it gets the whole
model as one bucket, in the model's order, so its state does not depend on DDP's buckets and can be resumed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire.engine.aggregators import write_flat
from thinwire.engine.context import ExchangeContext
from thinwire.engine.exchange_parts import Clock
from thinwire.engine.layout import Layout
from thinwire.engine.named_state import RESIDUAL, KeptVector, StateKind
from thinwire.engine.norms import UNMEASURED, Measured
from thinwire.engine.protocols import Aggregator
from thinwire.engine.traffic_plan import NoPlan, Plan
from thinwire.methods import METHODS, Dense, Method, parse_method
from thinwire.transport import Net


@dataclass(frozen=True, kw_only=True)
class PowerSGD(Method):
    """PyTorch's PowerSGD hook with error feedback and warm start; plain all-reduce for the first ``warmup`` steps."""

    name: ClassVar[str] = "powersgd"
    rank: int = 1
    warmup: int = 10

    def __post_init__(self) -> None:
        for option, least in (("rank", 1), ("warmup", 2)):  # the hook itself refuses fewer than two
            value = getattr(self, option)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(
                    f"powersgd: {option} must be a whole number of at least {least}, not {getattr(self, option)!r}"
                )

    @property
    def gives_step_gradient(self) -> bool:
        return True  # not quite, but people clip what PyTorch's hook gives them

    def aggregator(self, net: Net, optimizer_is_sgd: bool) -> Aggregator:
        return PowerSGDMean(net, self.rank, self.warmup)


class _TorchGroup:
    """As much of a process group as the hook uses; the net behind it counts and waits, so work is done when it returns.

    torch.distributed.all_reduce(tensor, group=...) calls nothing of the group but ``allreduce``.
    """

    def __init__(self, net: Net) -> None:
        self.net = net

    def size(self) -> int:
        return self.net.size

    def allreduce(self, tensors: list[Tensor], options: object) -> _Done:
        for tensor in tensors:
            if tensor.numel():
                self.net.all_reduce(tensor)
        return _Done(tensors)


class _Done:
    """Work that has been done, and its own future.

    What follows runs at once, in the caller's thread and on its stream. torch's futures would run it on a stream of
    their own, and ranks that are threads rely on one stream to keep their work in order.
    """

    def __init__(self, value: Any) -> None:
        self._value = value

    def get_future(self) -> _Done:
        return self

    def then(self, following: Callable[[_Done], Any]) -> _Done:
        return _Done(following(self))

    def value(self) -> Any:
        return self._value

    def wait(self) -> Any:
        return self._value


@dataclass
class _WholeModel:
    """All gradients of a step as the one bucket that the hook sees."""

    flat: Tensor  # (n,)
    shapes: list[torch.Size]

    def buffer(self) -> Tensor:
        return self.flat

    def gradients(self) -> list[Tensor]:
        parts = self.flat.split([shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


class PowerSGDMean:
    """An aggregator around the hook. Its error is kept by parameter name, its factors as the hook has them."""

    whole_model = True
    fusible, sums_by_place = False, False
    frames_grow = False

    def __init__(self, net: Net, rank: int, warmup: int) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook  # a slow import that few need

        logging.getLogger(powerSGD_hook.__name__).setLevel(logging.WARNING)  # it tells its settings on every rank
        self.net, self.clock = net, Clock()
        self._hook: Any = powerSGD_hook.powerSGD_hook
        self._state: Any = powerSGD_hook.PowerSGDState(
            _TorchGroup(net), matrix_approximation_rank=rank, start_powerSGD_iter=warmup
        )
        self._layout: Layout | None = None
        self._saved_error: dict[str, Tensor] = {}

    def plan(self, layout: Layout, size: int) -> Plan:
        raise NoPlan("what PyTorch's hook puts on the wire is not stated")

    def waits(self, layout: Layout) -> float:
        return 1

    def _mean(self, context: ExchangeContext, grad: Tensor) -> Tensor:
        start, on_wire = time.perf_counter(), self.net.traffic.seconds
        if self._layout is None:
            self._layout = context.layout
            if self._saved_error:
                parts = [self._saved_error[segment.name].reshape(-1) for segment in context.layout.segments]
                self._state.error_dict[0] = torch.cat(parts).to(grad.device)
        assert self._layout == context.layout, "powersgd: the set of parameters with gradients changed"
        mean: Tensor = self._hook(self._state, _WholeModel(grad, [weight.shape for weight in context.weights])).wait()
        self.clock.compressing += time.perf_counter() - start - (self.net.traffic.seconds - on_wire)
        return mean

    def reduce(self, context: ExchangeContext, parts: Sequence[Tensor], norms: Measured = UNMEASURED) -> Measured:
        write_flat(context, parts, self._mean(context, torch.cat(list(parts))))
        return norms

    def _error(self) -> dict[str, Tensor]:
        error = self._state.error_dict.get(0)
        if error is None or self._layout is None:
            return self._saved_error
        return {s.name: part for s, part in zip(self._layout.segments, self._layout.split(error), strict=True)}

    def residual_square_sum(self) -> float:
        return sum(float(part.double().square().sum()) for part in self._error().values())

    def leftover(self, numels: dict[str, int], rates: dict[str, float]) -> dict[str, Tensor]:
        return {name: part.clone() for name, part in self._error().items()}

    def kinds(self) -> dict[str, dict[str, StateKind]]:
        hook = (StateKind("factors", reshard="first"), StateKind("at", reshard="first"))
        return {"memory": {RESIDUAL.name: RESIDUAL}, "hook": {kind.name: kind for kind in hook}}

    def vectors(self, numels: Mapping[str, int], coded: Collection[str]) -> Iterator[KeptVector]:
        return (KeptVector("memory", RESIDUAL.name, name, 0, numel, torch.float32) for name, numel in numels.items())

    def state_dict(self) -> dict[str, Any]:
        state = self._state
        _, numbers, position, *_ = state.rng.get_state()
        factors = {key: [memory[0].clone()] for key, memory in self._factors().items() if 0 in memory}
        return {
            "memory": {"residual": {name: part.clone() for name, part in self._error().items()}},
            "hook": {"factors": factors, "at": {"iter": state.iter, "rng": [*numbers.tolist(), position]}},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        hook = state["hook"]
        self._saved_error, self._layout = dict(state["memory"]["residual"]), None
        self._state.error_dict.clear()
        for key, memory in self._factors().items():
            memory.clear()
            if key in hook["factors"]:
                memory[0] = hook["factors"][key][0].clone()
        *numbers, position = hook["at"]["rng"]
        self._state.rng.set_state(("MT19937", numbers, position))
        self._state.iter = hook["at"]["iter"]

    def _factors(self) -> dict[str, dict[int, Tensor]]:
        return {"p": self._state.p_memory_dict, "q": self._state.q_memory_dict}


ALIASES: dict[str, Method] = {"bf16": Dense(dtype="bf16"), "fp16": Dense(dtype="fp16")}
PEERS = (*ALIASES, PowerSGD.name)


def parse(spec: str) -> Method:
    """Return the method or peer that a string describes: what ``parse_method`` reads, ``bf16``, ``fp16``, ``powersgd``.

    Anything unknown is a ValueError that names what is known.
    """
    alias = ALIASES.get(spec.strip().lower())
    return alias if alias is not None else parse_method(spec, {**METHODS, PowerSGD.name: PowerSGD}, tuple(ALIASES))
