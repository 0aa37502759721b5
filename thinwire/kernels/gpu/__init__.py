"""Triton kernels for CUDA tensors: the reference's work in a few passes over memory, and no wait for the device.

Everything that is selected, coded and summed here equals the reference: integers and bytes exactly, floats to rounding.
What a function of the reference returns in a length that depends on the data is kept here in buffers of fixed length
instead, because only the device knows that length.

``__all__`` names the operations; a call for any other is the reference's.
"""

from __future__ import annotations

from thinwire.kernels.gpu.blocksign import add_mean_of_signs, add_signs, blockwise_sign, error_step, watch
from thinwire.kernels.gpu.chunks import select_chunks
from thinwire.kernels.gpu.search import accumulate, device_topk
from thinwire.kernels.gpu.sparse_frames import checksum, checksum_around, encode_rice_frame
from thinwire.kernels.gpu.ternary import clipped_scalers, encode_ternary_frame, ternarize_packed
from thinwire.kernels.gpu.two_bits import two_bit_decode, two_bit_encode
from thinwire.kernels.gpu.unpack import (
    frame_heads,
    launch_rice_indices,
    rice_indices,
    scatter_add,
    subtract_at,
    zero_at,
)

__all__ = [
    "accumulate",
    "add_mean_of_signs",
    "add_signs",
    "blockwise_sign",
    "checksum",
    "checksum_around",
    "clipped_scalers",
    "device_topk",
    "encode_rice_frame",
    "encode_ternary_frame",
    "error_step",
    "frame_heads",
    "launch_rice_indices",
    "rice_indices",
    "scatter_add",
    "select_chunks",
    "subtract_at",
    "ternarize_packed",
    "two_bit_decode",
    "two_bit_encode",
    "watch",
    "zero_at",
]
