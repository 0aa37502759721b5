"""TernGrad: stochastic ternary gradients with one scaler a tensor, or one in all."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.kernels import moments, stream_key, ternarize_packed
from thinwire.layout import Turn
from thinwire.memory import Scout
from thinwire.payloads import Ternary

_ROUNDING = 1e-5  # of the largest magnitude: less than this is no deviation


@dataclass
class Ternarize:
    """s * sign(g) * b with P(b = 1) = |g| / s (Eq. 1-3) of the clipped gradient (Eq. 21).

    Unbiased for the clipped gradient; clipping itself is a bias, by design. The scaler is this rank's largest
    magnitude, or with ``share_scaler`` the largest of all ranks (Eq. 4), agreed on through ``measure``.

    With ``whole_model`` all tensors of the exchange have one scaler, the largest of theirs: what the paper improves on
    with its layer-wise ternarizing (section 3.3). Limits stay those of the tensors, because clipping is the paper's
    answer to the range within a layer, and the scaler the one to the range across layers.
    """

    clip_sigma: float | None = 2.5
    share_scaler: bool = True
    seed: int = 0
    whole_model: bool = False
    # What measure() computed of a vector, for the compress() of the same exchange: a pass over memory less.
    _measured: tuple[Turn, Tensor, Tensor | None] | None = field(default=None, init=False, repr=False, compare=False)

    def _parts(self, turn: Turn, x: Tensor) -> list[Tensor]:
        return [x[segment.span] for segment in turn.layout.coded]

    def _moments(self, parts: list[Tensor]) -> tuple[Tensor, Tensor | None]:  # -> (T,), (T,) or None
        """Every tensor's scaler and clipping limit (Eq. 2 and 21); no limit without clipping."""
        deviations, largest = moments(parts)
        if self.clip_sigma is None:
            return largest, None
        limits = (self.clip_sigma * deviations).to(torch.float32)
        # One element, or equal ones, deviate by nothing but rounding: clipped at that they would never move.
        limits = torch.where(limits > _ROUNDING * largest, limits, largest)
        return torch.minimum(largest, limits), limits

    def limits(self, turn: Turn, x: Tensor) -> Tensor | None:  # -> (T,) float32
        """Where every tensor is clipped (Eq. 21); None without clipping."""
        return self._moments(self._parts(turn, x))[1]

    def scout(self, turn: Turn, device: torch.device) -> None:
        return None

    def measure(self, turn: Turn, x: Tensor) -> Tensor | None:
        if not self.share_scaler:
            return None
        scalers, limits = self._moments(self._parts(turn, x))
        self._measured = (turn, x, limits)
        return scalers.max()[None] if self.whole_model and scalers.numel() else scalers

    def compress(self, turn: Turn, x: Tensor, agreed: Tensor | None, rank: int, scout: Scout | None = None) -> Ternary:
        parts, (measured, self._measured) = self._parts(turn, x), (self._measured, None)
        if agreed is not None and measured is not None and measured[0] is turn and _same(measured[1], x):
            scalers, limits = agreed, measured[2]
        else:
            scalers, limits = self._moments(parts)
            scalers = agreed if agreed is not None else scalers
        if self.whole_model and parts:
            scalers = scalers.max().repeat(len(parts))
        keys = [stream_key(self.seed, turn.step, rank, segment.name) for segment in turn.layout.coded]
        packed = ternarize_packed(parts, scalers, keys, limits)
        return Ternary(packed, scalers, tuple((segment.numel, 1) for segment in turn.layout.coded))


def _same(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.numel() == b.numel()
