"""Native CPU kernels: the reference's functions under the same names, and the fused steps, from one small C library.

The library takes plain pointers, so it fits every torch version. A call releases the interpreter lock. Every function
here expects contiguous host tensors and gives the reference's integers and bytes exactly, and its floats to rounding.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.kernels.reference import RiceStream, Runs, Segments, scalers_of
from thinwire.kernels.reference import watch as watch  # plain torch is fast enough for it

_I64, _I32, _U32, _F32, _PTR = ctypes.c_int64, ctypes.c_int, ctypes.c_uint32, ctypes.c_float, ctypes.c_void_p

_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "tw_accumulate": (_I64, [_I64] + [_PTR] * 11 + [_I64, _PTR, _I64, _I32]),
    "tw_first_nonfinite": (_I64, [_I64, _PTR, _PTR, _I32]),
    "tw_select_scopes": (None, [_PTR, _I64, _PTR, _PTR, _PTR, _I64, _PTR, _I64, _PTR, _PTR, _PTR, _I32]),
    "tw_subtract_at": (None, [_PTR, _PTR, _PTR, _I64]),
    "tw_union_add": (_I64, [_PTR, _PTR, _I64, _PTR, _PTR, _I64, _PTR, _PTR]),
    "tw_zero_at": (None, [_PTR, _PTR, _I64]),
    "tw_take_at": (None, [_PTR, _PTR, _I64, _PTR]),
    "tw_merge_topk": (_I64, [_PTR, _PTR, _I64, _PTR, _PTR, _I64, _I64, _PTR, _PTR, _PTR]),
    "tw_keep_largest": (None, [_PTR, _PTR, _I64, _I64, _PTR, _PTR]),
    "tw_keep_masked": (_I64, [_PTR, _PTR, _PTR, _I64, _PTR, _PTR]),
    "tw_mask_contained": (None, [_PTR, _I64, _PTR, _I64, _PTR]),
    "tw_error_step": (None, [_I64] + [_PTR] * 10 + [_I32]),
    "tw_scatter_add": (None, [_I64, _PTR, _PTR, _PTR, _I64, _PTR, _PTR, _PTR, _F32, _I32]),
    "tw_select_topk": (None, [_PTR, _I64, _I64, _PTR, _I64, _PTR, _PTR, _I32]),
    "tw_moments": (None, [_I64] + [_PTR] * 4 + [_I32]),
    "tw_ternarize_packed": (None, [_I64] + [_PTR] * 7 + [_I32]),
    "tw_blockwise_sign": (None, [_PTR, _I64, _PTR, _PTR, _PTR, _PTR, _I32]),
    "tw_add_signs": (None, [_PTR, _PTR, _PTR, _I64, _PTR, _PTR, _F32, _I32]),
    "tw_pack_signs": (None, [_I64] + [_PTR] * 3 + [_I32]),
    "tw_subtract_own_signs": (None, [_PTR, _PTR, _I64, _PTR, _PTR, _I32]),
    "tw_add_mean_of_signs": (None, [_PTR, _I64, _PTR, _PTR, _I64, _PTR, _PTR, _I32]),
    "tw_write_signs": (None, [_I64] + [_PTR] * 4 + [_I64, _PTR, _PTR, _I32]),
    "tw_sum_trits": (None, [_I64, _PTR, _I64, _I32, _PTR, _I32]),
    "tw_write_levels": (_I32, [_I64] + [_PTR] * 4 + [_I32, _I64, _I32]),
    "tw_int8_quantize": (None, [_PTR, _I64, _PTR, _PTR]),
    "tw_int8_dequantize": (None, [_PTR, _PTR, _I64, _PTR]),
    "tw_checksum": (_U32, [_PTR, _I64, _U32]),
    "tw_pack_bits": (None, [_PTR, _I64, _PTR, _I32]),
    "tw_unpack_bits": (None, [_PTR, _I64, _PTR, _I32]),
    "tw_pack_trits": (None, [_PTR, _I64, _PTR, _I32]),
    "tw_unpack_trits": (None, [_PTR, _I64, _PTR, _I32]),
    "tw_rice_unary_bits_of": (None, [_PTR, _I64, _I32, _I32, _PTR]),
    "tw_rice_encode_of": (None, [_PTR, _I64, _I32, _PTR, _PTR]),
    "tw_rice_indices": (None, [_I64] + [_PTR] * 6 + [_I64, _PTR, _I32, _PTR, _I32]),
    "tw_vectors": (ctypes.c_char_p, []),
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


def narrow(indices: Tensor) -> Tensor:  # -> the same 32 bits an index, as the library reads them
    """Indices below 2**32 as int32, from 2**31 on with the sign bit set."""
    return indices.to(torch.int32).contiguous()


def widened(indices: Tensor, like: Tensor) -> Tensor:
    """What the library wrote, as int64 where ``like`` is."""
    return indices if like.dtype == torch.int32 else indices.to(torch.int64) & 0xFFFFFFFF


def listing_entries(capacity: int) -> int:
    """How long the memory must be in which ``accumulate`` lists so many places: each thread fills blocks of its own."""
    return capacity + 256 * (_threads() + 1)


@lru_cache(maxsize=256)
def _run_tables(runs: Runs) -> tuple[Tensor, Tensor]:
    table = torch.tensor(runs, dtype=torch.int64).view(-1, 2)
    return table[:, 0].contiguous(), table[:, 1].contiguous()


def _int64s(numbers: Sequence[int]) -> Any:
    return (_I64 * len(numbers))(*numbers)


def _floats(numbers: Sequence[float]) -> Any:
    return (_F32 * len(numbers))(*numbers)


def _pointers(parts: Sequence[Tensor]) -> tuple[Any, Any]:
    """Addresses and lengths of contiguous vectors, as the library reads them."""
    return _int64s([part.data_ptr() for part in parts]), _int64s([part.numel() for part in parts])


# ------------------------------------------------------------------------------------------------------- selection


def select_topk(x: Tensor, k: int) -> Tensor:  # (n,) float32 -> (k,) int64, rising
    n = x.numel()
    if k >= n or k == 0:
        return torch.arange(min(k, n))
    x = _ready(x, torch.float32)
    scratch = torch.empty(_search_entries(k), dtype=torch.int32)
    out, smallest = torch.empty(k, dtype=torch.int32), ctypes.c_float()
    _lib().tw_select_topk(
        x.data_ptr(), n, k, scratch.data_ptr(), scratch.numel(), out.data_ptr(), ctypes.byref(smallest), _threads()
    )
    return out.to(torch.int64) & 0xFFFFFFFF


def _search_entries(k: int) -> int:
    """Memory in which a search of a whole vector is fast: twice for a few more than k."""
    return 2 * listing_entries(2 * k + 4096)


def first_nonfinite(parts: Sequence[Tensor]) -> int | None:
    parts = [_ready(part, torch.float32) for part in parts]
    place: int = _lib().tw_first_nonfinite(len(parts), *_pointers(parts), _threads())
    return None if place < 0 else place


def select_scopes(
    x: Tensor,
    bounds: Sequence[int],
    ks: Sequence[int],
    candidates: Tensor | None,
    out: Tensor | None = None,
    scratch: Tensor | None = None,
) -> tuple[Tensor, list[int], Tensor]:
    """Indices are int32 where they are to lie in ``out``; ``scratch``, int32, has an entry a candidate at least."""
    x, scopes = _ready(x, torch.float32), len(ks)
    chosen = sum(min(k, bounds[place + 1] - bounds[place]) for place, k in enumerate(ks))
    listed = narrow(candidates) if candidates is not None else None
    if scratch is None:
        entries = max(_search_entries(max(ks, default=0)), listed.numel() if listed is not None else 0)
        scratch = torch.empty(entries, dtype=torch.int32)
    indices = out if out is not None else torch.empty(chosen, dtype=torch.int32)
    assert indices.numel() == chosen and (listed is None or scratch.numel() >= listed.numel())
    passed, smallest = (_I64 * scopes)(), torch.empty(scopes)
    _lib().tw_select_scopes(
        x.data_ptr(), scopes, _int64s(bounds), _int64s(ks),
        # An empty tensor has no address, but an empty list of candidates is one.
        None if listed is None else listed.data_ptr() or scratch.data_ptr(),
        listed.numel() if listed is not None else 0, scratch.data_ptr(), scratch.numel(), indices.data_ptr(), passed,
        smallest.data_ptr(), _threads(),
    )  # fmt: skip
    return indices if out is not None else indices.to(torch.int64) & 0xFFFFFFFF, list(passed), smallest


def subtract_at(x: Tensor, indices: Tensor, values: Tensor) -> None:
    assert x.dtype == torch.float32 and x.is_contiguous()
    indices, values = narrow(indices), _ready(values, torch.float32)
    _lib().tw_subtract_at(x.data_ptr(), indices.data_ptr(), values.data_ptr(), indices.numel())


def zero_at(x: Tensor, indices: Tensor) -> None:
    assert x.dtype == torch.float32 and x.is_contiguous()
    indices = narrow(indices)
    _lib().tw_zero_at(x.data_ptr(), indices.data_ptr(), indices.numel())


def union_add(a: Tensor, a_values: Tensor, b: Tensor, b_values: Tensor) -> tuple[Tensor, Tensor]:
    like, a, b = a, narrow(a), narrow(b)
    a_values, b_values = _ready(a_values, torch.float32), _ready(b_values, torch.float32)
    indices, values = torch.empty(a.numel() + b.numel(), dtype=torch.int32), torch.empty(a.numel() + b.numel())
    count = _lib().tw_union_add(
        a.data_ptr(), a_values.data_ptr(), a.numel(), b.data_ptr(), b_values.data_ptr(), b.numel(), indices.data_ptr(),
        values.data_ptr(),
    )  # fmt: skip
    return widened(indices[:count], like), values[:count]


def accumulate(
    parts: Sequence[Tensor],
    segments: Segments,
    velocity: Tensor | None,
    residual: Tensor,
    thresholds: Sequence[float] | None,
    capacity: int,
    flag: Tensor | None = None,
    room: tuple[Tensor, Tensor] | None = None,
) -> Tensor | None:
    """With ``room``, the places are int32 and lie in the second tensor; the first, longer by ``listing_entries``, is
    used on the way and free afterwards."""
    assert flag is None, "host gradients are looked at before"
    tables = _segment_tables(parts, segments)
    collecting = thresholds is not None
    limits = _floats(thresholds if thresholds is not None else [float("inf")] * len(parts))
    if room is not None:
        listing, found = room
        capacity = min(capacity, found.numel())
    else:
        entries = listing_entries(capacity) if collecting else 0
        listing, found = torch.empty(entries + (capacity if collecting else 0), dtype=torch.int32).split(
            [entries, capacity if collecting else 0]
        )
    count = _lib().tw_accumulate(
        len(parts), *tables, limits,
        velocity.data_ptr() if velocity is not None else None, residual.data_ptr(), listing.data_ptr(),
        listing.numel() if collecting else 0, found.data_ptr(), capacity if collecting else 0, _threads(),
    )  # fmt: skip
    if not collecting or count < 0:
        return None
    return found[:count] if room is not None else found[:count].to(torch.int64) & 0xFFFFFFFF


def error_step(
    parts: Sequence[Tensor], segments: Segments, ratios: Sequence[float], velocity: Tensor | None, residual: Tensor,
    flag: Tensor | None = None,
) -> None:  # fmt: skip
    assert flag is None, "host gradients are looked at before"
    tables = _segment_tables(parts, segments)
    if velocity is None:
        tables = (*tables[:4], _floats([0.0] * len(parts)), *tables[5:])
    _lib().tw_error_step(
        len(parts), *tables, _floats(ratios),
        velocity.data_ptr() if velocity is not None else None, residual.data_ptr(), _threads(),
    )  # fmt: skip


def _segment_tables(parts: Sequence[Tensor], segments: Segments) -> tuple[Any, ...]:
    """The rows as the library reads them; parts and weights are contiguous float32 host tensors."""
    assert all(part.dtype == torch.float32 and part.is_contiguous() for part in parts)
    assert all(w is None or (w.dtype == torch.float32 and w.is_contiguous()) for w in segments.weights)
    grads, numels = _pointers(parts)
    return (
        grads,
        _int64s([w.data_ptr() if w is not None else 0 for w in segments.weights]),
        numels,
        _int64s(segments.starts),
        _floats(segments.momentum),
        _floats(segments.decay),
        (_I32 * len(parts))(*segments.nesterov),
    )


def scatter_add(
    parts: Sequence[Tensor], starts: Sequence[int], lists: Sequence[tuple[Tensor, Tensor]], scale: float
) -> None:
    lists = [(narrow(indices), _ready(values, torch.float32)) for indices, values in lists]
    pointers, numels = _pointers(parts)
    places, counts = _pointers([indices for indices, _ in lists])
    values, _ = _pointers([values for _, values in lists])
    _lib().tw_scatter_add(
        len(parts), pointers, numels, _int64s(starts), len(lists), places, values, counts, scale, _threads()
    )


# ---------------------------------------------------------------------------------------------------- quantisation


def moments(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:  # -> (T,) float32 both
    parts = [_ready(part, torch.float32) for part in parts]
    deviations, largest = torch.empty(len(parts)), torch.empty(len(parts))
    _lib().tw_moments(len(parts), *_pointers(parts), deviations.data_ptr(), largest.data_ptr(), _threads())
    return deviations, largest


def clipped_scalers(parts: Sequence[Tensor], clip_sigma: float | None) -> tuple[Tensor, Tensor | None]:
    return scalers_of(*moments(parts), clip_sigma)


def ternarize_packed(
    parts: Sequence[Tensor],
    scales: Tensor,
    keys: Sequence[int],
    limits: Tensor | None = None,
    counters: Sequence[int] | None = None,
    out: Tensor | None = None,
) -> Tensor:  # T vectors, (T,) float32 -> (ceil(n/5),) uint8
    parts = [_ready(part, torch.float32) for part in parts]
    scales = _ready(scales, torch.float32)
    caps = torch.full((len(parts),), float("inf")) if limits is None else _ready(limits, torch.float32)
    nbytes = -(-sum(part.numel() for part in parts) // 5)
    if out is None:
        out = torch.empty(nbytes, dtype=torch.uint8)
    assert out.numel() == nbytes and out.is_contiguous()
    _lib().tw_ternarize_packed(
        len(parts), *_pointers(parts), scales.data_ptr(), caps.data_ptr(), (_U32 * len(keys))(*keys),
        _int64s(counters if counters is not None else [0] * len(parts)), out.data_ptr(), _threads(),
    )  # fmt: skip
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


def add_signs(out: Tensor, bits: Tensor, scales: Tensor, runs: Runs, factor: float) -> None:
    negative = bits if bits.dtype == torch.bool else unpack_bits(bits, out.numel())
    lengths, counts = _run_tables(runs)
    negative, scales = _ready(negative, torch.bool), _ready(scales, torch.float32)
    _lib().tw_add_signs(
        out.data_ptr(), negative.data_ptr(), scales.data_ptr(), len(runs), lengths.data_ptr(), counts.data_ptr(),
        factor, _threads(),
    )  # fmt: skip


def checksum(words: Tensor, start: int = 0) -> Tensor:  # (n,) int32 -> () int64
    words = words.contiguous()
    return torch.tensor(_lib().tw_checksum(words.data_ptr(), words.numel(), start), dtype=torch.int64)


def checksum_around(words: Tensor, hole: int) -> Tensor:  # (n,) int32 -> () int64
    words = words.contiguous()
    start, behind = words.data_ptr(), hole + 1
    sums = _lib().tw_checksum(start, hole, 0), _lib().tw_checksum(start + 4 * behind, words.numel() - behind, hole)
    return torch.tensor(sum(sums) & 0xFFFFFFFF, dtype=torch.int64)


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


def rice_indices(
    streams: Sequence[RiceStream], numel: int, outs: Sequence[Tensor] | None = None
) -> list[tuple[Tensor, int]]:
    """Indices are int32 where they are to lie in ``outs``, one a stream and as long, and numel is below 2**31."""
    lows, low_nbytes = _pointers([stream.low.contiguous() for stream in streams])
    unaries, unary_nbytes = _pointers([stream.unary.contiguous() for stream in streams])
    wide = outs is None
    indices = [torch.empty(stream.count, dtype=torch.int64) for stream in streams] if outs is None else outs
    assert [out.numel() for out in indices] == [stream.count for stream in streams]
    places, counts = _pointers(indices)
    parameters, faults = (_I32 * len(streams))(*(stream.parameter for stream in streams)), (_I32 * len(streams))()
    _lib().tw_rice_indices(
        len(streams), lows, low_nbytes, unaries, unary_nbytes, counts, parameters, numel, places, wide, faults,
        _threads(),
    )  # fmt: skip
    return list(zip(indices, faults, strict=True))
