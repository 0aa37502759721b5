"""State belongs to parameters, by name, and every kind of it says what becomes of it.

For speed it lies in flat vectors, one per layout, and the named tensors are views of them; when DDP rebuilds its
buckets the next layout takes the named state over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.engine.bfloat16_rounding import round_by_chance
from thinwire.engine.context import ExchangeContext
from thinwire.engine.layout import Layout
from thinwire.kernels import stream_key


@dataclass(frozen=True)
class StateKind:
    """A kind of vector that is kept by parameter name.

    reshard   what each rank of a group of another size gets: "mean", the mean of the old ranks' vectors, or "first",
              what the first of them had
    leftover  it is gradient that was not sent, in units of the mean: when the method changes it enters the next
              gradient, and ``detach`` returns it; vectors of other kinds are dropped then
    """

    name: str
    reshard: str = "mean"
    leftover: bool = False

    def __post_init__(self) -> None:
        if self.reshard not in ("mean", "first"):
            raise ValueError(f"the state kind {self.name!r}: reshard must be 'mean' or 'first', not {self.reshard!r}")


VELOCITY = StateKind("velocity")  # what the optimizer calls its momentum buffer, and is handed over as such
RESIDUAL = StateKind("residual", leftover=True)


@dataclass(frozen=True)
class KeptVector:
    """A vector that a rank's state has at any moment, of a parameter's elements from ``start`` to ``stop``; ``room`` is
    "memory" or "collective"."""

    room: str
    kind: str
    name: str
    start: int
    stop: int
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return self.stop - self.start


class NamedState:
    """Vectors by (kind, parameter name), handed out as one flat vector per layout.

    They are kept in ``dtype``. In bfloat16 what is handed out is a float32 copy for the exchange of the moment, and
    ``settle`` rounds it back: up or down by chance, so that on average nothing is lost. To the nearest would lose, for
    ever, every gradient below 1/512 of the residual that it is added to.
    """

    def __init__(self, *kinds: StateKind, dtype: torch.dtype = torch.float32) -> None:
        self.kinds, self.dtype = {kind.name: kind for kind in kinds}, dtype
        self.named: dict[str, dict[str, Tensor]] = {kind: {} for kind in self.kinds}
        self._flat: dict[tuple[str, Layout], Tensor] = {}
        self._wide: dict[tuple[str, Layout], Tensor] = {}  # what is handed out, where that is not the state itself

    def flat(self, kind: str, layout: Layout, device: torch.device) -> Tensor:  # -> (n,) float32
        """Return the state of a layout's parameters as one vector; changes to it are changes of the state (after
        ``settle`` where it is not kept in float32)."""
        if self.dtype == torch.float32:
            return self._kept(kind, layout, device)
        wide = self._wide.get((kind, layout))
        if wide is None:
            wide = self._wide[kind, layout] = self._kept(kind, layout, device).to(torch.float32)
        return wide

    def rollback(self) -> None:
        """Throw the copies of an exchange that did not end away: the state stays as it was before."""
        self._wide.clear()

    def commit(self, context: ExchangeContext, rank: int) -> None:
        """Round what was handed out for this exchange back into the state."""
        for (kind, layout), wide in self._wide.items():
            flat = self._kept(kind, layout, wide.device)
            for segment in layout.segments:
                key = stream_key(0, context.step, rank, f"{kind}/{segment.name}")
                flat[segment.span] = round_by_chance(wide[segment.span], key)
        self._wide.clear()

    def _kept(self, kind: str, layout: Layout, device: torch.device) -> Tensor:  # -> (n,) of the kept type
        key = (kind, layout)
        flat = self._flat.get(key)
        if flat is None:
            flat = torch.zeros(layout.numel, dtype=self.dtype, device=device)
            self._let_go(kind, {segment.name for segment in layout.segments})
            for segment in layout.segments:
                view = flat[segment.span]
                earlier = self.named[kind].get(segment.name)
                if earlier is not None:
                    if earlier.is_cuda:  # made on another stream, by load_state_dict or switch
                        earlier.record_stream(torch.cuda.current_stream(earlier.device))
                    view.copy_(earlier)
                self.named[kind][segment.name] = view
            self._flat[key] = flat
        return flat

    def _let_go(self, kind: str, names: set[str]) -> None:
        """Give up the flat vectors that hold some of these parameters; the others of them get memory of their own, or
        one that is not used again would keep the whole vector."""
        for key in [key for key in self._flat if key[0] == kind]:
            others = {segment.name for segment in key[1].segments}
            if not names.isdisjoint(others):
                del self._flat[key]
                for name in others - names:
                    self.named[kind][name] = self.named[kind][name].clone()

    def copy_of(self, name: str) -> dict[str, Tensor]:
        """Copies of what is kept of a parameter, by kind; nothing where nothing was kept yet."""
        return {kind: vectors[name].clone() for kind, vectors in self.named.items() if name in vectors}

    def put_back(self, name: str, copies: dict[str, Tensor]) -> None:
        """Keep again what ``copy_of`` gave."""
        for kind, vectors in self.named.items():
            if kind in copies:
                vectors[name].copy_(copies[kind])
            elif name in vectors:
                vectors[name].zero_()

    @property
    def leftovers(self) -> list[str]:
        """The kinds that hold gradient that was not sent."""
        return [name for name, kind in self.kinds.items() if kind.leftover]

    def square_sum(self) -> float:
        """Of all that was not sent."""
        kept = (self.named[kind].values() for kind in self.leftovers)
        return sum(float(tensor.double().square().sum()) for vectors in kept for tensor in vectors)

    def state_dict(self) -> dict[str, Any]:
        return {kind: {name: t.clone() for name, t in self.named[kind].items()} for kind in self.kinds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take vectors over; float32 ones that are kept in bfloat16, such as means, are rounded by chance."""
        self._flat.clear()
        self._wide.clear()
        self.named = {
            kind: {name: self._narrowed(kind, name, tensor) for name, tensor in state.get(kind, {}).items()}
            for kind in self.kinds
        }

    def _narrowed(self, kind: str, name: str, tensor: Tensor) -> Tensor:
        if self.dtype == torch.bfloat16 and tensor.dtype == torch.float32:
            return round_by_chance(tensor.detach(), stream_key(0, 0, _LOADING, f"{kind}/{name}"))
        return tensor.detach().to(self.dtype, copy=True)


_LOADING = 0xFFFFFFFE  # the "rank" whose random stream rounds what is loaded: the same on all ranks
