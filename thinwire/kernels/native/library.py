"""The native library: found, loaded, and given what it reads.

It takes plain pointers, so it fits every torch version. A call releases the interpreter lock.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.kernels.reference import Runs

I64, I32, U32, F32, _PTR = ctypes.c_int64, ctypes.c_int, ctypes.c_uint32, ctypes.c_float, ctypes.c_void_p

_ABI = 4  # tw_abi(): a library that was built before its functions changed would be called with wrong arguments

_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "tw_accumulate": (I64, [I64] + [_PTR] * 13 + [I64, _PTR, I64, I32]),
    "tw_first_nonfinite": (I64, [I64, _PTR, _PTR, F32, I32]),
    "tw_select_scopes": (None, [_PTR, I64, _PTR, _PTR, _PTR, I64, _PTR, I64, _PTR, _PTR, _PTR, I32]),
    "tw_select_chunks": (None, [_PTR, I64, _PTR, I64, I64, _PTR, _PTR, I32]),
    "tw_subtract_at": (None, [_PTR, _PTR, _PTR, I64]),
    "tw_union_add": (I64, [_PTR, _PTR, I64, _PTR, _PTR, I64, _PTR, _PTR]),
    "tw_zero_at": (None, [_PTR, _PTR, I64]),
    "tw_take_at": (None, [_PTR, _PTR, I64, _PTR]),
    "tw_merge_topk": (I64, [_PTR, _PTR, I64, _PTR, _PTR, I64, I64, _PTR, _PTR, _PTR]),
    "tw_keep_largest": (None, [_PTR, _PTR, I64, I64, _PTR, _PTR]),
    "tw_keep_masked": (I64, [_PTR, _PTR, _PTR, I64, _PTR, _PTR]),
    "tw_mask_contained": (None, [_PTR, I64, _PTR, I64, _PTR]),
    "tw_error_step": (None, [I64] + [_PTR] * 10 + [I32]),
    "tw_scatter_add": (None, [I64, _PTR, _PTR, _PTR, I64, _PTR, _PTR, _PTR, F32, I32]),
    "tw_select_topk": (None, [_PTR, I64, I64, _PTR, I64, _PTR, _PTR, I32]),
    "tw_moments": (None, [I64] + [_PTR] * 4 + [I32]),
    "tw_ternarize_packed": (None, [I64] + [_PTR] * 7 + [I32]),
    "tw_blockwise_sign": (None, [_PTR, I64, _PTR, _PTR, _PTR, _PTR, I32]),
    "tw_add_signs": (None, [_PTR, _PTR, _PTR, I64, _PTR, _PTR, F32, I32]),
    "tw_pack_signs": (None, [I64] + [_PTR] * 3 + [I32]),
    "tw_subtract_own_signs": (None, [_PTR, _PTR, I64, _PTR, _PTR, I32]),
    "tw_add_mean_of_signs": (None, [_PTR, I64, _PTR, _PTR, I64, _PTR, _PTR, I32]),
    "tw_write_signs": (None, [I64] + [_PTR] * 4 + [I64, _PTR, _PTR, I32]),
    "tw_sum_trits": (None, [I64, _PTR, I64, I32, _PTR, I32]),
    "tw_write_levels": (I32, [I64] + [_PTR] * 4 + [I32, I64, I32]),
    "tw_int8_quantize": (None, [_PTR, I64, _PTR, _PTR]),
    "tw_int8_dequantize": (None, [_PTR, _PTR, I64, _PTR]),
    "tw_two_bit_encode": (None, [_PTR, I64, _PTR, _PTR]),
    "tw_two_bit_decode": (None, [_PTR, _PTR, I64, _PTR]),
    "tw_checksum": (U32, [_PTR, I64, U32]),
    "tw_pack_bits": (None, [_PTR, I64, _PTR, I32]),
    "tw_unpack_bits": (None, [_PTR, I64, _PTR, I32]),
    "tw_pack_trits": (None, [_PTR, I64, _PTR, I32]),
    "tw_unpack_trits": (None, [_PTR, I64, _PTR, I32]),
    "tw_rice_unary_bits_of": (None, [_PTR, I64, I32, I32, _PTR]),
    "tw_rice_encode_of": (None, [_PTR, I64, I32, _PTR, _PTR]),
    "tw_rice_indices": (None, [I64] + [_PTR] * 6 + [I64, _PTR, I32, _PTR, I32]),
    "tw_abi": (I32, []),
    "tw_vectors": (ctypes.c_char_p, []),
}


_PATH = Path(__file__).parent.with_name("_native.so")


def load(path: Path) -> ctypes.CDLL | str:
    """Load a native library; return why not where that fails."""
    if not path.exists():
        return "the native library was not built (no C++ compiler?)"
    try:
        loaded = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(loaded, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as problem:  # AttributeError: a library of another version lacks a function
        return f"the native library could not be loaded: {problem}"
    if loaded.tw_abi() != _ABI:
        return f"the native library {path} was built from other sources; reinstall thinwire"
    return loaded


@lru_cache(maxsize=1)
def _loaded() -> ctypes.CDLL | str:
    return load(_PATH)


@lru_cache(maxsize=1)
def handle() -> ctypes.CDLL | None:
    """The library, loaded; None where it is not there, and then ``why_not`` says why."""
    loaded = _loaded()
    return None if isinstance(loaded, str) else loaded


def why_not() -> str | None:
    loaded = _loaded()
    return loaded if isinstance(loaded, str) else None


def vectors() -> str:
    """Which version of its hot loops the library runs on this machine: AVX-512, AVX2 or portable."""
    return str(lib().tw_vectors().decode())


def lib() -> ctypes.CDLL:
    loaded = handle()
    assert loaded is not None, "dispatch only comes here when the library is there"
    return loaded


def threads() -> int:
    return torch.get_num_threads()


def ready(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous tensor of the dtype that the library reads."""
    return x.contiguous() if x.dtype == dtype else x.to(dtype).contiguous()


def narrow(indices: Tensor) -> Tensor:  # -> the same 32 bits an index, as the library reads them
    """Indices below 2**32 as int32, from 2**31 on with the sign bit set."""
    return indices.to(torch.int32).contiguous()


def widened(indices: Tensor, like: Tensor) -> Tensor:
    """What the library wrote, as int64 where ``like`` is."""
    return indices if like.dtype == torch.int32 else indices.to(torch.int64) & 0xFFFFFFFF


def int64s(numbers: Sequence[int]) -> Any:
    return (I64 * len(numbers))(*numbers)


def floats(numbers: Sequence[float]) -> Any:
    return (F32 * len(numbers))(*numbers)


def pointers(parts: Sequence[Tensor]) -> tuple[Any, Any]:
    """Addresses and lengths of contiguous vectors, as the library reads them."""
    return int64s([part.data_ptr() for part in parts]), int64s([part.numel() for part in parts])


@lru_cache(maxsize=256)
def run_table(runs: Runs) -> tuple[int, Any, Any]:
    """How many runs, their lengths and their counts, as the library reads them."""
    return len(runs), int64s([length for length, _ in runs]), int64s([count for _, count in runs])
