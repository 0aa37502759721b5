"""Bits, trits and small integers in bytes, the least significant first."""

from __future__ import annotations

import torch
from torch import Tensor

_BIT_WEIGHTS = [1, 2, 4, 8, 16, 32, 64, 128]
_TRIT_WEIGHTS = [1, 3, 9, 27, 81]


def pack_bits(bits: Tensor) -> Tensor:  # (n,) bool -> (ceil(n/8),) uint8
    """Pack eight bits per byte, the first in the lowest place."""
    nbytes = -(-bits.numel() // 8)
    padded = torch.nn.functional.pad(bits.to(torch.uint8), (0, nbytes * 8 - bits.numel())).view(nbytes, 8)
    packed = padded[:, 0].clone()
    for place in range(1, 8):
        packed |= padded[:, place] << place
    return packed


def unpack_bits(packed: Tensor, count: int) -> Tensor:  # (>= ceil(count/8),) uint8 -> (count,) bool
    """Undo pack_bits."""
    nbytes = -(-count // 8)
    weights = torch.tensor(_BIT_WEIGHTS, dtype=torch.uint8, device=packed.device)
    return (packed[:nbytes, None] & weights).ne(0).flatten()[:count]


def pack_trits(trits: Tensor) -> Tensor:  # (n,) int8 in {-1, 0, 1} -> (ceil(n/5),) uint8
    """Pack five trits per byte in base 3 (3**5 = 243), the first in the lowest place; a trit travels as trit + 1."""
    nbytes = -(-trits.numel() // 5)
    padded = torch.nn.functional.pad((trits + 1).to(torch.uint8), (0, nbytes * 5 - trits.numel())).view(nbytes, 5)
    packed = padded[:, 0].clone()
    for place in range(1, 5):
        packed += padded[:, place] * _TRIT_WEIGHTS[place]
    return packed


def unpack_trits(packed: Tensor, count: int) -> Tensor:  # (>= ceil(count/5),) uint8 < 243 -> (count,) int8
    """Undo pack_trits."""
    nbytes = -(-count // 5)
    weights = torch.tensor(_TRIT_WEIGHTS, dtype=torch.uint8, device=packed.device)
    digits = torch.div(packed[:nbytes, None], weights, rounding_mode="floor") % 3
    return digits.flatten()[:count].to(torch.int8) - 1


def pack_uints(values: Tensor, bits: int) -> Tensor:  # (n,) int64 in [0, 2**bits) -> (ceil(n*bits/8),) uint8
    """Pack ``bits`` bits a number, lowest bit first, with no gaps."""
    if bits == 0:
        return torch.zeros(0, dtype=torch.uint8, device=values.device)
    places = torch.arange(bits, dtype=torch.int64, device=values.device)
    return pack_bits(((values[:, None] >> places) & 1).to(torch.bool).flatten())


def unpack_uints(packed: Tensor, count: int, bits: int) -> Tensor:  # uint8 -> (count,) int64
    """Undo pack_uints."""
    if bits == 0:
        return torch.zeros(count, dtype=torch.int64, device=packed.device)
    places = torch.arange(bits, dtype=torch.int64, device=packed.device)
    return (unpack_bits(packed, count * bits).view(count, bits).to(torch.int64) << places).sum(dim=1)
