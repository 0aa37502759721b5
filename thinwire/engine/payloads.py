"""What a compressor chooses to send: frozen, typed, one class per form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.kernels import (
    Runs,
    add_signs,
    block_expand,
    pack_bits,
    pack_signs,
    pack_trits,
    remaining,
    subtract_at,
    subtract_own_signs,
    ternarize_packed,
    unpack_bits,
    unpack_trits,
)

Spread = tuple[tuple[int, int], ...]
"""(elements, entries) of every part of a vector whose parts send different shares; () where all send the same."""


def _covered(blocks: Runs) -> int:
    return sum(length * count for length, count in blocks)


@dataclass(frozen=True)
class Sparse:
    """Some elements of a vector of ``numel``: indices rising, no index twice.

    ``capacity`` is the most entries that any rank's payload of this exchange can have; all ranks know it, so all know
    how long every frame is, for which ``spread`` says how the capacity is divided.
    """

    indices: Tensor  # (k,) int64, or int32 in scratch memory
    values: Tensor  # (k,) float32
    numel: int
    capacity: int
    spread: Spread = ()

    def add_to(self, out: Tensor) -> None:  # (numel,) float32
        out.index_add_(0, self.indices, self.values)

    def subtract_from(self, x: Tensor) -> None:  # (numel,) float32
        subtract_at(x, self.indices, self.values)


@dataclass(frozen=True)
class Signs:
    """One bit per element and one scale per block: value = -scale where ``negative``, +scale elsewhere."""

    bits: Tensor  # (n,) bool, or (ceil(n/8),) uint8 as they travel
    scales: Tensor  # (B,) float32
    blocks: Runs

    @property
    def numel(self) -> int:
        return self.bits.numel() if self.bits.dtype == torch.bool else _covered(self.blocks)

    @property
    def negative(self) -> Tensor:  # -> (n,) bool
        return self.bits if self.bits.dtype == torch.bool else unpack_bits(self.bits, self.numel)

    @property
    def packed(self) -> Tensor:  # -> (ceil(n/8),) uint8
        return pack_bits(self.bits) if self.bits.dtype == torch.bool else self.bits

    def cut(self, spans: Sequence[slice], scales: Tensor, blocks: Runs) -> Signs:
        negative = self.negative
        return Signs(torch.cat([negative[span] for span in spans]) if spans else negative[:0], scales, blocks)

    def values(self) -> Tensor:  # (n,) float32
        magnitude = block_expand(self.scales, self.blocks)
        return torch.where(self.negative, -magnitude, magnitude)

    def add_to(self, out: Tensor) -> None:
        add_signs(out, self.bits, self.scales, self.blocks, 1.0)

    def subtract_from(self, x: Tensor) -> None:
        add_signs(x, self.bits, self.scales, self.blocks, -1.0)


@dataclass(frozen=True)
class SignsOf:
    """The ``Signs`` of vectors where they lie: a codec writes the bits straight into a frame.

    The vectors must stay as they are until what was sent is subtracted from them, which is the last use of this.
    """

    parts: tuple[Tensor, ...]  # vectors, float32, that are n elements together
    scales: Tensor  # (B,) float32
    blocks: Runs

    @property
    def numel(self) -> int:
        return sum(part.numel() for part in self.parts)

    @property
    def nbytes(self) -> int:
        return -(-self.numel // 8)

    def cut(self, spans: Sequence[slice], scales: Tensor, blocks: Runs) -> SignsOf:
        (x,) = self.parts
        return SignsOf(tuple(x[span] for span in spans), scales, blocks)

    def write(self, out: Tensor) -> None:  # (nbytes,) uint8
        pack_signs(self.parts, out)

    def written(self) -> Signs:
        packed = torch.empty(self.nbytes, dtype=torch.uint8, device=self.scales.device)
        self.write(packed)
        return Signs(packed, self.scales, self.blocks)

    def values(self) -> Tensor:  # (n,) float32
        return self.written().values()

    def add_to(self, out: Tensor) -> None:
        self.written().add_to(out)

    def subtract_from(self, x: Tensor) -> None:
        if len(self.parts) == 1 and self.parts[0].data_ptr() == x.data_ptr():
            subtract_own_signs(x, self.scales, self.blocks)
        else:
            self.written().subtract_from(x)


@dataclass(frozen=True)
class Ternary:
    """-1, 0 or 1 per element and one scale per tensor: value = scale * trit. Packed five trits per byte."""

    packed: Tensor  # (ceil(n/5),) uint8
    scales: Tensor  # (T,) float32
    blocks: Runs

    @classmethod
    def of(cls, trits: Tensor, scales: Tensor, blocks: Runs) -> Ternary:  # (n,) int8
        return cls(pack_trits(trits), scales, blocks)

    @property
    def numel(self) -> int:
        return _covered(self.blocks)

    @property
    def trits(self) -> Tensor:  # -> (n,) int8
        return unpack_trits(self.packed, self.numel)

    def values(self) -> Tensor:  # (n,) float32
        return block_expand(self.scales, self.blocks) * self.trits

    def add_to(self, out: Tensor) -> None:
        out.add_(self.values())

    def subtract_from(self, x: Tensor) -> None:
        x.sub_(self.values())


@dataclass(frozen=True)
class TernaryDraw:
    """A ``Ternary`` that is not drawn yet: every tensor's gradient where it lies, its scale, limit and random stream.

    Random numbers come from counters, so every draw of it, and of any piece of it, gives the same trits. A codec draws
    them straight into a frame. The gradient must stay as it is as long as this is used.
    """

    parts: tuple[Tensor, ...]  # T vectors, float32
    scales: Tensor  # (T,) float32
    limits: Tensor | None  # (T,) float32
    keys: tuple[int, ...]
    counters: tuple[int, ...]  # where each part begins in its tensor

    @property
    def numel(self) -> int:
        return sum(part.numel() for part in self.parts)

    @property
    def nbytes(self) -> int:
        return -(-self.numel // 5)

    def cut(self, pieces: Sequence[tuple[int, int, int]]) -> TernaryDraw:  # (place of the tensor, start, stop)
        places = [place for place, _, _ in pieces]
        scales, limits = self.scales, self.limits
        if places != list(range(len(self.parts))):
            chosen = torch.tensor(places, dtype=torch.int64).to(scales.device)
            scales, limits = scales[chosen], None if limits is None else limits[chosen]
        return TernaryDraw(
            tuple(self.parts[place][start:stop] for place, start, stop in pieces),
            scales,
            limits,
            tuple(self.keys[place] for place in places),
            tuple(self.counters[place] + start for place, start, _ in pieces),
        )

    def write(self, out: Tensor) -> None:  # (nbytes,) uint8
        ternarize_packed(self.parts, self.scales, self.keys, self.limits, self.counters, out)

    def drawn(self) -> Ternary:
        packed = ternarize_packed(self.parts, self.scales, self.keys, self.limits, self.counters)
        return Ternary(packed, self.scales, tuple((part.numel(), 1) for part in self.parts))

    def values(self) -> Tensor:  # (n,) float32
        return self.drawn().values()

    def add_to(self, out: Tensor) -> None:
        self.drawn().add_to(out)

    def subtract_from(self, x: Tensor) -> None:
        self.drawn().subtract_from(x)


Payload = Sparse | Signs | SignsOf | Ternary | TernaryDraw


@dataclass(frozen=True)
class Accepted:
    """What the group really used of one rank's contribution: the coded part, and the whole dense tail or nothing."""

    coded: Payload
    tail: Tensor  # (t,) float32
    sent: Tensor | None = None  # (k,) the coordinates of the coded part that left, where that is sparse

    def subtract_from(self, x: Tensor) -> None:  # (coded + t,) float32
        """x -= accepted, in place."""
        boundary = x.numel() - self.tail.numel()
        self.coded.subtract_from(x[:boundary])
        if self.tail.numel():
            x[boundary:] = remaining(x[boundary:], self.tail)
