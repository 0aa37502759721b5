"""Work on lists of entries, natively; it reads and writes 32-bit indices, int64 are converted."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.kernels.native import library
from thinwire.kernels.native.library import int64s, narrow, pointers, ready, widened
from thinwire.kernels.reference import Entries


def scatter_add(
    parts: Sequence[Tensor], starts: Sequence[int], lists: Sequence[tuple[Tensor, Tensor]], scale: float
) -> None:
    lists = [(narrow(indices), ready(values, torch.float32)) for indices, values in lists]
    places, counts = pointers([indices for indices, _ in lists])
    values, _ = pointers([values for _, values in lists])
    library.lib().tw_scatter_add(
        len(parts), *pointers(parts), int64s(starts), len(lists), places, values, counts, scale, library.threads()
    )


def subtract_at(x: Tensor, indices: Tensor, values: Tensor) -> None:
    assert x.dtype == torch.float32 and x.is_contiguous()
    indices, values = narrow(indices), ready(values, torch.float32)
    library.lib().tw_subtract_at(x.data_ptr(), indices.data_ptr(), values.data_ptr(), indices.numel())


def zero_at(x: Tensor, indices: Tensor) -> None:
    assert x.dtype == torch.float32 and x.is_contiguous()
    indices = narrow(indices)
    library.lib().tw_zero_at(x.data_ptr(), indices.data_ptr(), indices.numel())


def union_add(a: Tensor, a_values: Tensor, b: Tensor, b_values: Tensor) -> tuple[Tensor, Tensor]:
    like, a, b = a, narrow(a), narrow(b)
    a_values, b_values = ready(a_values, torch.float32), ready(b_values, torch.float32)
    both = a.numel() + b.numel()
    indices, values = torch.empty(both, dtype=torch.int32), torch.empty(both, dtype=torch.float32)
    count = library.lib().tw_union_add(
        a.data_ptr(), a_values.data_ptr(), a.numel(), b.data_ptr(), b_values.data_ptr(), b.numel(), indices.data_ptr(),
        values.data_ptr(),
    )  # fmt: skip
    return widened(indices[:count], like), values[:count]


def _room(room: Entries | None, capacity: int) -> Entries:
    return room if room is not None else Entries(torch.empty(2 * capacity, dtype=torch.int32))


def _cut(room: Entries, count: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """The first so many entries, with indices of the type of the given ones."""
    return widened(room.indices[:count], like), room.values[:count]


def take_at(x: Tensor, indices: Tensor, out: Tensor | None = None) -> Tensor:
    x, places = ready(x, torch.float32), narrow(indices)
    out = out if out is not None else torch.empty(places.numel(), dtype=torch.float32)
    assert out.numel() == places.numel()
    library.lib().tw_take_at(x.data_ptr(), places.data_ptr(), places.numel(), out.data_ptr())
    return out


def keep_largest(indices: Tensor, values: Tensor, k: int, room: Entries | None = None) -> tuple[Tensor, Tensor]:
    count = indices.numel()
    if k >= count:
        return indices, values
    places, values, room = narrow(indices), ready(values, torch.float32), _room(room, k)
    assert room.capacity >= k
    library.lib().tw_keep_largest(
        places.data_ptr(), values.data_ptr(), count, k, room.indices.data_ptr(), room.values.data_ptr()
    )
    return _cut(room, k, indices)


def keep_masked(indices: Tensor, values: Tensor, mask: Tensor, room: Entries | None = None) -> tuple[Tensor, Tensor]:
    places, values, mask = narrow(indices), ready(values, torch.float32), ready(mask, torch.bool)
    room = _room(room, places.numel())
    assert room.capacity >= places.numel() == mask.numel()
    count = library.lib().tw_keep_masked(
        places.data_ptr(), values.data_ptr(), mask.data_ptr(), places.numel(), room.indices.data_ptr(),
        room.values.data_ptr(),
    )  # fmt: skip
    return _cut(room, count, indices)


def mask_contained(mask: Tensor, wanted: Tensor, indices: Tensor) -> None:
    assert mask.dtype == torch.bool and mask.is_contiguous() and mask.numel() == wanted.numel()
    wanted, indices = narrow(wanted), narrow(indices)
    library.lib().tw_mask_contained(
        wanted.data_ptr(), wanted.numel(), indices.data_ptr(), indices.numel(), mask.data_ptr()
    )


def merge_topk(
    a: Tensor, a_values: Tensor, b: Tensor, b_values: Tensor, k: int, room: Entries | None = None
) -> tuple[Tensor, Tensor]:
    like, both = a, a.numel() + b.numel()
    a, b = narrow(a), narrow(b)
    a_values, b_values = ready(a_values, torch.float32), ready(b_values, torch.float32)
    room = _room(room, max(min(k, both), -(-both // 2)))
    assert room.capacity >= min(k, both) and 2 * room.capacity >= both
    count = library.lib().tw_merge_topk(
        a.data_ptr(), a_values.data_ptr(), a.numel(), b.data_ptr(), b_values.data_ptr(), b.numel(), k,
        room.memory.data_ptr(), room.indices.data_ptr(), room.values.data_ptr(),
    )  # fmt: skip
    return _cut(room, count, like)
