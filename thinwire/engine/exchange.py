"""The way a gradient goes, in one function."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from thinwire.engine.context import ExchangeContext
from thinwire.engine.gradients import as_flat, coded_part, tail_part
from thinwire.engine.local_gradients import combine, take_own_off
from thinwire.engine.payloads import DenseResult, Payload, Result
from thinwire.engine.protocols import Clock, Collective, Compressor, Memory
from thinwire.engine.workspace import BACK, Workspace
from thinwire.errors import NonFiniteError
from thinwire.kernels import first_nonfinite, on_gpu
from thinwire.transport import Net

P = TypeVar("P", bound=Payload)


class Exchange(Generic[P]):
    """Memory, compressor and collective around one net; ``local`` is a mode of thinwire.engine.local_gradients or None.

    ``scratch`` is memory that compressor and collective share, where they do; every exchange begins it anew.
    """

    def __init__(
        self,
        memory: Memory,
        compressor: Compressor[P],
        collective: Collective[P],
        net: Net,
        *,
        whole_model: bool = False,
        local: str | None = None,
        workspace: Workspace | None = None,
    ) -> None:
        self.workspace = workspace if workspace is not None else Workspace()
        self.memory, self.compressor, self.collective, self.net = memory, compressor, collective, net
        self.whole_model, self.local = whole_model, local
        self.clock = Clock()

    @property
    def rounds(self) -> int:
        """How many latencies one exchange contains."""
        return self.collective.rounds(self.net.size)

    def mean(self, context: ExchangeContext, grad: Tensor) -> Tensor:  # (n,) float32 -> (n,) float32
        context = self._told(context)
        parts = context.layout.split(grad)
        if context.own:
            self._exchange(context, parts).write(context, parts)
            return grad
        return self._exchange(context, parts).flat(context)

    def reduce(self, context: ExchangeContext, parts: Sequence[Tensor]) -> None:
        context = self._told(context)
        # A local mode, and a GPU that tells of a bad gradient late, still need the gradient after the exchange.
        late = (self.local is not None and not context.own) or on_gpu(parts[0].device)
        self._exchange(context, parts, None if late else parts).write(context, parts)

    def _told(self, context: ExchangeContext) -> ExchangeContext:
        """The turn with what the memory leaves to be applied without being sent, and what the mean is added to."""
        applied = self.memory.applied(context)
        assert not applied or self.collective.adds_applied, "what the memory takes off would be lost"
        return replace(context, applied=applied, own=1.0 / self.net.size if self.local == "partial" else 0.0)

    def _exchange(
        self, context: ExchangeContext, parts: Sequence[Tensor], into: Sequence[Tensor] | None = None
    ) -> Result:
        start, on_wire = time.perf_counter(), self.net.traffic.seconds
        device = parts[0].device
        self.memory.forget()
        self.workspace.begin()
        # A GPU looks while it passes over the gradient anyway; the host learns of it after the exchange.
        watched = on_gpu(device) and self.memory.watches
        bad = None if watched else first_nonfinite(parts)
        if bad is not None:
            # This rank's memory stays as it is and it sends zeros, with the alarm that makes all ranks stop.
            context.alarm.own = context.layout.segments[bad].name
            parts, into = [torch.zeros_like(part) for part in parts], None
        hint = self.compressor.hint(context, device) if bad is None else None
        if watched:
            own = hint.flag if hint is not None else None
            context.alarm.flag = own if own is not None else torch.zeros(1, dtype=torch.int32, device=device)
        x = (
            self.memory.compensate(context, parts, hint) if bad is None else torch.cat(list(parts))
        )  # (n,) to be sent now
        probe = context.probe if bad is None and "residual" in self.memory.state.kinds else None
        if probe is not None:
            probe.wanted(as_flat(x))
        compensated = time.perf_counter()
        agreed = self.compressor.measure(
            context, coded_part(context.layout, x)
        )  # (m,) what all ranks must agree on first
        if agreed is not None:
            self.net.stage = "agree on scalers"
            self.net.all_reduce(agreed, largest=True)
        chosen = coded_part(context.layout, x)
        payload = self.compressor.compress(context, chosen, agreed, self.net.rank, hint)  # what we choose to send
        # Without a memory x is the gradient's own vectors, whose tail is put together anew.
        joined = isinstance(x, Tensor)
        room = self.workspace.take(context.layout.tail_numel, torch.float32, device, BACK) if joined else None
        tail = tail_part(context.layout, x, room)  # of its own: x changes while what was accepted is still read
        self.net.stage = "exchange frames"
        result, accepted = self.collective.mean(context, payload, tail, self.net, into)  # what the group really used
        exchanged = time.perf_counter()
        if context.alarm.flag is not None and int(context.alarm.flag):
            bad = first_nonfinite(parts)
            context.alarm.own = context.layout.segments[bad or 0].name
        if context.alarm.rings:
            raise NonFiniteError(_alarm_sentence(context))
        self.memory.retain(context, x, accepted)  # keep the rest: nothing is ever lost
        if probe is not None:
            probe.left(as_flat(x))  # which is the residual itself
        if context.own:
            result = take_own_off(context, result, accepted, self.net.size)
        elif self.local is not None:
            grad = torch.cat(list(parts))
            mean = result.flat(context)
            result = DenseResult(combine(self.local, mean, grad, as_flat(x), accepted, self.net.size))
        self.memory.commit(context, self.net.rank)
        self.clock.compensating += compensated - start + time.perf_counter() - exchanged
        self.clock.compressing += exchanged - compensated - (self.net.traffic.seconds - on_wire)
        return result

    def residual_square_sum(self) -> float:
        return self.memory.residual_square_sum() + self.collective.residual_square_sum()

    def leftover(self, numels: dict[str, int], rates: dict[str, float]) -> dict[str, Tensor]:
        """Return this rank's share of everything kept, by parameter name: the mean of all ranks' shares is what the
        group has not applied yet, in units of the learning rates ``rates``."""
        rest = {name: tensor.clone() for name, tensor in self.memory.leftover(rates).items()}
        for name, start, piece in self.collective.leftover(rates):
            share = rest.setdefault(name, torch.zeros(numels[name], dtype=torch.float32, device=piece.device))
            # A server's error is part of the mean, held by one rank alone.
            share[start : start + piece.numel()].add_(piece, alpha=float(self.net.size))
        return rest

    def state_dict(self) -> dict[str, Any]:
        return {"memory": self.memory.state_dict(), "collective": self.collective.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.memory.load_state_dict(state["memory"])
        self.collective.load_state_dict(state["collective"])


def _alarm_sentence(context: ExchangeContext) -> str:
    alarm = context.alarm
    where = f"of {alarm.own!r} on this rank" if alarm.own else f"on another rank ({alarm.heard_from})"
    return (
        f"the gradient {where} holds an inf or a nan at step {context.step}; it entered no residual; lower the "
        'learning rate or the loss scale, or attach with on_nonfinite="skip" or scaler=... to pass over such steps'
    )


class _Stateless:
    """An aggregator that remembers nothing."""

    whole_model = False

    def __init__(self, net: Net) -> None:
        self.net = net
        self.clock = Clock()

    def residual_square_sum(self) -> float:
        return 0.0

    def leftover(self, numels: dict[str, int], rates: dict[str, float]) -> dict[str, Tensor]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        return


class NoopMean(_Stateless):
    """No communication at all: every rank keeps its own gradient."""

    def mean(self, context: ExchangeContext, grad: Tensor) -> Tensor:
        return grad

    def reduce(self, context: ExchangeContext, parts: Sequence[Tensor]) -> None:
        return


def joined(parts: Sequence[Tensor]) -> Tensor | None:  # -> (n,)
    """One vector over the same memory where the parts, in any order, fill a stretch of one buffer; else None."""
    order = sorted(parts, key=lambda part: part.storage_offset())
    start, stop = order[0].storage_offset(), order[0].storage_offset()
    for part in order:
        same = part.untyped_storage().data_ptr() == order[0].untyped_storage().data_ptr()
        if not same or part.storage_offset() != stop or not part.is_contiguous():
            return None
        stop += part.numel()
    return torch.as_strided(order[0], (stop - start,), (1,), start)


def reduce_flat(aggregator: Any, context: ExchangeContext, parts: Sequence[Tensor]) -> None:
    """``reduce`` by way of ``mean``."""
    DenseResult(aggregator.mean(context, torch.cat(list(parts)))).write(context, parts)


class DenseMean(_Stateless):
    """The plain all-reduce, in fp32 or with 16 bits on the wire.

    With 16 bits the sum is still taken in fp32, in rank order: every rank adds up one slice and hands it on, which
    costs the same bytes as a ring all-reduce in that type and cannot overflow on the way.
    """

    def __init__(self, net: Net, dtype: torch.dtype) -> None:
        super().__init__(net)
        self.dtype = dtype

    def reduce(self, context: ExchangeContext, parts: Sequence[Tensor]) -> None:
        # The mean of each element needs no order: a whole bucket is averaged where it lies.
        buffer = joined(parts)
        if buffer is None:
            return reduce_flat(self, context, parts)
        mean = self.mean(context, buffer)
        if mean is not buffer:
            buffer.copy_(mean)

    def mean(self, context: ExchangeContext, grad: Tensor) -> Tensor:
        self.net.stage = "average gradients"
        if self.dtype == torch.float32:
            self.net.all_reduce(grad)
            return grad.div_(self.net.size)
        start, on_wire = time.perf_counter(), self.net.traffic.seconds
        mean = self._half_mean(grad)
        self.clock.compressing += time.perf_counter() - start - (self.net.traffic.seconds - on_wire)
        return mean

    def _half_mean(self, grad: Tensor) -> Tensor:
        size, numel = self.net.size, grad.numel()
        share = -(-numel // size)
        half = torch.zeros(share * size, dtype=self.dtype, device=grad.device)
        half[:numel] = grad
        as_bytes = half.view(torch.uint8)
        slices = self.net.all_to_all(
            list(as_bytes.split(2 * share)) if share else [as_bytes] * size, [2 * share] * size
        )
        total = torch.zeros(share, dtype=torch.float32, device=grad.device)
        for part in slices:
            total.add_(part.to(grad.device).view(self.dtype))
        mine = total.div_(size).to(self.dtype).view(torch.uint8)
        means = torch.cat(self.net.all_gather(mine, pairwise=True)).to(grad.device).view(self.dtype)
        return means[:numel].to(torch.float32)
