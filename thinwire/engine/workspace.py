"""Memory for what lives no longer than one exchange, used again by every exchange."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels import Entries, backend_name

_ALIGNMENT = 64  # bytes: a cache line
_WINDOW = 100  # exchanges after which memory that none of them needed is given back

FRONT, BACK = 0, 1


class Workspace:
    """One buffer that the exchanges of a wire share, which run one after the other.

    Memory is taken from the front or the back and released in the opposite order, each end for itself: so what is
    made from something can outlive it. What does not fit is allocated, and the buffer is as long as the longest
    exchange needed when the next one begins; it becomes shorter when a hundred exchanges needed less than half of it,
    as after a warm-up. What was taken is overwritten after the next ``begin``; without any, everything is allocated.

    For the native kernels. Elsewhere ``take`` gives nothing: a GPU's allocator keeps memory by itself.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._used = [0, 0]  # bytes from the front, from the back
        self._needed = self._recently = 0  # most bytes at once: of this exchange, of those since the last look
        self._exchanges = 0

    @property
    def nbytes(self) -> int:
        """Bytes that are kept between two exchanges."""
        return self._buffer.numel()

    def begin(self) -> None:
        """An exchange begins: all memory is free."""
        self._recently = max(self._recently, self._needed)
        self._exchanges += 1
        if self._needed > self._buffer.numel():
            self._buffer = torch.empty(self._needed, dtype=torch.uint8)
        elif self._exchanges >= _WINDOW:
            if self._recently < self._buffer.numel() // 2:
                self._buffer = torch.empty(self._recently, dtype=torch.uint8)
            self._exchanges = self._recently = 0
        self._used, self._needed = [0, 0], 0

    def take(self, count: int, dtype: torch.dtype, device: torch.device, end: int = FRONT) -> Tensor | None:
        """Memory for so many elements, not cleared."""
        if backend_name(device) != "native":
            return None
        nbytes = count * dtype.itemsize
        stretch = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        before = self._used[end]
        self._used[end] += stretch
        self._needed = max(self._needed, sum(self._used))
        if sum(self._used) > self._buffer.numel():
            return torch.empty(count, dtype=dtype)
        start = before if end == FRONT else (self._buffer.numel() // _ALIGNMENT) * _ALIGNMENT - self._used[end]
        return self._buffer[start : start + nbytes].view(dtype)

    def entries(self, capacity: int, numel: int, device: torch.device, end: int = FRONT) -> Entries | None:
        """Memory for entries of a vector of ``numel`` elements; none where 32 bits are too few for its indices."""
        if numel >= 1 << 31:
            return None
        memory = self.take(2 * capacity, torch.int32, device, end)
        return Entries(memory) if memory is not None else None

    def mark(self, end: int = FRONT) -> int:
        """What is taken so far from an end."""
        return self._used[end]

    def release(self, mark: int, end: int = FRONT) -> None:
        """Everything that was taken from this end after the mark is free again."""
        assert mark <= self._used[end], "memory is released in the opposite order"
        self._used[end] = mark
