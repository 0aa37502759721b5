"""Top-k by magnitude, of every tensor (DGC) or of the whole vector (gTop-k, gradient dropping)."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels import select_among, select_sampled, select_topk, stream_key
from thinwire.layout import Layout, Turn
from thinwire.memory import Scout
from thinwire.payloads import Sparse
from thinwire.schedules import Schedule


def entries_kept(density: float, numel: int) -> int:
    """k = max(1, round(density * numel)), 0 of an empty vector."""
    return max(1, round(density * numel)) if numel else 0


class _Carried:
    """The threshold that one scope carries to its next step: a little below the smallest magnitude that it expects to
    choose then.

    It only saves work: when too few or far too many elements reach it the whole scope is searched, so the choice is
    exact in any case.
    """

    ROOM = 8  # times k elements may pass before the threshold is no help

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
    """Keeps k = max(1, round(density * numel)) entries of each scope; ties go to the lower index."""

    def __init__(
        self, final_density: float, warmup: Schedule | None = None, per_tensor: bool = True, sampled: bool = False
    ) -> None:
        self.final_density, self.warmup, self.per_tensor, self.sampled = final_density, warmup, per_tensor, sampled
        self.factor = 1.0  # above 1 where a guard asked for a denser setting
        self._carried: dict[str, _Carried] = {}

    def density(self, step: int) -> float:
        planned = self.warmup.density(step, self.final_density) if self.warmup else self.final_density
        return min(1.0, self.factor * planned)

    def scopes(self, layout: Layout) -> list[tuple[str, slice]]:
        if self.per_tensor:
            return [(segment.name, segment.span) for segment in layout.coded]
        return [("", slice(0, layout.coded_numel))]

    def num_entries(self, turn: Turn) -> int:
        """Return the most entries that a payload of this step can have: the same on every rank."""
        density = self.density(turn.step)
        return sum(entries_kept(density, span.stop - span.start) for _, span in self.scopes(turn.layout))

    def scout(self, turn: Turn, device: torch.device) -> Scout | None:
        if device.type != "cpu":
            return None  # reading a threshold back would make the host wait for the device
        if self.sampled:
            return None  # its choice would depend on what was carried, and a resumed run would choose differently
        layout = turn.layout
        carried = [self._carried.setdefault(name, _Carried()) for name, _ in self.scopes(layout)]
        if self.per_tensor:
            thresholds = [one.threshold for one in carried]
        else:
            thresholds = [carried[0].threshold] * len(layout.coded)
        thresholds += [float("inf")] * (len(layout.segments) - len(layout.coded))
        return Scout(thresholds, _Carried.ROOM * self.num_entries(turn) + 1024)

    def measure(self, turn: Turn, x: Tensor) -> None:
        return None

    def compress(
        self, turn: Turn, x: Tensor, agreed: Tensor | None, rank: int, scout: Scout | None = None
    ) -> Sparse:  # x: (c,) float32
        density, scopes = self.density(turn.step), self.scopes(turn.layout)
        found = scout.found if scout is not None else None
        if found is not None and len(scopes) > 1:
            bounds = torch.tensor([s.start for _, s in scopes] + [x.numel()], device=found.device)
            cuts = torch.searchsorted(found, bounds).tolist()
        else:
            cuts = [0, found.numel() if found is not None else 0]
        chosen = []
        for place, (name, span) in enumerate(scopes):
            k = entries_kept(density, span.stop - span.start)
            passed = cuts[place + 1] - cuts[place] if found is not None else 0
            if found is not None and passed >= k:
                picked = select_among(x, found[cuts[place] : cuts[place + 1]], k)
            elif self.sampled:
                picked = select_sampled(x[span], k, stream_key(0, turn.step, rank, name)) + span.start
            else:
                picked = select_topk(x[span], k) + span.start
            chosen.append(picked)
            if scout is not None and picked.numel():
                self._carried[name].update(passed if found is not None else None, k, float(x[picked].abs().min()))
        indices = torch.cat(chosen) if chosen else torch.zeros(0, dtype=torch.int64, device=x.device)
        return Sparse(indices, x[indices], x.numel(), self.num_entries(turn))
