"""What one backend alone does, without a twin in the reference: names, parameters and what comes back.

A codec writes the same frames on every other device, and the memory for a list is the native library's own business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def listing_entries(capacity: int) -> int:
    """Native: how long the memory must be in which ``accumulate`` lists so many places; each thread fills blocks of its
    own."""
    raise NotImplementedError


def device_topk(
    starts: Sequence[int], numels: Sequence[int], scope_of: Sequence[int], wanted: Sequence[int], device: torch.device
) -> Any:
    """Triton: a search that ``accumulate`` takes in place of thresholds, and that chooses on the device.

    ``scope_of`` says of every segment which scope it belongs to, -1 for none; ``wanted`` holds k of each scope. After
    ``accumulate`` the search's ``indices``, rising, and ``values`` hold what was chosen, until the next step.
    """
    raise NotImplementedError


def encode_rice_frame(
    nbytes: int,
    fields: tuple[int, ...],
    tail: Tensor,
    indices: Tensor,
    values: Tensor,
    coding: str,
    best: int,
    budget_nbytes: int,
    flag: Tensor | None,
) -> Tensor:  # (t,) float32, (k,) int64, (k,) float32 -> (nbytes,) uint8
    """Triton: a whole frame of k entries, as ``SparseCodec`` would write it.

    ``fields`` are the first words of the header, without the Rice parameter and with the dense tail's bytes as the
    body's length; ``best`` is the middle of the Rice parameters to compare; ``flag`` is an alarm that only the device
    knows of. A frame whose indices do not fit into their budget is left without its first byte.
    """
    raise NotImplementedError


def encode_ternary_frame(
    fields: tuple[int, ...],
    tail: Tensor,
    num_scales: int,
    parts: Sequence[Tensor],
    scales: Tensor,
    keys: Sequence[int],
    limits: Tensor | None,
    counters: Sequence[int],
    flag: Tensor | None,
) -> Tensor:  # (t,) float32, T vectors, (T,) float32 -> (B,) uint8
    """Triton: a whole frame of trits, as ``TernaryCodec`` would write it; ``fields`` are the first eight words of the
    header, ``num_scales`` is T or 0."""
    raise NotImplementedError
