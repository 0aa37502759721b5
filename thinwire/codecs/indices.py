"""Rising indices on the wire: int32, the DGC paper's 16-bit distances, or Golomb-Rice coded gaps.

Every coding has a byte budget that is a function of numel, k and how they are spread, so that all ranks know every
frame's length without asking. A budget holds any k indices when k is small; for large k it holds those that a random
choice needs, with some slack, and indices that are more clustered than that may not all fit: an ``IndexPlan`` says how
many to leave out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from thinwire.codecs.frame import Body, as_bytes, padded
from thinwire.engine.payloads import Spread
from thinwire.errors import FrameError
from thinwire.kernels import RiceStream, rice_indices, rice_unary_bits_of, rice_write
from thinwire.kernels.reference import RICE_COUNT, RICE_GAP, RICE_OUTSIDE, RICE_REST, gaps_between

INDEX_CODES = {"int32": 0, "delta16": 1, "rice": 2}
_ESCAPE = 0xFFFF
_EXACT_BUDGET_K = 4096


def _rice_bound_bits(numel: int, k: int, parameter: int) -> int:
    """No k indices need more bits than this: all quotients together are at most (numel - k) >> parameter."""
    return k * (parameter + 1) + ((numel - k) >> parameter)


def _rice_expected_bits(numel: int, k: int, parameter: int) -> float:
    """Mean length when every element is chosen with probability k / numel (geometric gaps)."""
    q = (1.0 - k / numel) ** (1 << parameter)
    return k * (parameter + 1 + q / (1.0 - q))


@lru_cache(maxsize=1024)
def rice_best(numel: int, k: int) -> int:
    """The Rice parameter with which k indices below ``numel`` are shortest in the worst case."""
    return min(range(31), key=lambda parameter: _rice_bound_bits(numel, k, parameter))


@lru_cache(maxsize=1024)
def index_budget(coding: str, numel: int, k: int, holds_any: bool = False, spread: Spread = ()) -> int:
    """Return the bytes that a frame reserves for k indices below ``numel``: enough for most, or for any."""
    if k == 0:
        return 0
    if coding == "int32":
        return 4 * k
    if coding == "delta16":
        escapes = numel // _ESCAPE if holds_any else min(numel // _ESCAPE, 8 + k // 256)
        return padded(2 * (k + escapes))
    bound = _rice_bound_bits(numel, k, rice_best(numel, k))
    if k > _EXACT_BUDGET_K and not holds_any:
        parts = spread or ((numel, k),)
        expected = min(sum(_rice_expected_bits(*part, parameter) for part in parts) for parameter in range(31))
        bound = min(bound, math.ceil(1.005 * expected))
    return padded(-(-bound // 8)) + 8  # two sections, each rounded up to four bytes


@dataclass(frozen=True)
class RiceSections:
    """The two sections of Rice coded indices, which write themselves into a frame."""

    indices: Tensor  # (k,) rising
    parameter: int
    unary_nbytes: int

    @property
    def low_nbytes(self) -> int:
        return -(-self.indices.numel() * self.parameter // 8)

    @property
    def nbytes(self) -> int:
        return padded(self.low_nbytes) + self.unary_nbytes

    def write(self, out: Tensor) -> None:  # (nbytes,) uint8
        boundary = padded(self.low_nbytes)
        out[self.low_nbytes : boundary] = 0
        rice_write(self.indices, self.parameter, out[: self.low_nbytes], out[boundary:])


class IndexPlan:
    """How a coding writes some rising indices below ``numel``: with which parameter, and in how many bytes."""

    def __init__(self, coding: str, indices: Tensor, numel: int) -> None:  # (k,) int64 or int32
        self.coding, self.indices, self.parameter = coding, indices, 0
        k = indices.numel()
        if coding == "int32":
            self.nbytes = 4 * k
            return
        if coding == "delta16":
            self._gaps = gaps_between(indices)  # (k,) int64
            self.nbytes = 2 * (k + int((self._gaps // _ESCAPE).sum()))
            return
        self.nbytes = self._unary_nbytes = 0
        if k:
            first = max(0, rice_best(numel, k) - 2)
            unary_bits = rice_unary_bits_of(indices, range(first, rice_best(numel, k) + 3))
            sizes = [
                (padded(-(-k * parameter // 8)) + padded(-(-bits // 8)), parameter, -(-bits // 8))
                for parameter, bits in enumerate(unary_bits, first)
            ]
            self.nbytes, self.parameter, self._unary_nbytes = min(sizes)

    def excess(self, budget: int) -> int:
        """How many indices to leave out before trying again; 0 when these fit into so many bytes."""
        if self.nbytes <= budget:
            return 0
        if self.coding == "rice":
            return -(-(self.nbytes - budget) * 8 // (self.parameter + 1))
        width = 4 if self.coding == "int32" else 2
        return self.nbytes // width - budget // width

    def sections(self) -> list[Tensor | RiceSections]:
        if self.coding == "int32":
            return [as_bytes(self.indices.to(torch.int32))]
        if self.coding == "rice":
            return [RiceSections(self.indices, self.parameter, self._unary_nbytes)]
        ends = torch.cumsum(self._gaps // _ESCAPE + 1, dim=0) - 1  # (k,) place of each index's last word
        words = torch.full((self.nbytes // 2,), _ESCAPE, dtype=torch.int64, device=self.indices.device)
        words[ends] = self._gaps % _ESCAPE
        return [as_bytes(words.to(torch.uint16))]


def take_rice(count: int, parameter: int, body: Body) -> RiceStream:
    """The Rice coded indices of a frame: its last sections."""
    if parameter > 30:
        raise FrameError(f"bad frame from {body.origin}: its Rice parameter {parameter} is larger than 30")
    low = body.take(-(-count * parameter // 8), "low index bits")
    return RiceStream(low, body.take(body.remaining, "index quotients"), count, parameter)


def _last(indices: Tensor) -> int:
    """The last index, or its lower 32 bits where indices have no more."""
    last = int(indices[-1]) if indices.numel() else 0
    return last & 0xFFFFFFFF if indices.dtype == torch.int32 else last


def check_rice(stream: RiceStream, indices: Tensor, fault: int, numel: int, origin: str) -> None:
    """Raise what ``rice_indices`` found wrong with a stream."""
    if fault == 0:
        return
    sentences = {
        RICE_COUNT: f"its index quotients do not hold exactly {stream.count} entries",
        RICE_GAP: f"an index gap is larger than the {numel} elements",
        RICE_REST: "bytes behind its index quotients belong to nothing",
        RICE_OUTSIDE: f"index {_last(indices)} is outside {numel} elements",
    }
    raise FrameError(f"bad frame from {origin}: {sentences[fault]}")


def decode_indices(coding: str, count: int, numel: int, parameter: int, body: Body) -> Tensor:  # -> (count,) int64
    """Read ``count`` rising indices below ``numel``; they are the last sections of a frame."""

    def check(ok: bool, what: str) -> None:
        if not ok:
            raise FrameError(f"bad frame from {body.origin}: {what}")

    check(coding == "rice" or parameter == 0, f"its index coding has no parameter, it has {parameter}")
    if coding == "int32":
        indices = body.take(4 * count, "indices").view(torch.int32).to(torch.int64)
        check(bool((indices[1:] > indices[:-1]).all()), "its indices are not rising")
        check(count == 0 or int(indices[0]) >= 0, f"index {int(indices[0]) if count else 0} is below zero")
    elif coding == "delta16":
        words = body.take(body.remaining, "index distances").view(torch.uint16).to(torch.int64)
        is_end = words != _ESCAPE
        # A section is a whole number of four bytes: the filler behind an odd number of words is one zero word.
        ends = torch.nonzero(is_end).flatten()
        check(ends.numel() in (count, count + 1), f"it holds {ends.numel()} index distances, expected {count}")
        last = int(ends[count - 1]) if count else -1
        filling = words[last + 1 :].tolist() if words.numel() - last <= 2 else None
        check(filling in ([], [0]), "bytes behind its index distances belong to nothing")
        steps = torch.where(is_end, words + 1, words)[: last + 1]
        indices = (torch.cumsum(steps, dim=0) - 1)[ends[:count]]
    else:
        stream = take_rice(count, parameter, body)
        indices, fault = rice_indices([stream], numel)[0]
        check_rice(stream, indices, fault, numel, body.origin)
    check(
        count == 0 or int(indices[-1]) < numel, f"index {int(indices[-1]) if count else 0} is outside {numel} elements"
    )
    return indices
