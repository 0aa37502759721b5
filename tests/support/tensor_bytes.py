"""Tensors as bytes, and bytes as tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def to_bytes(tensor: Tensor) -> bytes:
    """The memory of a tensor, whatever its type."""
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())


def to_tensor(data: bytes) -> Tensor:  # -> (nbytes,) uint8
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)
