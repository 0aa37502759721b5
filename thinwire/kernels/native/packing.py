"""Bits and trits in bytes, natively."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels.native import library
from thinwire.kernels.native.library import ready


def pack_bits(bits: Tensor) -> Tensor:
    bits = ready(bits, torch.bool)
    out = torch.empty(-(-bits.numel() // 8), dtype=torch.uint8)
    library.lib().tw_pack_bits(bits.data_ptr(), bits.numel(), out.data_ptr(), library.threads())
    return out


def unpack_bits(packed: Tensor, count: int) -> Tensor:
    packed, out = packed.contiguous(), torch.empty(count, dtype=torch.bool)
    library.lib().tw_unpack_bits(packed.data_ptr(), count, out.data_ptr(), library.threads())
    return out


def pack_trits(trits: Tensor) -> Tensor:
    trits, out = trits.contiguous(), torch.empty(-(-trits.numel() // 5), dtype=torch.uint8)
    library.lib().tw_pack_trits(trits.data_ptr(), trits.numel(), out.data_ptr(), library.threads())
    return out


def unpack_trits(packed: Tensor, count: int) -> Tensor:
    packed, out = packed.contiguous(), torch.empty(count, dtype=torch.int8)
    library.lib().tw_unpack_trits(packed.data_ptr(), count, out.data_ptr(), library.threads())
    return out
