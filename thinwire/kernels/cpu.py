"""Native CPU kernels: the reference's functions under the same names, and the fused steps, from one small C library.

The library takes plain pointers, so it fits every torch version. A call releases the interpreter lock. Every function
here expects contiguous host tensors and gives the reference's integers and bytes exactly, and its floats to rounding.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from thinwire.kernels.reference import RiceStream, Runs, Segments

_I64, _I32, _U32, _F32, _PTR = ctypes.c_int64, ctypes.c_int, ctypes.c_uint32, ctypes.c_float, ctypes.c_void_p

_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "tw_accumulate": (_I64, [_I64] + [_PTR] * 11 + [_I64, _I32]),
    "tw_all_finite": (_I32, [_PTR, _I64, _I32]),
    "tw_error_step": (None, [_I64] + [_PTR] * 10 + [_I32]),
    "tw_scatter_add": (None, [_I64, _PTR, _PTR, _PTR, _I64, _PTR, _PTR, _PTR, _F32, _I32]),
    "tw_select_among": (_I64, [_PTR, _PTR, _I64, _I64, _PTR, _PTR]),
    "tw_select_topk": (None, [_PTR, _I64, _I64, _PTR, _PTR, _I32]),
    "tw_moments": (None, [_I64] + [_PTR] * 4 + [_I32]),
    "tw_ternarize_packed": (None, [_I64] + [_PTR] * 6 + [_I32]),
    "tw_gather_trits": (None, [_PTR, _I64, _PTR, _PTR, _PTR, _I32]),
    "tw_blockwise_sign": (None, [_PTR, _I64, _PTR, _PTR, _PTR, _PTR, _I32]),
    "tw_add_signs": (None, [_PTR, _PTR, _PTR, _I64, _PTR, _PTR, _F32, _I32]),
    "tw_checksum": (_U32, [_PTR, _I64, _U32]),
    "tw_pack_bits": (None, [_PTR, _I64, _PTR, _I32]),
    "tw_unpack_bits": (None, [_PTR, _I64, _PTR, _I32]),
    "tw_pack_trits": (None, [_PTR, _I64, _PTR, _I32]),
    "tw_unpack_trits": (None, [_PTR, _I64, _PTR, _I32]),
    "tw_pack_uints": (None, [_PTR, _I64, _I32, _PTR]),
    "tw_unpack_uints": (None, [_PTR, _I64, _I64, _I32, _PTR]),
    "tw_rice_unary_bits": (None, [_PTR, _I64, _I32, _I32, _PTR]),
    "tw_rice_encode": (None, [_PTR, _I64, _I32, _PTR, _PTR]),
    "tw_rice_indices": (None, [_I64] + [_PTR] * 6 + [_I64, _PTR, _PTR, _I32]),
    "tw_vectors": (ctypes.c_char_p, []),
    "tw_rice_decode": (_I64, [_PTR, _I64, _PTR, _I64, _I64, _I32, _PTR]),
}


_PATH = Path(__file__).with_name("_native.so")


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
    return loaded


@lru_cache(maxsize=1)
def _loaded() -> ctypes.CDLL | str:
    return load(_PATH)


def library() -> ctypes.CDLL | None:
    """The native library; None where it is not there, and then ``why_not`` says why."""
    loaded = _loaded()
    return None if isinstance(loaded, str) else loaded


def why_not() -> str | None:
    loaded = _loaded()
    return loaded if isinstance(loaded, str) else None


def vectors() -> str:
    """Which version of its hot loops the library runs on this machine: AVX-512, AVX2 or portable."""
    return str(_lib().tw_vectors().decode())


def _lib() -> ctypes.CDLL:
    loaded = library()
    assert loaded is not None, "the dispatch point only comes here when the library is there"
    return loaded


def _threads() -> int:
    return torch.get_num_threads()


def _ready(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous tensor of the dtype that the library reads."""
    return x.contiguous() if x.dtype == dtype else x.to(dtype).contiguous()


@lru_cache(maxsize=256)
def _run_tables(runs: Runs) -> tuple[Tensor, Tensor]:
    table = torch.tensor(runs, dtype=torch.int64).view(-1, 2)
    return table[:, 0].contiguous(), table[:, 1].contiguous()


def _pointers(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Addresses and lengths of contiguous vectors, as the library reads them."""
    return (
        torch.tensor([part.data_ptr() for part in parts], dtype=torch.int64),
        torch.tensor([part.numel() for part in parts], dtype=torch.int64),
    )


# ------------------------------------------------------------------------------------------------------- selection


def select_topk(x: Tensor, k: int) -> Tensor:  # (n,) float32 -> (k,) int64, rising
    n = x.numel()
    if k >= n or k == 0:
        return torch.arange(min(k, n))
    x = _ready(x, torch.float32)
    out, smallest = torch.empty(k, dtype=torch.int64), ctypes.c_float()
    _lib().tw_select_topk(x.data_ptr(), n, k, out.data_ptr(), ctypes.byref(smallest), _threads())
    return out


def select_among(x: Tensor, candidates: Tensor, k: int) -> Tensor:  # (n,), (c,) int64 rising -> (min(c, k),) int64
    if k == 0:
        return candidates[:0]
    x, candidates = _ready(x, torch.float32), _ready(candidates, torch.int64)
    out, smallest = torch.empty(min(k, candidates.numel()), dtype=torch.int64), ctypes.c_float()
    _lib().tw_select_among(
        x.data_ptr(), candidates.data_ptr(), candidates.numel(), k, out.data_ptr(), ctypes.byref(smallest)
    )
    return out


def first_nonfinite(parts: Sequence[Tensor]) -> int | None:
    for place, part in enumerate(parts):
        if not _lib().tw_all_finite(_ready(part, torch.float32).data_ptr(), part.numel(), _threads()):
            return place
    return None


def accumulate(
    parts: Sequence[Tensor],
    segments: Segments,
    velocity: Tensor | None,
    residual: Tensor,
    thresholds: Sequence[float] | None,
    capacity: int,
) -> Tensor | None:
    tables = _segment_tables(parts, segments)
    collecting = thresholds is not None
    limits = torch.tensor(thresholds if collecting else [float("inf")] * len(parts), dtype=torch.float32)
    found = torch.empty(capacity if collecting else 0, dtype=torch.int64)
    count = _lib().tw_accumulate(
        len(parts), *(table.data_ptr() for table in tables), limits.data_ptr(),
        velocity.data_ptr() if velocity is not None else None, residual.data_ptr(), found.data_ptr(), found.numel(),
        _threads(),
    )  # fmt: skip
    return found[:count] if collecting and count >= 0 else None


def error_step(
    parts: Sequence[Tensor], segments: Segments, ratios: Sequence[float], velocity: Tensor | None, residual: Tensor
) -> None:
    tables = _segment_tables(parts, segments)
    if velocity is None:
        tables = (*tables[:4], torch.zeros(len(parts)), *tables[5:])
    scale = torch.tensor(ratios, dtype=torch.float32)
    _lib().tw_error_step(
        len(parts), *(table.data_ptr() for table in tables), scale.data_ptr(),
        velocity.data_ptr() if velocity is not None else None, residual.data_ptr(), _threads(),
    )  # fmt: skip


def _segment_tables(parts: Sequence[Tensor], segments: Segments) -> tuple[Tensor, ...]:
    """The rows as the library reads them; parts and weights are contiguous float32 host tensors."""
    assert all(part.dtype == torch.float32 and part.is_contiguous() for part in parts)
    assert all(w is None or (w.dtype == torch.float32 and w.is_contiguous()) for w in segments.weights)
    return (
        torch.tensor([part.data_ptr() for part in parts], dtype=torch.int64),
        torch.tensor([w.data_ptr() if w is not None else 0 for w in segments.weights], dtype=torch.int64),
        torch.tensor([part.numel() for part in parts], dtype=torch.int64),
        torch.tensor(segments.starts, dtype=torch.int64),
        torch.tensor(segments.momentum, dtype=torch.float32),
        torch.tensor(segments.decay, dtype=torch.float32),
        torch.tensor(segments.nesterov, dtype=torch.int32),
    )


def scatter_add(
    parts: Sequence[Tensor], starts: Sequence[int], lists: Sequence[tuple[Tensor, Tensor]], scale: float
) -> None:
    lists = [(_ready(indices, torch.int64), _ready(values, torch.float32)) for indices, values in lists]
    pointers, numels = _pointers(parts)
    places, counts = _pointers([indices for indices, _ in lists])
    values, _ = _pointers([values for _, values in lists])
    offsets = torch.tensor(starts, dtype=torch.int64)
    _lib().tw_scatter_add(
        len(parts), pointers.data_ptr(), numels.data_ptr(), offsets.data_ptr(), len(lists), places.data_ptr(),
        values.data_ptr(), counts.data_ptr(), scale, _threads(),
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------- quantisation


def moments(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:  # -> (T,) float32 both
    parts = [_ready(part, torch.float32) for part in parts]
    deviations, largest = torch.empty(len(parts)), torch.empty(len(parts))
    pointers, numels = _pointers(parts)
    _lib().tw_moments(
        len(parts), pointers.data_ptr(), numels.data_ptr(), deviations.data_ptr(), largest.data_ptr(), _threads()
    )
    return deviations, largest


def ternarize_packed(
    parts: Sequence[Tensor], scales: Tensor, keys: Sequence[int], limits: Tensor | None = None
) -> Tensor:  # T vectors, (T,) float32 -> (ceil(n/5),) uint8
    parts = [_ready(part, torch.float32) for part in parts]
    pointers, numels = _pointers(parts)
    scales = _ready(scales, torch.float32)
    caps = torch.full((len(parts),), float("inf")) if limits is None else _ready(limits, torch.float32)
    streams = torch.tensor(keys, dtype=torch.int64).to(torch.int32)
    out = torch.empty(-(-sum(part.numel() for part in parts) // 5), dtype=torch.uint8)
    _lib().tw_ternarize_packed(
        len(parts), pointers.data_ptr(), numels.data_ptr(), scales.data_ptr(), caps.data_ptr(), streams.data_ptr(),
        out.data_ptr(), _threads(),
    )  # fmt: skip
    return out


def gather_trits(packed: Tensor, spans: Sequence[slice]) -> Tensor:  # uint8 -> uint8
    packed = packed.contiguous()
    starts = torch.tensor([span.start for span in spans], dtype=torch.int64)
    numels = torch.tensor([span.stop - span.start for span in spans], dtype=torch.int64)
    out = torch.empty(-(-int(numels.sum()) // 5), dtype=torch.uint8)
    _lib().tw_gather_trits(
        packed.data_ptr(), len(spans), starts.data_ptr(), numels.data_ptr(), out.data_ptr(), _threads()
    )
    return out


def blockwise_sign(x: Tensor, runs: Runs) -> tuple[Tensor, Tensor]:  # (n,) float32 -> (n,) bool, (B,) float32
    x = _ready(x, torch.float32)
    lengths, counts = _run_tables(runs)
    negative = torch.empty(x.numel(), dtype=torch.bool)
    scales = torch.empty(int(counts.sum()), dtype=torch.float32)
    _lib().tw_blockwise_sign(
        x.data_ptr(), len(runs), lengths.data_ptr(), counts.data_ptr(), negative.data_ptr(), scales.data_ptr(),
        _threads(),
    )  # fmt: skip
    return negative, scales


def add_signs(out: Tensor, negative: Tensor, scales: Tensor, runs: Runs, factor: float) -> None:
    lengths, counts = _run_tables(runs)
    negative, scales = _ready(negative, torch.bool), _ready(scales, torch.float32)
    _lib().tw_add_signs(
        out.data_ptr(), negative.data_ptr(), scales.data_ptr(), len(runs), lengths.data_ptr(), counts.data_ptr(),
        factor, _threads(),
    )  # fmt: skip


def checksum(words: Tensor, start: int = 0) -> Tensor:  # (n,) int32 -> () int64
    words = words.contiguous()
    return torch.tensor(_lib().tw_checksum(words.data_ptr(), words.numel(), start), dtype=torch.int64)


# --------------------------------------------------------------------------------------------------------- packing


def pack_bits(bits: Tensor) -> Tensor:
    bits = _ready(bits, torch.bool)
    out = torch.empty(-(-bits.numel() // 8), dtype=torch.uint8)
    _lib().tw_pack_bits(bits.data_ptr(), bits.numel(), out.data_ptr(), _threads())
    return out


def unpack_bits(packed: Tensor, count: int) -> Tensor:
    packed, out = packed.contiguous(), torch.empty(count, dtype=torch.bool)
    _lib().tw_unpack_bits(packed.data_ptr(), count, out.data_ptr(), _threads())
    return out


def pack_trits(trits: Tensor) -> Tensor:
    trits, out = trits.contiguous(), torch.empty(-(-trits.numel() // 5), dtype=torch.uint8)
    _lib().tw_pack_trits(trits.data_ptr(), trits.numel(), out.data_ptr(), _threads())
    return out


def unpack_trits(packed: Tensor, count: int) -> Tensor:
    packed, out = packed.contiguous(), torch.empty(count, dtype=torch.int8)
    _lib().tw_unpack_trits(packed.data_ptr(), count, out.data_ptr(), _threads())
    return out


def pack_uints(values: Tensor, bits: int) -> Tensor:
    values, out = _ready(values, torch.int64), torch.zeros(-(-values.numel() * bits // 8), dtype=torch.uint8)
    _lib().tw_pack_uints(values.data_ptr(), values.numel(), bits, out.data_ptr())
    return out


def unpack_uints(packed: Tensor, count: int, bits: int) -> Tensor:
    packed, out = packed.contiguous(), torch.empty(count, dtype=torch.int64)
    _lib().tw_unpack_uints(packed.data_ptr(), packed.numel(), count, bits, out.data_ptr())
    return out


def rice_unary_bits(gaps: Tensor, parameter: int) -> int:
    gaps, out = _ready(gaps, torch.int64), ctypes.c_int64()
    _lib().tw_rice_unary_bits(gaps.data_ptr(), gaps.numel(), parameter, 1, ctypes.byref(out))
    return out.value


def rice_encode(gaps: Tensor, parameter: int) -> tuple[Tensor, Tensor]:
    gaps = _ready(gaps, torch.int64)
    low = torch.zeros(-(-gaps.numel() * parameter // 8), dtype=torch.uint8)
    unary = torch.zeros(-(-rice_unary_bits(gaps, parameter) // 8), dtype=torch.uint8)
    _lib().tw_rice_encode(gaps.data_ptr(), gaps.numel(), parameter, low.data_ptr(), unary.data_ptr())
    return low, unary


def rice_decode(low: Tensor, unary: Tensor, count: int, parameter: int) -> Tensor | None:
    low, unary, out = low.contiguous(), unary.contiguous(), torch.empty(count, dtype=torch.int64)
    found = _lib().tw_rice_decode(
        low.data_ptr(), low.numel(), unary.data_ptr(), unary.numel(), count, parameter, out.data_ptr()
    )
    return out if found == count else None


def rice_indices(streams: Sequence[RiceStream], numel: int) -> list[tuple[Tensor, int]]:
    lows, low_nbytes = _pointers([stream.low.contiguous() for stream in streams])
    unaries, unary_nbytes = _pointers([stream.unary.contiguous() for stream in streams])
    indices = [torch.empty(stream.count, dtype=torch.int64) for stream in streams]
    outs, counts = _pointers(indices)
    parameters = torch.tensor([stream.parameter for stream in streams], dtype=torch.int32)
    faults = torch.empty(len(streams), dtype=torch.int32)
    _lib().tw_rice_indices(
        len(streams), lows.data_ptr(), low_nbytes.data_ptr(), unaries.data_ptr(), unary_nbytes.data_ptr(),
        counts.data_ptr(), parameters.data_ptr(), numel, outs.data_ptr(), faults.data_ptr(), _threads(),
    )  # fmt: skip
    return list(zip(indices, faults.tolist(), strict=True))
