"""The outside view of a method: gradients in, the group's mean out."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from thinwire.engine.context import ExchangeContext, Hyper
from thinwire.engine.exchange import exchange
from thinwire.engine.exchange_parts import Clock, Stages
from thinwire.engine.flat_gradient import coded_part
from thinwire.engine.layout import Layout
from thinwire.engine.local_gradients import LOCAL_MODES, NoLocalGradients
from thinwire.engine.named_state import KeptVector, StateKind
from thinwire.engine.norms import UNMEASURED, Measured
from thinwire.engine.protocols import Collective, Compressor, Memory
from thinwire.engine.traffic_plan import Budget, NoPlan, Plan, all_gather, all_reduce, all_to_all, share
from thinwire.engine.workspace import Workspace
from thinwire.transport import Net


class Exchange:
    """A compressed mean: memory, compressor and collective around one net; ``local`` is a mode of LOCAL_MODES."""

    fusible, sums_by_place = True, False

    def __init__(
        self,
        memory: Memory,
        compressor: Compressor,
        collective: Collective,
        net: Net,
        *,
        whole_model: bool = False,
        local: str | None = None,
        workspace: Workspace | None = None,
    ) -> None:
        modes = NoLocalGradients if local is None else LOCAL_MODES[local]
        self.stages = Stages(memory, compressor, collective, net, modes(), workspace or Workspace())
        self.memory, self.compressor, self.collective, self.net = memory, compressor, collective, net
        self.whole_model, self.clock = whole_model, self.stages.clock
        self.reduce = partial(exchange, self.stages)  # the way a gradient goes, in one function

    @property
    def frames_grow(self) -> bool:
        return self.collective.frames_grow

    def plan(self, layout: Layout, size: int) -> Plan:
        if not hasattr(self.collective, "plan"):
            raise NoPlan(f"{type(self.collective).__name__} has no plan()")
        stated = hasattr(self.compressor, "budget")
        return self._plan(layout, self.compressor.budget(layout) if stated else self._tried_budget(layout), size)

    def waits(self, layout: Layout) -> float:
        if not hasattr(self.collective, "plan"):
            return 1
        stated = hasattr(self.compressor, "budget")
        return self._plan(layout, self.compressor.budget(layout) if stated else Budget(), self.net.size).waits

    def _plan(self, layout: Layout, budget: Budget, size: int) -> Plan:
        agreement = all_reduce(4 * budget.agreed, size) if budget.agreed else Plan()
        return agreement + self.collective.plan(layout, budget, size)

    def _tried_budget(self, layout: Layout) -> Budget:
        """What a payload of some numbers holds, of a compressor that does not state its budget."""
        numbers = torch.arange(1.0, layout.numel + 1, dtype=torch.float32).sin_()
        context = ExchangeContext(layout, 0, (Hyper(),) * len(layout.segments), layout.split(numbers))
        # A memory that keeps nothing hands the gradients on as they are, one vector per segment.
        x = coded_part(layout, numbers if self.memory.state.kinds else layout.split(numbers))
        agreed = self.compressor.measure(context, x)
        payload = self.compressor.compress(context, x, agreed, 0)
        return Budget(
            getattr(payload, "capacity", 0),
            getattr(payload, "spread", ()),
            payload.scales.numel() if hasattr(payload, "scales") else 0,
            agreed.numel() if agreed is not None else 0,
        )

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

    def kinds(self) -> dict[str, dict[str, StateKind]]:
        return {"memory": self.memory.state.kinds, "collective": {kind.name: kind for kind in self.collective.kinds}}

    def vectors(self, numels: Mapping[str, int], coded: Collection[str]) -> Iterator[KeptVector]:
        for kind in self.memory.state.kinds:
            for name, numel in numels.items():
                yield KeptVector("memory", kind, name, 0, numel, self.memory.state.dtype)
        served = self.collective.served(numels, self.net.rank, self.net.size)
        for served_kind in self.collective.kinds:
            for name, (start, stop) in served.items():
                if name in coded:
                    yield KeptVector("collective", served_kind.name, name, start, stop, torch.float32)

    def state_dict(self) -> dict[str, Any]:
        return {"memory": self.memory.state_dict(), "collective": self.collective.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.memory.load_state_dict(state["memory"])
        self.collective.load_state_dict(state["collective"])


class Stateless:
    """An aggregator that remembers nothing."""

    whole_model = False
    fusible = False
    sums_by_place = False
    frames_grow = False

    def __init__(self, net: Net) -> None:
        self.net = net
        self.clock = Clock()

    def residual_square_sum(self) -> float:
        return 0.0

    def leftover(self, numels: dict[str, int], rates: dict[str, float]) -> dict[str, Tensor]:
        return {}

    def kinds(self) -> dict[str, dict[str, StateKind]]:
        return {}

    def vectors(self, numels: Mapping[str, int], coded: Collection[str]) -> Iterator[KeptVector]:
        return iter(())

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        return


class NoopMean(Stateless):
    """No communication at all: every rank keeps its own gradient."""

    def plan(self, layout: Layout, size: int) -> Plan:
        return Plan()

    def waits(self, layout: Layout) -> float:
        return 0

    def reduce(self, context: ExchangeContext, parts: Sequence[Tensor], norms: Measured = UNMEASURED) -> Measured:
        return norms


def contiguous_view(parts: Sequence[Tensor], in_order: bool) -> Tensor | None:  # -> (n,)
    """One vector over the same memory where the parts, in their order or in any, fill a stretch of one buffer."""
    order = list(parts) if in_order else sorted(parts, key=lambda part: part.storage_offset())
    start, stop = order[0].storage_offset(), order[0].storage_offset()
    for part in order:
        same = part.untyped_storage().data_ptr() == order[0].untyped_storage().data_ptr()
        if not same or part.storage_offset() != stop or not part.is_contiguous():
            return None
        stop += part.numel()
    return torch.as_strided(order[0], (stop - start,), (1,), start)


def write_flat(context: ExchangeContext, parts: Sequence[Tensor], flat: Tensor) -> None:  # flat: (n,)
    """Put a flat vector where the gradients lie, one vector per segment."""
    torch._foreach_copy_(list(parts), list(context.layout.split(flat)))


class DenseMean(Stateless):
    """The plain all-reduce, in fp32 or with 16 bits on the wire.

    With 16 bits the sum is still taken in fp32, in rank order: every rank adds up one slice and hands it on, which
    costs the same bytes as a ring all-reduce in that type and cannot overflow on the way.
    """

    def __init__(self, net: Net, dtype: torch.dtype) -> None:
        super().__init__(net)
        self.dtype = dtype

    def plan(self, layout: Layout, size: int) -> Plan:
        if self.dtype == torch.float32:
            return all_reduce(4 * layout.numel, size)
        slice_nbytes = 2 * share(layout.numel, size)
        means = all_gather(slice_nbytes, size)
        return all_to_all(slice_nbytes, size) + replace(means, frames=0)

    @property
    def sums_by_place(self) -> bool:  # type: ignore[override]
        """A ring adds up every stretch of a vector from another rank on; two ranks have one sum."""
        return self.dtype == torch.float32 and self.net.size > 2

    def waits(self, layout: Layout) -> float:
        return self.plan(layout, self.net.size).waits

    def reduce(self, context: ExchangeContext, parts: Sequence[Tensor], norms: Measured = UNMEASURED) -> Measured:
        # A bucket, which mostly has the last parameter first, is averaged where it lies.
        backward = list(reversed(parts))
        buffer = contiguous_view(backward, in_order=self.sums_by_place)
        if buffer is None:
            mean = self._mean(torch.cat(backward))
            torch._foreach_copy_(backward, list(mean.split([part.numel() for part in backward])))
            return norms
        mean = self._mean(buffer)
        if mean is not buffer:
            buffer.copy_(mean)
        return norms

    def _mean(self, grad: Tensor) -> Tensor:  # (n,) float32, may be changed -> (n,) float32
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
