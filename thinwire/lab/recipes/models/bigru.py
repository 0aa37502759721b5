"""A GRU in both directions over padded sequences, the same whatever the padding."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class BiGru(nn.Module):
    """(B, T, inputs) to (B, T, 2 * units).

    The backward direction reads every sequence turned round by its own length. That needs no lengths on the host, as
    packed sequences do, so a GPU is not waited for; and padding, which stays at the end, is never read before data.
    """

    def __init__(self, inputs: int, units: int) -> None:
        super().__init__()
        self.forwards = nn.GRU(inputs, units, batch_first=True)
        self.backwards = nn.GRU(inputs, units, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """x: (B, T, inputs); lengths: (B,) int64; what comes out behind a sequence's end means nothing."""
        ahead, _ = self.forwards(x)
        behind, _ = self.backwards(turned(x, lengths))
        return torch.cat([ahead, turned(behind, lengths)], dim=-1)


def turned(x: Tensor, lengths: Tensor) -> Tensor:
    """Each sequence in reverse order, its padding where it was. x: (B, T, D); lengths: (B,)."""
    place = torch.arange(x.shape[1], device=x.device).expand(len(x), -1)  # (B, T)
    mirrored = lengths[:, None] - 1 - place
    index = torch.where(mirrored >= 0, mirrored, place)
    return x.gather(1, index[:, :, None].expand_as(x))
