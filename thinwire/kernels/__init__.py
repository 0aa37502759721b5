"""The one dispatch point for array work; every caller imports its kernels from here.

``reference`` is plain torch and the specification: it runs on every device torch runs on.
"""

from thinwire.kernels.reference import (
    Runs,
    absmax,
    block_expand,
    block_means,
    blockwise_sign,
    checksum,
    coin,
    int8_dequantize,
    int8_quantize,
    pack_bits,
    pack_trits,
    pack_uints,
    rice_decode,
    rice_encode,
    rice_unary_bits,
    select_sampled,
    select_topk,
    stream_key,
    ternarize,
    uniform,
    unpack_bits,
    unpack_trits,
    unpack_uints,
)

__all__ = [
    "Runs",
    "absmax",
    "block_expand",
    "block_means",
    "blockwise_sign",
    "checksum",
    "coin",
    "describe",
    "int8_dequantize",
    "int8_quantize",
    "pack_bits",
    "pack_trits",
    "pack_uints",
    "rice_decode",
    "rice_encode",
    "rice_unary_bits",
    "select_sampled",
    "select_topk",
    "stream_key",
    "ternarize",
    "uniform",
    "unpack_bits",
    "unpack_trits",
    "unpack_uints",
]


def describe() -> str:
    """Return one line that says which kernels are in use and why."""
    return "reference (plain torch, on every device)"
