"""Plain-torch kernels: the specification that every faster home of the same names must equal.

All of them are pure functions, keep to the device of their input, never touch torch's global random state, and put the
least significant bit first.
"""

from __future__ import annotations

from thinwire.kernels.reference.counters import (
    checksum,
    checksum_around,
    coins,
    stream_key,
    stream_salt,
    uniform,
)
from thinwire.kernels.reference.entries import (
    contained,
    remaining,
    scatter_add,
    subtract_at,
    union_add,
    zero_at,
)
from thinwire.kernels.reference.packing import (
    pack_bits,
    pack_trits,
    pack_uints,
    unpack_bits,
    unpack_trits,
    unpack_uints,
)
from thinwire.kernels.reference.quantization import (
    INT8_CHUNK,
    ROUNDING,
    Runs,
    add_signs,
    block_expand,
    block_means,
    blockwise_sign,
    clipped_scalers,
    int8_dequantize,
    int8_quantize,
    moments,
    scalers_of,
    ternarize,
    ternarize_packed,
)
from thinwire.kernels.reference.rice import (
    RICE_COUNT,
    RICE_GAP,
    RICE_OUTSIDE,
    RICE_REST,
    RiceStream,
    checked_indices,
    rice_decode,
    rice_encode,
    rice_indices,
    rice_unary_bits,
)
from thinwire.kernels.reference.segments import (
    Segments,
    accumulate,
    error_step,
    first_nonfinite,
    rescale,
    watch,
)
from thinwire.kernels.reference.selection import (
    select_among,
    select_sampled,
    select_scopes,
    select_topk,
)

__all__ = [
    "INT8_CHUNK",
    "RICE_COUNT",
    "RICE_GAP",
    "RICE_OUTSIDE",
    "RICE_REST",
    "ROUNDING",
    "RiceStream",
    "Runs",
    "Segments",
    "accumulate",
    "add_signs",
    "block_expand",
    "block_means",
    "blockwise_sign",
    "checked_indices",
    "checksum",
    "checksum_around",
    "clipped_scalers",
    "coins",
    "contained",
    "error_step",
    "first_nonfinite",
    "int8_dequantize",
    "int8_quantize",
    "moments",
    "pack_bits",
    "pack_trits",
    "pack_uints",
    "remaining",
    "rescale",
    "rice_decode",
    "rice_encode",
    "rice_indices",
    "rice_unary_bits",
    "scalers_of",
    "scatter_add",
    "select_among",
    "select_sampled",
    "select_scopes",
    "select_topk",
    "stream_key",
    "stream_salt",
    "subtract_at",
    "ternarize",
    "ternarize_packed",
    "uniform",
    "union_add",
    "unpack_bits",
    "unpack_trits",
    "unpack_uints",
    "watch",
    "zero_at",
]
