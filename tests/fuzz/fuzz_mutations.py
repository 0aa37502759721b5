"""How good frames become bad ones; see fuzz_frames.py."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

import numpy as np

from thinwire.codecs import frame as frame_module

START = frame_module.HEADER_NBYTES
FIELDS = {  # offset and length in the header
    "magic": (0, 2), "version": (2, 1), "kind": (3, 1), "numel": (4, 4), "count": (8, 4), "index": (12, 1),
    "value": (13, 1), "parameter": (14, 1), "flags": (15, 1), "tail": (16, 4), "layout": (20, 4), "step": (24, 4),
    "body": (28, 4), "checksum": (32, 4),
}  # fmt: skip
# The receiver has no number of its own to compare these with.
FREE_FIELDS = ("count", "index", "value", "parameter", "flags", "body")

_WORDS = [0, 1, 2, 3, 4, 7, 8, 255, 256, 257, 65534, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1]
_POSITIONS = np.arange(1 << 16, dtype=np.uint32)


def _mix(x: np.ndarray) -> np.ndarray:  # (n,) uint32
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)


_MIXED = _mix(_POSITIONS)


def checksum(data: bytes | bytearray) -> int:
    """The checksum of a frame of a multiple of four bytes, from docs/wire-format.md alone."""
    words = np.frombuffer(data, dtype="<u4")
    words = np.concatenate([words[:8], words[9:]])
    return int(_mix(words ^ _MIXED[: words.size]).sum(dtype=np.uint32))


class Mutator:
    """Makes a bad frame of a good one."""

    def __init__(self, seed: int | str) -> None:
        self.random = random.Random(seed)
        self.changes: dict[str, Callable[[bytearray, bytes], None]] = {
            "bits": self._flip,
            "bytes": self._bytes,
            "words": self._words,
            "header": self._header,
            "cut": self._cut,
            "longer": self._longer,
            "splice": self._splice,
            "swap": self._swap,
            "random body": self._random_body,
        }
        self.names = list(self.changes)

    def __call__(self, parent: bytes, other: bytes) -> tuple[bytes, list[str], bool]:
        """Return the mutant, what was done to it, and whether its checksum was made right again."""
        numbers, out, done = self.random, bytearray(parent), []
        for _ in range(numbers.choice((1, 1, 1, 2, 2, 3, 5))):
            name = numbers.choice(self.names)
            self.changes[name](out, other)
            done.append(name)
        if numbers.random() < 0.9:  # otherwise the length alone would end most of them
            out += bytes(-len(out) % 4)
        if len(out) >= START and numbers.random() < 0.5:  # a body that fits: the sections are reached
            body = struct.unpack_from("<I", out, 28)[0]
            if body > len(out) - START or numbers.random() < 0.2:
                struct.pack_into("<I", out, 28, len(out) - START & ~3)
        seal = len(out) >= START and len(out) % 4 == 0 and numbers.random() < 0.85
        if seal:
            struct.pack_into("<I", out, 32, checksum(out))
        return bytes(out), done, seal

    def _place(self, out: bytearray) -> int:
        """Mostly in the body: nearly every change of the header is refused by its first comparison."""
        if len(out) > START and self.random.random() < 0.9:
            return self.random.randrange(START, len(out))
        return self.random.randrange(len(out)) if out else 0

    def _flip(self, out: bytearray, other: bytes) -> None:
        for _ in range(self.random.choice((1, 1, 2, 8))):
            if out:
                out[self._place(out)] ^= 1 << self.random.randrange(8)

    def _bytes(self, out: bytearray, other: bytes) -> None:
        for _ in range(self.random.choice((1, 1, 2, 4))):
            if out:
                out[self._place(out)] = self.random.choice((0, 1, 127, 128, 242, 243, 255, self.random.randrange(256)))

    def _words(self, out: bytearray, other: bytes) -> None:
        at, size = self._place(out) & ~1, self.random.choice((2, 4, 4))
        word = self.random.choice(_WORDS) if self.random.random() < 0.7 else self.random.getrandbits(32)
        if len(out) >= at + size:
            out[at : at + size] = (word & (1 << 8 * size) - 1).to_bytes(size, "little")

    def _header(self, out: bytearray, other: bytes) -> None:
        names = FREE_FIELDS if self.random.random() < 0.8 else tuple(FIELDS)
        at, size = FIELDS[self.random.choice(names)]
        if len(out) < at + size:
            return
        old = int.from_bytes(out[at : at + size], "little")
        new = self.random.choice(
            (old + 1, old - 1, old + 4, old - 4, old // 2, self.random.choice(_WORDS), self.random.randrange(40),
             self.random.getrandbits(8 * size))
        )  # fmt: skip
        out[at : at + size] = (new & (1 << 8 * size) - 1).to_bytes(size, "little")

    def _cut(self, out: bytearray, other: bytes) -> None:
        del out[self._place(out) & (~3 if self.random.random() < 0.8 else ~0) :]

    def _longer(self, out: bytearray, other: bytes) -> None:
        nbytes = self.random.choice((1, 4, 4, 8, 64, 512))
        out += bytes(nbytes) if self.random.random() < 0.5 else self.random.randbytes(nbytes)

    def _splice(self, out: bytearray, other: bytes) -> None:
        """A stretch of another frame over or between the bytes of this one, at boundaries of sections."""
        if len(other) <= START or not out:
            return
        begin = self.random.randrange(START, len(other)) & ~3
        piece = other[begin : begin + 4 * self.random.randrange(1, 33)]
        at = self._place(out) & ~3
        out[at : at + (len(piece) if self.random.random() < 0.7 else 0)] = piece

    def _swap(self, out: bytearray, other: bytes) -> None:
        a, b = self._place(out) & ~3, self._place(out) & ~3
        if len(out) >= max(a, b) + 4:
            out[a : a + 4], out[b : b + 4] = out[b : b + 4], out[a : a + 4]

    def _random_body(self, out: bytearray, other: bytes) -> None:
        del out[START:]
        nbytes = 4 * self.random.randrange(self.random.choice((4, 32, 128)))
        out += self.random.randbytes(nbytes) if self.random.random() < 0.7 else self._sparse_bits(nbytes)
        if len(out) >= START:
            struct.pack_into("<I", out, 28, nbytes)

    def _sparse_bits(self, nbytes: int) -> bytes:
        """Mostly zeros: long runs in unary codes, small numbers elsewhere."""
        body = bytearray(nbytes)
        for _ in range(self.random.randrange(1, 9) if nbytes else 0):
            body[self.random.randrange(nbytes)] |= 1 << self.random.randrange(8)
        return bytes(body)
