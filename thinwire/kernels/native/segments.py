"""Steps over the segments of an exchange, natively."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.kernels.native import library
from thinwire.kernels.native.library import I32, floats, int64s, pointers, ready
from thinwire.kernels.native.selection import listing_entries
from thinwire.kernels.reference import Segments


def first_nonfinite(parts: Sequence[Tensor], limit: float) -> int | None:
    parts = [ready(part, torch.float32) for part in parts]
    place: int = library.lib().tw_first_nonfinite(len(parts), *pointers(parts), limit, library.threads())
    return None if place < 0 else place


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
    count = library.lib().tw_accumulate(
        len(parts), *tables, floats(segments.applied), limits, floats(ratios) if ratios is not None else None,
        velocity.data_ptr() if velocity is not None else None, residual.data_ptr(), listing.data_ptr(),
        listing.numel() if collecting else 0, found.data_ptr(), capacity if collecting else 0, library.threads(),
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
    library.lib().tw_error_step(
        len(parts), *tables, floats(ratios),
        velocity.data_ptr() if velocity is not None else None, residual.data_ptr(), library.threads(),
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
