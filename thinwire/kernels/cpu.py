"""Native CPU kernels: the reference's functions under the same names, and the fused steps, from one small C library.

Every function here expects contiguous host tensors and gives the reference's integers and bytes exactly, and its floats
to rounding.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.kernels import native
from thinwire.kernels.native import I32, I64, U32, floats, int64s, narrow, pointers, ready, run_table, widened
from thinwire.kernels.reference import RiceStream, Runs, Segments, scalers_of
from thinwire.kernels.reference import watch as watch  # plain torch is fast enough for it


def listing_entries(capacity: int) -> int:
    """How long the memory must be in which ``accumulate`` lists so many places: each thread fills blocks of its own."""
    return capacity + 256 * (native.threads() + 1)


# ------------------------------------------------------------------------------------------------------- selection


def select_topk(x: Tensor, k: int) -> Tensor:  # (n,) float32 -> (k,) int64, rising
    n = x.numel()
    if k >= n or k == 0:
        return torch.arange(min(k, n), dtype=torch.int64)
    x = ready(x, torch.float32)
    workspace = torch.empty(_search_entries(k), dtype=torch.int32)
    out, smallest = torch.empty(k, dtype=torch.int32), ctypes.c_float()
    native.lib().tw_select_topk(
        x.data_ptr(),
        n,
        k,
        workspace.data_ptr(),
        workspace.numel(),
        out.data_ptr(),
        ctypes.byref(smallest),
        native.threads(),
    )
    return out.to(torch.int64) & 0xFFFFFFFF


def _search_entries(k: int) -> int:
    """Memory in which a search of a whole vector is fast: twice for a few more than k."""
    return 2 * listing_entries(2 * k + 4096)


def first_nonfinite(parts: Sequence[Tensor]) -> int | None:
    parts = [ready(part, torch.float32) for part in parts]
    place: int = native.lib().tw_first_nonfinite(len(parts), *pointers(parts), native.threads())
    return None if place < 0 else place


def select_scopes(
    x: Tensor,
    bounds: Sequence[int],
    ks: Sequence[int],
    candidates: Tensor | None,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
) -> tuple[Tensor, list[int], Tensor]:
    """Indices are int32 where they are to lie in ``out``; ``scratch``, int32, has an entry a candidate at least."""
    x, scopes = ready(x, torch.float32), len(ks)
    chosen = sum(min(k, bounds[place + 1] - bounds[place]) for place, k in enumerate(ks))
    listed = narrow(candidates) if candidates is not None else None
    if workspace is None:
        entries = max(_search_entries(max(ks, default=0)), listed.numel() if listed is not None else 0)
        workspace = torch.empty(entries, dtype=torch.int32)
    indices = out if out is not None else torch.empty(chosen, dtype=torch.int32)
    assert indices.numel() == chosen and (listed is None or workspace.numel() >= listed.numel())
    passed, smallest = (I64 * scopes)(), torch.empty(scopes, dtype=torch.float32)
    native.lib().tw_select_scopes(
        x.data_ptr(), scopes, int64s(bounds), int64s(ks),
        # An empty tensor has no address, but an empty list of candidates is one.
        None if listed is None else listed.data_ptr() or workspace.data_ptr(),
        listed.numel() if listed is not None else 0, workspace.data_ptr(), workspace.numel(), indices.data_ptr(),
        passed, smallest.data_ptr(), native.threads(),
    )  # fmt: skip
    return indices if out is not None else indices.to(torch.int64) & 0xFFFFFFFF, list(passed), smallest


def subtract_at(x: Tensor, indices: Tensor, values: Tensor) -> None:
    assert x.dtype == torch.float32 and x.is_contiguous()
    indices, values = narrow(indices), ready(values, torch.float32)
    native.lib().tw_subtract_at(x.data_ptr(), indices.data_ptr(), values.data_ptr(), indices.numel())


def zero_at(x: Tensor, indices: Tensor) -> None:
    assert x.dtype == torch.float32 and x.is_contiguous()
    indices = narrow(indices)
    native.lib().tw_zero_at(x.data_ptr(), indices.data_ptr(), indices.numel())


def union_add(a: Tensor, a_values: Tensor, b: Tensor, b_values: Tensor) -> tuple[Tensor, Tensor]:
    like, a, b = a, narrow(a), narrow(b)
    a_values, b_values = ready(a_values, torch.float32), ready(b_values, torch.float32)
    both = a.numel() + b.numel()
    indices, values = torch.empty(both, dtype=torch.int32), torch.empty(both, dtype=torch.float32)
    count = native.lib().tw_union_add(
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
    ratios: Sequence[float] | None = None,
    room: tuple[Tensor, Tensor] | None = None,
) -> Tensor | None:
    """With ``room``, the places are int32 and lie in the second tensor; the first, longer by ``listing_entries``, is
    used on the way and free afterwards."""
    assert flag is None, "host gradients are looked at before"
    tables = _segment_tables(parts, segments)
    collecting = thresholds is not None
    limits = floats(thresholds if thresholds is not None else [float("inf")] * len(parts))
    if room is not None:
        listing, found = room
        capacity = min(capacity, found.numel())
    else:
        entries = listing_entries(capacity) if collecting else 0
        listing, found = torch.empty(entries + (capacity if collecting else 0), dtype=torch.int32).split(
            [entries, capacity if collecting else 0]
        )
    count = native.lib().tw_accumulate(
        len(parts), *tables, floats(segments.applied), limits, floats(ratios) if ratios is not None else None,
        velocity.data_ptr() if velocity is not None else None, residual.data_ptr(), listing.data_ptr(),
        listing.numel() if collecting else 0, found.data_ptr(), capacity if collecting else 0, native.threads(),
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
        tables = (*tables[:4], floats([0.0] * len(parts)), *tables[5:])
    native.lib().tw_error_step(
        len(parts), *tables, floats(ratios),
        velocity.data_ptr() if velocity is not None else None, residual.data_ptr(), native.threads(),
    )  # fmt: skip


def _segment_tables(parts: Sequence[Tensor], segments: Segments) -> tuple[Any, ...]:
    """The rows as the library reads them; parts and weights are contiguous float32 host tensors."""
    assert all(part.dtype == torch.float32 and part.is_contiguous() for part in parts)
    assert all(w is None or (w.dtype == torch.float32 and w.is_contiguous()) for w in segments.weights)
    grads, numels = pointers(parts)
    return (
        grads,
        int64s([w.data_ptr() if w is not None else 0 for w in segments.weights]),
        numels,
        int64s(segments.starts),
        floats(segments.momentum),
        floats(segments.decay),
        (I32 * len(parts))(*segments.nesterov),
    )


def scatter_add(
    parts: Sequence[Tensor], starts: Sequence[int], lists: Sequence[tuple[Tensor, Tensor]], scale: float
) -> None:
    lists = [(narrow(indices), ready(values, torch.float32)) for indices, values in lists]
    places, counts = pointers([indices for indices, _ in lists])
    values, _ = pointers([values for _, values in lists])
    native.lib().tw_scatter_add(
        len(parts), *pointers(parts), int64s(starts), len(lists), places, values, counts, scale, native.threads()
    )


# ---------------------------------------------------------------------------------------------------- quantisation


def moments(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:  # -> (T,) float32 both
    parts = [ready(part, torch.float32) for part in parts]
    deviations, largest = (torch.empty(len(parts), dtype=torch.float32) for _ in range(2))
    native.lib().tw_moments(len(parts), *pointers(parts), deviations.data_ptr(), largest.data_ptr(), native.threads())
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
    parts = [ready(part, torch.float32) for part in parts]
    scales = ready(scales, torch.float32)
    if limits is None:
        limits = torch.full((len(parts),), float("inf"), dtype=torch.float32)
    caps = ready(limits, torch.float32)
    nbytes = -(-sum(part.numel() for part in parts) // 5)
    if out is None:
        out = torch.empty(nbytes, dtype=torch.uint8)
    assert out.numel() == nbytes and out.is_contiguous()
    native.lib().tw_ternarize_packed(
        len(parts), *pointers(parts), scales.data_ptr(), caps.data_ptr(), (U32 * len(keys))(*keys),
        int64s(counters if counters is not None else [0] * len(parts)), out.data_ptr(), native.threads(),
    )  # fmt: skip
    return out


def blockwise_sign(x: Tensor, runs: Runs) -> tuple[Tensor, Tensor]:  # (n,) float32 -> (n,) bool, (B,) float32
    x = ready(x, torch.float32)
    negative = torch.empty(x.numel(), dtype=torch.bool)
    scales = torch.empty(sum(count for _, count in runs), dtype=torch.float32)
    native.lib().tw_blockwise_sign(
        x.data_ptr(), *run_table(runs), negative.data_ptr(), scales.data_ptr(), native.threads()
    )
    return negative, scales


def add_signs(out: Tensor, bits: Tensor, scales: Tensor, runs: Runs, factor: float) -> None:
    negative = bits if bits.dtype == torch.bool else unpack_bits(bits, out.numel())
    negative, scales = ready(negative, torch.bool), ready(scales, torch.float32)
    native.lib().tw_add_signs(
        out.data_ptr(), negative.data_ptr(), scales.data_ptr(), *run_table(runs), factor, native.threads()
    )


def checksum(words: Tensor, start: int = 0) -> Tensor:  # (n,) int32 -> () int64
    words = words.contiguous()
    return torch.tensor(native.lib().tw_checksum(words.data_ptr(), words.numel(), start), dtype=torch.int64)


def checksum_around(words: Tensor, hole: int) -> Tensor:  # (n,) int32 -> () int64
    words = words.contiguous()
    start, behind = words.data_ptr(), hole + 1
    sums = (
        native.lib().tw_checksum(start, hole, 0),
        native.lib().tw_checksum(start + 4 * behind, words.numel() - behind, hole),
    )
    return torch.tensor(sum(sums) & 0xFFFFFFFF, dtype=torch.int64)


# --------------------------------------------------------------------------------------------------------- packing


def pack_bits(bits: Tensor) -> Tensor:
    bits = ready(bits, torch.bool)
    out = torch.empty(-(-bits.numel() // 8), dtype=torch.uint8)
    native.lib().tw_pack_bits(bits.data_ptr(), bits.numel(), out.data_ptr(), native.threads())
    return out


def unpack_bits(packed: Tensor, count: int) -> Tensor:
    packed, out = packed.contiguous(), torch.empty(count, dtype=torch.bool)
    native.lib().tw_unpack_bits(packed.data_ptr(), count, out.data_ptr(), native.threads())
    return out


def pack_trits(trits: Tensor) -> Tensor:
    trits, out = trits.contiguous(), torch.empty(-(-trits.numel() // 5), dtype=torch.uint8)
    native.lib().tw_pack_trits(trits.data_ptr(), trits.numel(), out.data_ptr(), native.threads())
    return out


def unpack_trits(packed: Tensor, count: int) -> Tensor:
    packed, out = packed.contiguous(), torch.empty(count, dtype=torch.int8)
    native.lib().tw_unpack_trits(packed.data_ptr(), count, out.data_ptr(), native.threads())
    return out


def rice_indices(
    streams: Sequence[RiceStream], numel: int, outs: Sequence[Tensor] | None = None
) -> list[tuple[Tensor, int]]:
    """Indices are int32 where they are to lie in ``outs``, one a stream and as long, and numel is below 2**31."""
    low = [stream.low.contiguous() for stream in streams]  # held until the call is done
    unary = [stream.unary.contiguous() for stream in streams]
    (lows, low_nbytes), (unaries, unary_nbytes) = pointers(low), pointers(unary)
    wide = outs is None
    indices = [torch.empty(stream.count, dtype=torch.int64) for stream in streams] if outs is None else outs
    assert [out.numel() for out in indices] == [stream.count for stream in streams]
    places, counts = pointers(indices)
    parameters, faults = (I32 * len(streams))(*(stream.parameter for stream in streams)), (I32 * len(streams))()
    native.lib().tw_rice_indices(
        len(streams), lows, low_nbytes, unaries, unary_nbytes, counts, parameters, numel, places, wide, faults,
        native.threads(),
    )  # fmt: skip
    return list(zip(indices, faults, strict=True))
