"""What a compressor asks a memory to look for while it passes over the gradient anyway, and what was found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class SearchBuffers:
    """Memory, all int32, for the places that reach a threshold, for putting them in order, and for those that are
    chosen; ``mark`` is what of the workspace the last ones need."""

    listing: Tensor
    places: Tensor
    chosen: Tensor
    mark: int


@dataclass(frozen=True)
class TopKHint:
    """Asks a memory to look for large elements: one threshold per segment; on a GPU the device's own search.

    At most ``capacity`` elements are listed. ``buffers`` are where the native kernels look and list, ``flag`` where
    the device's search reports what is not finite.
    """

    thresholds: Any
    capacity: int
    buffers: SearchBuffers | None = None
    flag: Tensor | None = None


@dataclass(frozen=True)
class Candidates:
    """The answer to a hint: flat indices of everything that reaches its threshold, rising, or None when that is more
    than the hint's capacity. On a GPU the device's search."""

    hint: TopKHint
    found: Any
