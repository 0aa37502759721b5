"""A gradient as one vector, or as one vector per segment: reading its parts, its coded part and its tail."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.engine.layout import Layout

Gradient = Tensor | Sequence[Tensor]
"""A gradient as one flat vector, or as one vector per segment wherever they lie (DDP's buckets)."""


def as_parts(layout: Layout, grad: Gradient) -> Sequence[Tensor]:
    return layout.split(grad) if isinstance(grad, Tensor) else grad


def as_flat(grad: Gradient) -> Tensor:
    """A flat vector of our own, or the given one."""
    return grad if isinstance(grad, Tensor) else torch.cat(list(grad))


def coded_part(layout: Layout, x: Gradient) -> Gradient:
    """What goes through the compressor."""
    return x[: layout.coded_numel] if isinstance(x, Tensor) else x[: len(layout.coded)]


def tail_part(layout: Layout, x: Gradient, room: Tensor | None = None) -> Tensor:  # -> (t,) a copy
    """What travels dense, in memory of its own or in ``room``, (t,)."""
    if isinstance(x, Tensor) and room is not None:
        return room.copy_(x[layout.coded_numel :])
    if isinstance(x, Tensor):
        return x[layout.coded_numel :].clone()
    rest = x[len(layout.coded) :]
    return torch.cat(list(rest)) if rest else x[0][:0]
