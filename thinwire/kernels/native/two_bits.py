"""Values in two bits, natively."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels.native import library
from thinwire.kernels.native.library import ready
from thinwire.kernels.reference import INT2_CHUNK


def two_bit_encode(values: Tensor) -> tuple[Tensor, Tensor]:
    values, count = ready(values, torch.float32), values.numel()
    levels = torch.empty(-(-count // INT2_CHUNK), 2, dtype=torch.bfloat16)
    packed = torch.empty(-(-count // 4), dtype=torch.uint8)
    library.lib().tw_two_bit_encode(values.data_ptr(), count, levels.data_ptr(), packed.data_ptr())
    return levels, packed


def two_bit_decode(levels: Tensor, packed: Tensor, count: int) -> Tensor:
    levels, packed = ready(levels, torch.bfloat16), ready(packed, torch.uint8)
    assert count <= INT2_CHUNK * levels.shape[0] and count <= 4 * packed.numel()
    out = torch.empty(count, dtype=torch.float32)
    library.lib().tw_two_bit_decode(levels.data_ptr(), packed.data_ptr(), count, out.data_ptr())
    return out
