"""Top-k by magnitude, of every tensor (DGC) or of the whole vector (gTop-k, gradient dropping)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.kernels import select_sampled, select_topk, stream_key
from thinwire.layout import Layout, Turn
from thinwire.payloads import Sparse
from thinwire.schedules import Schedule


def entries_kept(density: float, numel: int) -> int:
    """k = max(1, round(density * numel)), 0 of an empty vector."""
    return max(1, round(density * numel)) if numel else 0


@dataclass(frozen=True)
class TopK:
    """Keeps k = max(1, round(density * numel)) entries of each scope; ties go to the lower index."""

    final_density: float
    warmup: Schedule | None = None
    per_tensor: bool = True
    sampled: bool = False

    def density(self, step: int) -> float:
        return self.warmup.density(step, self.final_density) if self.warmup else self.final_density

    def scopes(self, layout: Layout) -> list[tuple[str, slice]]:
        if self.per_tensor:
            return [(segment.name, segment.span) for segment in layout.coded]
        return [("", slice(0, layout.coded_numel))]

    def num_entries(self, turn: Turn) -> int:
        """Return the most entries that a payload of this step can have: the same on every rank."""
        density = self.density(turn.step)
        return sum(entries_kept(density, span.stop - span.start) for _, span in self.scopes(turn.layout))

    def measure(self, turn: Turn, x: Tensor) -> None:
        return None

    def compress(self, turn: Turn, x: Tensor, agreed: Tensor | None, rank: int) -> Sparse:  # x: (c,) float32
        density = self.density(turn.step)
        chosen = []
        for name, span in self.scopes(turn.layout):
            part, k = x[span], entries_kept(density, span.stop - span.start)
            if self.sampled:
                picked = select_sampled(part, k, stream_key(0, turn.step, rank, name))
            else:
                picked = select_topk(part, k)
            chosen.append(picked + span.start)
        indices = torch.cat(chosen) if chosen else torch.zeros(0, dtype=torch.int64, device=x.device)
        return Sparse(indices, x[indices], x.numel(), self.num_entries(turn))
