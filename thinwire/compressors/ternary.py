"""TernGrad: stochastic ternary gradients with one scaler a tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.kernels import moments, stream_key, ternarize
from thinwire.layout import Turn
from thinwire.memory import Scout
from thinwire.payloads import Ternary

_ROUNDING = 1e-5  # of the largest magnitude: less than this is no deviation


@dataclass(frozen=True)
class Ternarize:
    """s * sign(g) * b with P(b = 1) = |g| / s (Eq. 1-3) of the clipped gradient (Eq. 21).

    Unbiased for the clipped gradient; clipping itself is a bias, by design. The scaler is this rank's largest
    magnitude, or with ``share_scaler`` the largest of all ranks (Eq. 4), agreed on through ``measure``.
    """

    clip_sigma: float | None = 2.5
    share_scaler: bool = True
    seed: int = 0

    def _moments(self, turn: Turn, x: Tensor) -> list[tuple[Tensor, Tensor | None]]:
        """Every tensor's scaler and clipping limit (Eq. 2 and 21); no limit without clipping."""
        rows: list[tuple[Tensor, Tensor | None]] = []
        for segment in turn.layout.coded:
            deviation, largest = moments(x[segment.span])
            if self.clip_sigma is None:
                rows.append((largest, None))
            else:
                limit = (self.clip_sigma * deviation).to(torch.float32)
                # One element, or equal ones, deviate by nothing but rounding: clipped at that they would never move.
                limit = torch.where(limit > _ROUNDING * largest, limit, largest)
                rows.append((torch.minimum(largest, limit), limit))
        return rows

    def scout(self, turn: Turn, device: torch.device) -> None:
        return None

    def measure(self, turn: Turn, x: Tensor) -> Tensor | None:
        if not self.share_scaler:
            return None
        scalers = [scaler for scaler, _ in self._moments(turn, x)]
        return torch.stack(scalers) if scalers else x.new_zeros(0)

    def compress(self, turn: Turn, x: Tensor, agreed: Tensor | None, rank: int, scout: Scout | None = None) -> Ternary:
        rows = self._moments(turn, x)
        scalers = agreed if agreed is not None else torch.stack([s for s, _ in rows]) if rows else x.new_zeros(0)
        trits = [
            ternarize(x[segment.span], scaler, stream_key(self.seed, turn.step, rank, segment.name), limit)
            for segment, scaler, (_, limit) in zip(turn.layout.coded, scalers, rows, strict=True)
        ]
        blocks = tuple((segment.numel, 1) for segment in turn.layout.coded)
        return Ternary(
            torch.cat(trits) if trits else torch.zeros(0, dtype=torch.int8, device=x.device), scalers, blocks
        )
