"""Native kernels for tensors on the host, from one small C++ library; a module each for those of ``reference``.

Integers and bytes are the reference's exactly, floats to rounding. Indices are 32 bits in the library: int64 are
converted, int32 are answered in int32, and so is what goes into memory that was offered.

``__all__`` names the operations; a call for any other is the reference's.
"""

from __future__ import annotations

from thinwire.kernels.native.counters import checksum, checksum_around
from thinwire.kernels.native.entries import (
    keep_largest,
    keep_masked,
    mask_contained,
    merge_topk,
    scatter_add,
    subtract_at,
    take_at,
    union_add,
    zero_at,
)
from thinwire.kernels.native.packing import pack_bits, pack_trits, unpack_bits, unpack_trits
from thinwire.kernels.native.quantization import (
    add_signs,
    blockwise_sign,
    clipped_scalers,
    int8_dequantize,
    int8_quantize,
    ternarize_packed,
)
from thinwire.kernels.native.rice import rice_indices, rice_unary_bits_of, rice_write
from thinwire.kernels.native.segments import accumulate, error_step, first_nonfinite
from thinwire.kernels.native.selection import listing_entries, select_chunks, select_scopes, select_topk
from thinwire.kernels.native.serving import (
    add_mean_of_signs,
    pack_signs,
    sign_scales,
    subtract_own_signs,
    sum_trits,
    write_levels,
    write_signs,
)
from thinwire.kernels.native.two_bits import two_bit_decode, two_bit_encode

__all__ = [
    "accumulate",
    "add_mean_of_signs",
    "add_signs",
    "blockwise_sign",
    "checksum",
    "checksum_around",
    "clipped_scalers",
    "error_step",
    "first_nonfinite",
    "int8_dequantize",
    "int8_quantize",
    "keep_largest",
    "keep_masked",
    "listing_entries",
    "mask_contained",
    "merge_topk",
    "pack_bits",
    "pack_signs",
    "pack_trits",
    "rice_indices",
    "rice_unary_bits_of",
    "rice_write",
    "scatter_add",
    "select_chunks",
    "select_scopes",
    "select_topk",
    "sign_scales",
    "subtract_at",
    "subtract_own_signs",
    "sum_trits",
    "take_at",
    "ternarize_packed",
    "two_bit_decode",
    "two_bit_encode",
    "union_add",
    "unpack_bits",
    "unpack_trits",
    "write_levels",
    "write_signs",
    "zero_at",
]
