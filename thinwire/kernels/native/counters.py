"""Checksums, natively."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels.native import library


def checksum(words: Tensor, start: int = 0) -> Tensor:  # (n,) int32 -> () int64
    words = words.contiguous()
    return torch.tensor(library.lib().tw_checksum(words.data_ptr(), words.numel(), start), dtype=torch.int64)


def checksum_around(words: Tensor, hole: int) -> Tensor:  # (n,) int32 -> () int64
    words = words.contiguous()
    start, behind = words.data_ptr(), hole + 1
    sums = (
        library.lib().tw_checksum(start, hole, 0),
        library.lib().tw_checksum(start + 4 * behind, words.numel() - behind, hole),
    )
    return torch.tensor(sum(sums) & 0xFFFFFFFF, dtype=torch.int64)
