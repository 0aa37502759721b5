"""The counter-based random numbers, in np.uint32: a function of (seed, step, rank, name, element)."""

from __future__ import annotations

import zlib

import numpy as np


def word(x: int | np.ndarray) -> np.ndarray:
    """x modulo 2^32 as a uint32 array (arrays wrap around silently; NumPy scalars would warn)."""
    if isinstance(x, int):
        return np.array([x % 2**32], dtype=np.uint32)
    return x.astype(np.uint32)


def mix(x: np.ndarray) -> np.ndarray:
    """A bijection of 32-bit words in which every input bit reaches every output bit."""
    x = x ^ (x >> np.uint32(16))
    x = x * word(0x7FEB352D)
    x = x ^ (x >> np.uint32(15))
    x = x * word(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def key(seed: int, step: int, rank: int, name: str) -> np.ndarray:
    """(1,) uint32: the stream of one parameter on one rank at one step."""
    k = mix(word(seed) ^ word(0x9E3779B9))
    k = mix(k ^ word(step))
    k = mix(k ^ word(rank))
    return mix(k ^ word(zlib.crc32(name.encode("utf-8"))))


def random(k: np.ndarray, n: int) -> np.ndarray:
    """(n,) uint32: the words of elements 0 .. n-1 of the stream k."""
    i = np.arange(n, dtype=np.uint32)
    return mix(mix(i ^ k) ^ mix(k + word(0x9E3779B9)))


def uniform(k: np.ndarray, n: int) -> np.ndarray:
    """(n,) float32 in [0, 1): 24 bits each, all exactly representable."""
    return (random(k, n) >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)


def coin(k: np.ndarray, n: int) -> np.ndarray:
    """(n,) 0 or 1."""
    return random(k, n) & np.uint32(1)
