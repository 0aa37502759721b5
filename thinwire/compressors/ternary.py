"""TernGrad: stochastic ternary gradients with one scaler a tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.kernels import absmax, stream_key, ternarize
from thinwire.layout import Turn
from thinwire.payloads import Ternary


@dataclass(frozen=True)
class Ternarize:
    """s * sign(g) * b with P(b = 1) = |g| / s (Eq. 1-3) of the clipped gradient (Eq. 21).

    Unbiased for the clipped gradient; clipping itself is a bias, by design. The scaler is this rank's largest
    magnitude, or with ``share_scaler`` the largest of all ranks (Eq. 4), agreed on through ``measure``.
    """

    clip_sigma: float | None = 2.5
    share_scaler: bool = True
    seed: int = 0

    def _clipped(self, turn: Turn, x: Tensor) -> list[Tensor]:  # (c,) -> one vector a tensor
        parts = [x[segment.span] for segment in turn.layout.coded]
        if self.clip_sigma is None:
            return parts
        limits = [self.clip_sigma * part.std(correction=0) for part in parts]
        return [torch.clamp(part, -limit, limit) for part, limit in zip(parts, limits, strict=True)]

    def _scalers(self, parts: list[Tensor], x: Tensor) -> Tensor:  # -> (T,)
        return torch.stack([absmax(part) for part in parts]) if parts else x.new_zeros(0)

    def measure(self, turn: Turn, x: Tensor) -> Tensor | None:
        return self._scalers(self._clipped(turn, x), x) if self.share_scaler else None

    def compress(self, turn: Turn, x: Tensor, agreed: Tensor | None, rank: int) -> Ternary:
        parts = self._clipped(turn, x)
        scalers = agreed if agreed is not None else self._scalers(parts, x)
        trits = [
            ternarize(part, scaler, stream_key(self.seed, turn.step, rank, segment.name))
            for part, scaler, segment in zip(parts, scalers, turn.layout.coded, strict=True)
        ]
        blocks = tuple((segment.numel, 1) for segment in turn.layout.coded)
        return Ternary(torch.cat(trits) if trits else torch.zeros(0, dtype=torch.int8), scalers, blocks)
