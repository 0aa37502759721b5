"""Rounding to bfloat16 by chance, so that what is kept in it loses nothing on average."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels import uniform


def round_by_chance(x: Tensor, key: int) -> Tensor:  # (n,) float32 -> (n,) bfloat16
    """Round to one of the two neighbours in bfloat16, the nearer one the likelier: the mean is x itself.

    The lower 16 bits of a float32 are what bfloat16 has not; 16 random bits added to them carry into the upper half
    with just the right probability. The random bits come from a counter, so the same inputs give the same bits.
    """
    dice = (uniform(key, x.numel(), x.device) * 65536.0).to(torch.int32)
    bits = x.contiguous().view(torch.int32)
    rounded = ((bits + dice) & -65536).view(torch.float32)
    return torch.where(rounded.isfinite(), rounded, x).to(torch.bfloat16)
