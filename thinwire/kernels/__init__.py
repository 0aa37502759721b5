"""Array work: every caller imports its kernels from here, and thinwire.kernels.dispatch finds their backend.

This is the table. A line names an operation by its specification in ``reference``, and the argument whose device
decides which backend does it: what a backend has is in its ``__all__``.
"""

from __future__ import annotations

from thinwire.kernels import backend_only, reference
from thinwire.kernels.dispatch import NATIVE, TRITON, backend_name, describe, on_gpu, only, operation
from thinwire.kernels.reference import (
    FRAME_LIMIT,
    GRADIENT_LIMIT,
    INT2_CHUNK,
    INT4_CHUNK,
    INT8_CHUNK,
    Entries,
    RiceStream,
    Runs,
    Segments,
)

# Gradients and what is kept
accumulate = operation(reference.accumulate, "residual")
error_step = operation(reference.error_step, "residual")
first_nonfinite = operation(reference.first_nonfinite, first_of="parts")
watch = operation(reference.watch, "flag")

# The largest elements
select_chunks = operation(reference.select_chunks, "x")
select_scopes = operation(reference.select_scopes, "x")
select_topk = operation(reference.select_topk, "x")

# Lists of entries
keep_largest = operation(reference.keep_largest, "values")
keep_masked = operation(reference.keep_masked, "values")
mask_contained = operation(reference.mask_contained, "wanted")
merge_topk = operation(reference.merge_topk, "a")
scatter_add = operation(reference.scatter_add, first_of="parts")
subtract_at = operation(reference.subtract_at, "x")
take_at = operation(reference.take_at, "x")
union_add = operation(reference.union_add, "a")
zero_at = operation(reference.zero_at, "x")

# Values in few bits
add_signs = operation(reference.add_signs, "out")
blockwise_sign = operation(reference.blockwise_sign, "x")
clipped_scalers = operation(reference.clipped_scalers, first_of="parts")
int8_dequantize = operation(reference.int8_dequantize, "codes")
int8_quantize = operation(reference.int8_quantize, "values")
ternarize_packed = operation(reference.ternarize_packed, first_of="parts")
two_bit_decode = operation(reference.two_bit_decode, "packed")
two_bit_encode = operation(reference.two_bit_encode, "values")

# What servers do
add_mean_of_signs = operation(reference.add_mean_of_signs, "out")
pack_signs = operation(reference.pack_signs, "out")
sign_scales = operation(reference.sign_scales, "x")
subtract_own_signs = operation(reference.subtract_own_signs, "x")
sum_trits = operation(reference.sum_trits, "out")
write_levels = operation(reference.write_levels, "packed")
write_signs = operation(reference.write_signs, "packed")

# Bytes
checksum = operation(reference.checksum, "words")
checksum_around = operation(reference.checksum_around, "words")
frame_heads = operation(reference.frame_heads, first_of="frames")
launch_rice_indices = operation(reference.launch_rice_indices, first_of="streams")
pack_bits = operation(reference.pack_bits, "bits")
pack_trits = operation(reference.pack_trits, "trits")
rice_indices = operation(reference.rice_indices, first_of="streams")
rice_unary_bits_of = operation(reference.rice_unary_bits_of, "indices")
rice_write = operation(reference.rice_write, "indices")
unpack_bits = operation(reference.unpack_bits, "packed")
unpack_trits = operation(reference.unpack_trits, "packed")

# One backend alone, without a twin
listing_entries = only(NATIVE, backend_only.listing_entries)
device_topk = only(TRITON, backend_only.device_topk)
encode_rice_frame = only(TRITON, backend_only.encode_rice_frame)
encode_ternary_frame = only(TRITON, backend_only.encode_ternary_frame)

# Plain torch on every device
block_expand = reference.block_expand
coins = reference.coins
four_bit_decode = reference.four_bit_decode
four_bit_encode = reference.four_bit_encode
remaining = reference.remaining
select_sampled = reference.select_sampled
stream_key = reference.stream_key
uniform = reference.uniform

__all__ = [
    "FRAME_LIMIT",
    "GRADIENT_LIMIT",
    "INT2_CHUNK",
    "INT4_CHUNK",
    "INT8_CHUNK",
    "Entries",
    "RiceStream",
    "Runs",
    "Segments",
    "accumulate",
    "add_mean_of_signs",
    "add_signs",
    "backend_name",
    "block_expand",
    "blockwise_sign",
    "checksum",
    "checksum_around",
    "clipped_scalers",
    "coins",
    "describe",
    "device_topk",
    "encode_rice_frame",
    "encode_ternary_frame",
    "error_step",
    "first_nonfinite",
    "four_bit_decode",
    "four_bit_encode",
    "frame_heads",
    "int8_dequantize",
    "int8_quantize",
    "keep_largest",
    "keep_masked",
    "launch_rice_indices",
    "listing_entries",
    "mask_contained",
    "merge_topk",
    "on_gpu",
    "pack_bits",
    "pack_signs",
    "pack_trits",
    "remaining",
    "rice_indices",
    "rice_unary_bits_of",
    "rice_write",
    "scatter_add",
    "select_chunks",
    "select_sampled",
    "select_scopes",
    "select_topk",
    "sign_scales",
    "stream_key",
    "subtract_at",
    "subtract_own_signs",
    "sum_trits",
    "take_at",
    "ternarize_packed",
    "two_bit_decode",
    "two_bit_encode",
    "uniform",
    "union_add",
    "unpack_bits",
    "unpack_trits",
    "watch",
    "write_levels",
    "write_signs",
    "zero_at",
]
