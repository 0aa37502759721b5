"""The codec that SparseLoCo was published with, written down from its paper and code to be compared with.

Of every 4,096 elements the largest; their places in 12 bits each; their values in 2 bits, by four bins that are 1.5
standard deviations of all sent values apart, each read as the mean of what fell into it.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 4096
BINS = 4
APART = 1.5  # standard deviations: six of them for four bins
PLACE_BITS, VALUE_BITS = 12, 2


def quantized(values: Tensor) -> tuple[Tensor, Tensor]:
    """The bin of each value, (k,) int64, and what the bins are read as, (4,) float32."""
    centre, spread = values.mean(), values.std().clamp_min(torch.finfo(torch.float32).tiny)
    bins = ((values - centre) / (APART * spread) + BINS / 2).round().clamp(0, BINS - 1).long()
    sums = torch.zeros(BINS, dtype=torch.float32).index_add_(0, bins, values)
    counts = torch.zeros(BINS, dtype=torch.float32).index_add_(0, bins, torch.ones_like(values))
    return bins, sums / counts.clamp_min(1.0)


def nbytes(k: int) -> int:
    """Of a frame with k entries: places, bins, and four numbers; it has no header and no checksum."""
    return -(-k * PLACE_BITS // 8) + -(-k * VALUE_BITS // 8) + 4 * BINS


def largest_of_chunks(gradient: Tensor, density: float) -> Tensor:
    """The values of the largest elements of each whole chunk, one or more."""
    chunks = gradient[: len(gradient) // CHUNK * CHUNK].view(-1, CHUNK)
    k = max(1, round(density * CHUNK))
    return chunks.gather(1, chunks.abs().topk(k, dim=1).indices).flatten()


def squared_error(values: Tensor, read: Tensor) -> float:
    """Of what was read, as a share of the values' own square."""
    return float((values - read).double().square().sum() / values.double().square().sum())
