"""What an exchange is made of: memory, compressor and collective around one net."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.engine.context import ExchangeContext
from thinwire.engine.flat_gradient import Gradient, tail_part
from thinwire.engine.local_gradients import LocalGradients, NoLocalGradients
from thinwire.engine.nonfinite_alarm import QUIET, Alarm, device_flag
from thinwire.engine.norms import Measured
from thinwire.engine.payloads import Accepted
from thinwire.engine.protocols import Collective, Compressor, Memory
from thinwire.engine.topk_hint import Candidates, TopKHint
from thinwire.engine.workspace import BACK, Workspace
from thinwire.kernels import GRADIENT_LIMIT, first_nonfinite, on_gpu
from thinwire.transport import Net


@dataclass
class Clock:
    """Seconds that this rank spent on its own side of the exchanges."""

    compensating: float = 0.0
    compressing: float = 0.0

    def add(self, watch: Stopwatch) -> None:
        self.compensating += watch.compensating_s
        self.compressing += watch.compressing_s


@dataclass
class Stopwatch:
    """Runs through one exchange; the time on the wire is no work of this rank."""

    net: Net
    began_s: float = field(default_factory=time.perf_counter)
    compensated_s: float = 0.0
    exchanged_s: float = 0.0
    on_wire_s: float = 0.0

    def compensated(self) -> None:
        self.compensated_s, self.on_wire_s = time.perf_counter(), self.net.traffic.seconds

    def exchanged(self) -> None:
        self.exchanged_s, self.on_wire_s = time.perf_counter(), self.net.traffic.seconds - self.on_wire_s

    @property
    def compensating_s(self) -> float:
        return self.compensated_s - self.began_s + time.perf_counter() - self.exchanged_s

    @property
    def compressing_s(self) -> float:
        return self.exchanged_s - self.compensated_s - self.on_wire_s


class _Untouched:
    """In the place of a memory on a rank whose gradient is not finite: the real one stays as it is."""

    @property
    def keeps_residual(self) -> bool:
        return False

    def direct_decay(self, context: ExchangeContext) -> tuple[float, ...]:
        return ()

    def compensate(
        self,
        context: ExchangeContext,
        gradients: Gradient,
        direct_decay: tuple[float, ...],
        hint: TopKHint | None,
        flag: Tensor | None,
    ) -> tuple[Gradient, Candidates | None]:
        return torch.cat(list(gradients)), None

    def retain(self, context: ExchangeContext, x: Gradient, accepted: Accepted) -> None:
        raise AssertionError("an exchange with a gradient that is not finite ends before anything is kept")

    def commit(self, context: ExchangeContext, rank: int) -> None:
        raise AssertionError("an exchange with a gradient that is not finite ends before anything is kept")


@dataclass
class Stages:
    """``workspace`` is memory that compressor and collective share, where they do; every exchange begins it anew."""

    memory: Memory
    compressor: Compressor
    collective: Collective
    net: Net
    local: LocalGradients = field(default_factory=NoLocalGradients)
    workspace: Workspace = field(default_factory=Workspace)
    clock: Clock = field(default_factory=Clock)

    def begin(
        self, context: ExchangeContext, gradients: Sequence[Tensor]
    ) -> tuple[Memory | _Untouched, TopKHint | None, Sequence[Tensor], Sequence[Tensor] | None, Alarm]:
        """A new exchange: what one that failed may have left behind is thrown away.

        Return the memory that this exchange may touch, what it should look for, the gradients that it gets, where the
        mean may be written before the exchange has ended, and the alarm.

        A rank whose gradient is not finite sends zeros, with the alarm that makes all ranks stop. A GPU looks while it
        passes over the gradient anyway, and the host learns of it after the exchange.
        """
        device = gradients[0].device
        watched = on_gpu(device) and self.memory.watches
        bad = None if watched else first_nonfinite(gradients, GRADIENT_LIMIT)
        self.memory.rollback()
        self.workspace.begin()
        if bad is not None:
            zeros = [torch.zeros_like(part) for part in gradients]
            return _Untouched(), None, zeros, None, Alarm(parameter=context.layout.segments[bad].name)
        hint = self.compressor.hint(context, device)
        # Local gradients, and a GPU that tells of a bad gradient late, still need the gradient after the exchange.
        into = None if self.local.keeps_gradient or on_gpu(device) else gradients
        if not watched:
            return self.memory, hint, gradients, into, QUIET
        searched = hint.flag if hint is not None else None
        return self.memory, hint, gradients, into, Alarm(flag=searched if searched is not None else device_flag(device))

    def tail(self, context: ExchangeContext, x: Gradient) -> Tensor:  # -> (t,)
        """What travels dense, in memory of its own: x changes while what was accepted is still read."""
        # Without a memory x is the gradient's own vectors, whose tail is put together anew.
        if not isinstance(x, Tensor):
            return tail_part(context.layout, x)
        buffer = self.workspace.take(context.layout.tail_numel, torch.float32, x.device, BACK)
        return tail_part(context.layout, x, buffer)

    def agree(self, measured: Tensor | None) -> Tensor | None:  # (m,) -> (m,)
        """What all ranks must agree on before they compress: the largest of everybody's numbers."""
        if measured is not None:
            self.net.stage = "agree on scalers"
            self.net.all_reduce(measured, largest=True)
        self.net.stage = "exchange frames"
        return measured

    @staticmethod
    def of_wanted(norms: Measured, memory: Memory | _Untouched, x: Gradient) -> Measured:
        return norms.of_wanted(x) if memory.keeps_residual else norms

    @staticmethod
    def of_left(norms: Measured, memory: Memory | _Untouched, x: Gradient) -> Measured:
        return norms.of_left(x) if memory.keeps_residual else norms
