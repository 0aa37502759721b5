"""What a compressor asks a memory to look for while it passes over the gradient anyway."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class SearchRoom:
    """Memory, all int32, for the places that reach a threshold, for putting them in order, and for those that are
    chosen; ``mark`` is what of the scratch memory the last ones need."""

    listing: Tensor
    places: Tensor
    chosen: Tensor
    mark: int


@dataclass
class TopKHint:
    """Asks a memory to look for large elements while it passes over them anyway.

    ``thresholds`` has one number a segment; ``found`` is then the flat indices of everything that reaches its
    threshold, rising, or None when that is more than ``capacity``. On a GPU both are the device's search.
    """

    thresholds: Any
    capacity: int
    found: Any = None
    room: SearchRoom | None = None  # where the native kernels look and list
    flag: Tensor | None = None  # where the device's search reports what is not finite
