"""Golomb-Rice codes of gaps between rising indices, in two streams that can be written and read in parallel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.kernels.reference.packing import pack_bits, pack_uints, unpack_bits, unpack_uints


def rice_unary_bits(gaps: Tensor, parameters: range) -> list[int]:  # (k,) int64
    """Return the length in bits of the unary part with each of some parameters: sum of (gap >> parameter) + 1."""
    return [int((gaps >> parameter).sum()) + gaps.numel() for parameter in parameters]


def rice_encode(gaps: Tensor, parameter: int) -> tuple[Tensor, Tensor]:  # (k,) int64 -> uint8, uint8
    """Golomb-Rice code of non-negative gaps in two streams that can be written and read in parallel.

    The first holds the ``parameter`` low bits of every gap, packed; the second holds every quotient q in unary, q zeros
    and a one.
    """
    low = pack_uints(gaps & ((1 << parameter) - 1), parameter)
    ones = torch.cumsum((gaps >> parameter) + 1, dim=0) - 1  # (k,) position of the one that ends each quotient
    length = int(ones[-1]) + 1 if gaps.numel() else 0
    unary = torch.zeros(length, dtype=torch.bool, device=gaps.device)
    unary[ones] = True
    return low, pack_bits(unary)


def rice_decode(low: Tensor, unary: Tensor, count: int, parameter: int) -> Tensor | None:  # -> (count,) int64
    """Undo rice_encode; None when the unary stream does not hold exactly ``count`` ones."""
    ones = torch.nonzero(unpack_bits(unary, unary.numel() * 8)).flatten()
    if ones.numel() != count:
        return None
    before = torch.nn.functional.pad(ones[:-1], (1, 0), value=-1) if count else ones
    return ((ones - before - 1) << parameter) | unpack_uints(low, count, parameter)


@dataclass(frozen=True)
class RiceStream:
    """What rice_encode made of ``count`` gaps, as it came from the wire: untrusted."""

    low: Tensor  # uint8
    unary: Tensor  # uint8
    count: int
    parameter: int

    @property
    def device(self) -> torch.device:
        return self.low.device

    def numel(self) -> int:
        return self.count


RICE_COUNT, RICE_GAP, RICE_REST, RICE_OUTSIDE = 1, 2, 3, 4


def rice_indices(
    streams: Sequence[RiceStream], numel: int, outs: Sequence[Tensor] | None = None
) -> list[tuple[Tensor, int]]:
    """Decode and check rising indices below ``numel``: of every stream (count,) int64 and 0, or what is wrong first.

    RICE_COUNT: the unary stream has another number of entries. RICE_GAP: a gap is ``numel`` or more. RICE_REST: the
    quotients do not fill the stream, which is a whole number of four bytes. RICE_OUTSIDE: the last index is ``numel``
    or more. The indices mean something only without a fault, or with the last one.

    ``outs``, one a stream and as long, int32, is memory offered for indices below 2**31.
    """
    return [checked_indices(stream, numel) for stream in streams]


def launch_rice_indices(streams: Sequence[RiceStream], numel: int) -> tuple[Tensor, Tensor]:
    """``rice_indices`` as tensors that nobody waits for: (P, longest) int64; (P,) int32, not zero where one is wrong.

    What is behind a stream's count, and in the row of a wrong one, means nothing.
    """
    indices, faults = zip(*rice_indices(streams, numel), strict=True)
    longest = max(1, *(len(own) for own in indices))
    rows = torch.zeros(len(streams), longest, dtype=torch.int64, device=streams[0].device)
    for row, own in zip(rows, indices, strict=True):
        row[: len(own)] = own
    return rows, torch.tensor(faults, dtype=torch.int32, device=rows.device)


def checked_indices(stream: RiceStream, numel: int) -> tuple[Tensor, int]:
    gaps = rice_decode(stream.low, stream.unary, stream.count, stream.parameter)
    if gaps is None:
        return stream.unary.new_zeros(0, dtype=torch.int64), RICE_COUNT
    # A huge quotient shifted left may wrap around int64: both ends of the range are checked.
    if stream.count and (int(gaps.min()) < 0 or int(gaps.max()) >= numel):
        return gaps, RICE_GAP
    (bits,) = rice_unary_bits(gaps, range(stream.parameter, stream.parameter + 1))
    if -(-bits // 32) * 4 != stream.unary.numel():
        return gaps, RICE_REST
    indices = torch.cumsum(gaps + 1, dim=0) - 1
    return indices, RICE_OUTSIDE if stream.count and int(indices[-1]) >= numel else 0


def gaps_between(indices: Tensor) -> Tensor:  # (k,) rising -> (k,) int64 >= 0
    indices = indices.to(torch.int64)
    before = torch.nn.functional.pad(indices[:-1], (1, 0), value=-1) if indices.numel() else indices
    return indices - before - 1


def rice_unary_bits_of(indices: Tensor, parameters: range) -> list[int]:  # (k,)
    """``rice_unary_bits`` of the gaps between rising indices."""
    return rice_unary_bits(gaps_between(indices), parameters)


def rice_write(indices: Tensor, parameter: int, low: Tensor, unary: Tensor) -> None:  # (k,), uint8, uint8
    """``rice_encode`` of the gaps between rising indices, into memory of the right lengths."""
    for out, stream in zip((low, unary), rice_encode(gaps_between(indices), parameter), strict=True):
        out.copy_(stream)
