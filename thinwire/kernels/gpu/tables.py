"""What the kernels must know about the tensors of an exchange, as small tables in device memory, uploaded once."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

TILE = 4096  # elements that one program passes over; a tile lies inside one segment
WORDS = TILE // 32  # 32-bit words of one tile's bit mask


def upload(rows: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy numbers to the device without waiting for it."""
    host = torch.tensor(rows, dtype=dtype)
    return host.to(device) if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def cached(rows: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The same for tables that seldom change: pointers of DDP's buckets, momentum, decay.

    Every thread has its own: it copies on its own stream, and another one's would not wait for that.
    """
    return _cached(rows, dtype, device, threading.get_ident())


@lru_cache(maxsize=4096)
def _cached(rows: tuple[float, ...], dtype: torch.dtype, device: torch.device, thread: int) -> Tensor:
    return upload(rows, dtype, device)


class Tiles:
    """Every segment cut into tiles of at most ``tile`` elements.

    ``first`` holds each segment's first tile and, last, how many tiles there are.
    """

    def __init__(self, numels: tuple[int, ...], device: torch.device, tile: int) -> None:
        counts = [-(-numel // tile) for numel in numels]
        self.first = [0]
        for count in counts:
            self.first.append(self.first[-1] + count)
        self.total = self.first[-1]
        of = torch.repeat_interleave(torch.arange(len(numels)), torch.tensor(counts, dtype=torch.int64))  # (T,)
        within = torch.arange(self.total) - torch.tensor(self.first[:-1], dtype=torch.int64)[of] if numels else of
        self.segment = of.to(torch.int32).to(device)  # (T,) the tile's segment
        self.offset = (within * tile).to(torch.int32).to(device)  # (T,) where it begins inside that segment


@lru_cache(maxsize=64)
def tiles_of(numels: tuple[int, ...], device: torch.device, tile: int = TILE) -> Tiles:
    return Tiles(numels, device, tile)


def pointers(tensors: Sequence[Tensor | None], device: torch.device) -> Tensor:  # -> (n,) int64
    return cached(tuple(0 if t is None else t.data_ptr() for t in tensors), torch.int64, device)
