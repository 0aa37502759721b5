"""What the kernels must know about the tensors of an exchange, as small tables in device memory, uploaded once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.kernels.uploads import once_a_thread, upload

TILE = 4096  # elements that one program passes over; a tile lies inside one segment
WORDS = TILE // 32  # 32-bit words of one tile's bit mask


@once_a_thread(most=4096)
def cached(rows: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers that seldom change, on the device: pointers of DDP's buckets, momentum, decay."""
    return upload(torch.tensor(rows, dtype=dtype), device)


def _range(*bounds: int) -> Tensor:  # -> int64, on the host
    return torch.arange(*bounds, dtype=torch.int64)


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
        of = torch.repeat_interleave(_range(len(numels)), torch.tensor(counts, dtype=torch.int64))  # (T,)
        within = _range(self.total) - torch.tensor(self.first[:-1], dtype=torch.int64)[of] if numels else of
        self.segment = upload(of.to(torch.int32), device)  # (T,) the tile's segment
        self.offset = upload((within * tile).to(torch.int32), device)  # (T,) where it begins inside that segment


@once_a_thread(most=64)
def tiles_of(numels: tuple[int, ...], device: torch.device, tile: int = TILE) -> Tiles:
    return Tiles(numels, device, tile)


def pointers(tensors: Sequence[Tensor | None], device: torch.device) -> Tensor:  # -> (n,) int64
    return cached(tuple(0 if t is None else t.data_ptr() for t in tensors), torch.int64, device)


class Cuts:
    """A flat vector cut into equal tiles and, across them, into blocks: the pieces that lie in one tile and one block.

    Pieces are numbered in order, so the pieces of a tile, and those of a block, follow each other.
    """

    def __init__(self, lengths: tuple[int, ...], tile: int, device: torch.device) -> None:
        ends = torch.tensor(lengths, dtype=torch.int64).cumsum(0)  # (B,)
        self.numel = int(ends[-1]) if lengths else 0
        self.num_tiles = -(-self.numel // tile)
        edges = _range(1, self.num_tiles + 1) * tile
        piece_ends = torch.unique(torch.cat([ends, edges.clamp(max=self.numel)]))  # sorted
        piece_ends = piece_ends[piece_ends > 0]
        blocks = torch.searchsorted(ends, piece_ends)  # (pieces,) the block each piece ends in
        firsts = torch.searchsorted(piece_ends, _range(self.num_tiles + 1) * tile, right=True)  # (tiles + 1,)
        in_block = torch.searchsorted(blocks, _range(len(lengths) + 1))  # (blocks + 1,)
        starts = ends - torch.tensor(lengths, dtype=torch.int64)
        self.num_pieces = piece_ends.numel()
        self.first_piece, self.block_of, self.first_of_block, self.starts, self.ends = (
            upload(table.to(torch.int32), device) for table in (firsts, blocks, in_block, starts, ends)
        )


@once_a_thread(most=64)
def cuts_of(lengths: tuple[int, ...], tile: int, device: torch.device) -> Cuts:
    return Cuts(lengths, tile, device)
