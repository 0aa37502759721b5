"""Top-k by magnitude, of every tensor (DGC), chunk (SparseLoCo) or the whole model (gTop-k, gradient dropping)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thinwire.compressors.quotas import CHUNK, entries_kept, quotas, spread_of
from thinwire.engine.context import ExchangeContext
from thinwire.engine.layout import Layout
from thinwire.engine.payloads import Sparse
from thinwire.engine.schedules import Schedule
from thinwire.engine.topk_hint import Candidates, SearchBuffers, TopKHint
from thinwire.engine.traffic_plan import Budget
from thinwire.engine.workspace import Workspace
from thinwire.kernels import (
    device_topk,
    listing_entries,
    on_gpu,
    select_chunks,
    select_sampled,
    select_scopes,
    stream_key,
    take_at,
)

_SEARCHED_DENSITY = 0.05  # beyond it the search's lists would need a good part of the gradient's memory,
_SMALL_LAYOUT = 1 << 22  # which does not matter where that is small


class _Carried:
    """The threshold that one scope carries to its next step: a little below the smallest magnitude that it expects to
    choose then.

    It only saves work: when too few or far too many elements reach it the whole scope is searched, so the choice is
    exact in any case.
    """

    ROOM = 3  # times k elements may pass before the threshold is no help

    def __init__(self) -> None:
        self.threshold = float("inf")
        self._share = 0.95  # of the expected magnitude: lets about twice as many pass as are wanted
        self._smallest = 0.0

    def update(self, passed: int | None, k: int, smallest: float) -> None:
        """Learn from a step: how many passed (None: too many to count) and the smallest magnitude that was chosen."""
        if self.threshold < float("inf"):
            if passed is None or passed > 2.5 * k:
                self._share += 0.2 * (1.0 - self._share)
            elif passed < k:
                self._share *= 0.98
        # Residuals grow, fast at first: the next step's growth is expected to be the last one's.
        growth = min(max(0.0, smallest - self._smallest), smallest) if self._smallest > 0 else 0.0
        self._smallest = smallest
        self.threshold = (smallest + growth) * self._share if smallest > 0 else float("inf")


class TopK:
    """Keeps the k largest entries of each scope (thinwire/compressors/quotas.py); ties go to the lower index."""

    def __init__(
        self,
        final_density: float,
        warmup: Schedule | None = None,
        scope: str = "tensor",
        sampled: bool = False,
        workspace: Workspace | None = None,
    ) -> None:
        self.final_density, self.warmup, self.scope, self.sampled = final_density, warmup, scope, sampled
        self.per_tensor = scope != "model"
        self.workspace = workspace if workspace is not None else Workspace()
        self.factor = 1.0  # above 1 where a guard asked for a denser setting
        self._carried: dict[str, _Carried] = {}
        self._searches: dict[Layout, tuple[tuple[int, ...], Any]] = {}  # on a GPU: k of every scope, and its search

    def density(self, step: int) -> float:
        planned = self.warmup.density(step, self.final_density) if self.warmup else self.final_density
        return min(1.0, self.factor * planned)

    def scopes(self, layout: Layout) -> list[tuple[str, slice]]:
        if self.per_tensor:
            return [(segment.name, segment.span) for segment in layout.coded]
        return [("", slice(0, layout.coded_numel))]

    def num_entries(self, context: ExchangeContext) -> int:
        """Return the most entries that a payload of this step can have: the same on every rank."""
        return sum(self.quotas(context))

    def quotas(self, context: ExchangeContext) -> list[int]:
        """k of every scope."""
        return quotas(self.scope, self.density(context.step), context.layout)

    def budget(self, layout: Layout) -> Budget:
        """What is sent behind a warm-up."""
        entries = quotas(self.scope, self.final_density, layout)
        return Budget(entries=sum(entries), spread=spread_of(self.scope, layout, entries))

    def hint(self, context: ExchangeContext, device: torch.device) -> TopKHint | None:
        if self.sampled:
            return None  # its choice would depend on what was carried, and a resumed run would choose differently
        if self.scope == "chunk":
            return None  # a threshold per chunk would be as much to look at as the chunk's own search
        layout = context.layout
        if on_gpu(device):
            return self._device_hint(context, device)
        if device.type != "cpu":
            return None  # reading a threshold back would make the host wait for the device
        carried = [self._carried.setdefault(name, _Carried()) for name, _ in self.scopes(layout)]
        if self.per_tensor:
            thresholds = [one.threshold for one in carried]
        else:
            thresholds = [carried[0].threshold] * len(layout.coded)
        thresholds += [float("inf")] * (len(layout.segments) - len(layout.coded))
        k = self.num_entries(context)
        # In a warm-up k is a good part of all elements: there the list may be longer by a quarter of them.
        capacity = min(_Carried.ROOM * k, k + layout.numel // 4) + 256
        return TopKHint(thresholds, capacity, buffers=self._buffers(k, capacity, layout.numel, device))

    def _buffers(self, k: int, capacity: int, numel: int, device: torch.device) -> SearchBuffers | None:
        if numel >= 1 << 31:
            return None  # 32 bits are too few for its indices
        chosen = self.workspace.take(k, torch.int32, device)
        mark = self.workspace.mark()
        listing = self.workspace.take(listing_entries(capacity), torch.int32, device)
        places = self.workspace.take(capacity, torch.int32, device)
        if chosen is None or listing is None or places is None:
            return None
        return SearchBuffers(listing, places, chosen, mark)

    def _device_hint(self, context: ExchangeContext, device: torch.device) -> TopKHint | None:
        """A search that keeps its thresholds on the device; none where so many are wanted that it would not help."""
        layout, wanted = context.layout, tuple(self.quotas(context))
        too_much = sum(wanted) > _SEARCHED_DENSITY * layout.coded_numel and layout.numel > _SMALL_LAYOUT
        if too_much or not on_gpu(device, layout.numel) or not layout.coded:
            return None
        known = self._searches.get(layout)
        if known is None or known[0] != wanted:
            coded = [place if self.per_tensor else 0 for place in range(len(layout.coded))]
            scope_of = coded + [-1] * (len(layout.segments) - len(layout.coded))
            starts = [segment.start for segment in layout.segments]
            numels = [segment.numel for segment in layout.segments]
            names = {segment.name for segment in layout.segments}
            for other in [one for one in self._searches if not names.isdisjoint(s.name for s in one.segments)]:
                del self._searches[other]  # DDP has rebuilt its buckets: that one is not used again
            known = self._searches[layout] = (wanted, device_topk(starts, numels, scope_of, wanted, device))
        return TopKHint(known[1], 0, flag=known[1].flag)

    def measure(self, context: ExchangeContext, x: Tensor) -> None:
        return None

    def compress(
        self,
        context: ExchangeContext,
        x: Tensor,
        agreed: Tensor | None,
        rank: int,
        candidates: Candidates | None = None,
    ) -> Sparse:  # x: (c,) float32
        scopes, ks = self.scopes(context.layout), self.quotas(context)
        if candidates is not None and context.layout in self._searches:
            return self._payload(context, candidates.found.indices, candidates.found.values, ks)
        if self.sampled:
            chosen = [
                select_sampled(x[span], k, stream_key(0, context.step, rank, name)) + span.start
                for (name, span), k in zip(scopes, ks, strict=True)
            ]
            indices = torch.cat(chosen) if chosen else torch.zeros(0, dtype=torch.int64, device=x.device)
            return self._payload(context, indices, x[indices], ks)
        if self.scope == "chunk":
            return self._of_chunks(context, x, ks)
        found = candidates.found if candidates is not None else None
        bounds = [*(span.start for _, span in scopes), x.numel()]
        buffers = candidates.hint.buffers if candidates is not None else None
        offered = (buffers.chosen, buffers.listing) if buffers is not None else ()
        indices, passed, smallest = select_scopes(x, bounds, ks, found, *offered)
        if buffers is not None:
            self.workspace.release(buffers.mark)  # all but the indices
        if candidates is not None:
            for (name, _), k, number, least in zip(scopes, ks, passed, smallest.tolist(), strict=True):
                if k:
                    self._carried[name].update(number if found is not None else None, k, least)
        values = self.workspace.take(indices.numel(), torch.float32, x.device)
        return self._payload(context, indices, take_at(x, indices, values), ks)

    def _of_chunks(self, context: ExchangeContext, x: Tensor, ks: list[int]) -> Sparse:
        density, segments = self.density(context.step), context.layout.coded
        bounds = [*(segment.start for segment in segments), x.numel()]
        lasts = [entries_kept(density, segment.numel % CHUNK) for segment in segments]
        room = self.workspace.take(sum(ks), torch.int32, x.device) if x.numel() < 1 << 31 else None
        indices = select_chunks(x, bounds, CHUNK, entries_kept(density, CHUNK), lasts, room)
        values = self.workspace.take(indices.numel(), torch.float32, x.device)
        return self._payload(context, indices, take_at(x, indices, values), ks)

    def _payload(self, context: ExchangeContext, indices: Tensor, values: Tensor, ks: list[int]) -> Sparse:
        return Sparse(indices, values, context.layout.coded_numel, sum(ks), spread_of(self.scope, context.layout, ks))
