"""The largest magnitudes, natively."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from thinwire.kernels.native import library
from thinwire.kernels.native.library import I64, int64s, narrow, ready


def listing_entries(capacity: int) -> int:
    return capacity + 256 * (library.threads() + 1)


def select_topk(x: Tensor, k: int) -> Tensor:  # (n,) float32 -> (k,) int64, rising
    n = x.numel()
    if k >= n or k == 0:
        return torch.arange(min(k, n), dtype=torch.int64)
    x = ready(x, torch.float32)
    workspace = torch.empty(_search_entries(k), dtype=torch.int32)
    out, smallest = torch.empty(k, dtype=torch.int32), ctypes.c_float()
    library.lib().tw_select_topk(
        x.data_ptr(),
        n,
        k,
        workspace.data_ptr(),
        workspace.numel(),
        out.data_ptr(),
        ctypes.byref(smallest),
        library.threads(),
    )
    return out.to(torch.int64) & 0xFFFFFFFF


def _search_entries(k: int) -> int:
    """Memory in which a search of a whole vector is fast: twice for a few more than k."""
    return 2 * listing_entries(2 * k + 4096)


def select_chunks(
    x: Tensor, bounds: Sequence[int], chunk: int, k: int, lasts: Sequence[int], out: Tensor | None = None
) -> Tensor:
    x, k = ready(x, torch.float32), min(k, chunk)
    spans = [stop - start for start, stop in pairwise(bounds)]
    lasts = [min(last, span % chunk) for span, last in zip(spans, lasts, strict=True)]
    chosen = sum(span // chunk * k for span in spans) + sum(lasts)
    indices = out if out is not None else torch.empty(chosen, dtype=torch.int32)
    assert indices.numel() == chosen
    library.lib().tw_select_chunks(
        x.data_ptr(), len(spans), int64s(bounds), chunk, k, int64s(lasts), indices.data_ptr(), library.threads()
    )
    return indices if out is not None else indices.to(torch.int64) & 0xFFFFFFFF


def select_scopes(
    x: Tensor,
    bounds: Sequence[int],
    ks: Sequence[int],
    candidates: Tensor | None,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
) -> tuple[Tensor, list[int], Tensor]:
    x, scopes = ready(x, torch.float32), len(ks)
    chosen = sum(min(k, bounds[place + 1] - bounds[place]) for place, k in enumerate(ks))
    listed = narrow(candidates) if candidates is not None else None
    if workspace is None:
        entries = max(_search_entries(max(ks, default=0)), listed.numel() if listed is not None else 0)
        workspace = torch.empty(entries, dtype=torch.int32)
    indices = out if out is not None else torch.empty(chosen, dtype=torch.int32)
    assert indices.numel() == chosen and (listed is None or workspace.numel() >= listed.numel())
    passed, smallest = (I64 * scopes)(), torch.empty(scopes, dtype=torch.float32)
    library.lib().tw_select_scopes(
        x.data_ptr(), scopes, int64s(bounds), int64s(ks),
        # An empty tensor has no address, but an empty list of candidates is one.
        None if listed is None else listed.data_ptr() or workspace.data_ptr(),
        listed.numel() if listed is not None else 0, workspace.data_ptr(), workspace.numel(), indices.data_ptr(),
        passed, smallest.data_ptr(), library.threads(),
    )  # fmt: skip
    return indices if out is not None else indices.to(torch.int64) & 0xFFFFFFFF, list(passed), smallest
