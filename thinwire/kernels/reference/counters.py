"""Random numbers and checksums from counters: the same bits on every device, and never torch's global state."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from thinwire.kernels.uploads import upload

_MASK32 = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9
_MUL1 = 0x7FEB352D
_MUL2 = 0x846CA68B

_COINS_ON_HOST = 1 << 16  # at once: what fits into a core's cache
_COINS_ELSEWHERE = 1 << 22  # where every chunk costs a dozen launches


def _as_int32(value: int) -> int:
    """The signed 32-bit number with the same bits, so that torch's int32 arithmetic wraps like uint32."""
    value &= _MASK32
    return value - (1 << 32) if value >= 1 << 31 else value


def _mix_int(x: int) -> int:
    """The 32-bit finaliser, on a Python integer."""
    x &= _MASK32
    x ^= x >> 16
    x = (x * _MUL1) & _MASK32
    x ^= x >> 15
    x = (x * _MUL2) & _MASK32
    return x ^ (x >> 16)


def _mix(x: Tensor) -> Tensor:  # (n,) int32, changed in place -> (n,) int32
    """The same finaliser on int32; shifts are made logical by masking off the copied sign bits."""
    x ^= (x >> 16) & 0xFFFF
    x *= _as_int32(_MUL1)
    x ^= (x >> 15) & 0x1FFFF
    x *= _as_int32(_MUL2)
    x ^= (x >> 16) & 0xFFFF
    return x


def stream_key(seed: int, step: int, rank: int, name: str) -> int:
    """Return the 32-bit key of the random stream of one parameter on one rank at one step."""
    key = _mix_int(seed ^ _GOLDEN)
    key = _mix_int(key ^ (step & _MASK32))
    key = _mix_int(key ^ (rank & _MASK32))
    return _mix_int(key ^ zlib.crc32(name.encode()))


def stream_salt(key: int) -> int:
    """The second word that a stream mixes in, as a signed 32-bit number."""
    return _as_int32(_mix_int(key + _GOLDEN))


def _random(key: int, start: int, count: int, device: torch.device) -> Tensor:  # -> (count,) int32
    """random(key, i) = mix(mix(i ^ key) ^ mix(key + golden)) for i = start .. start + count."""
    counter = torch.arange(start, start + count, dtype=torch.int64, device=device).to(torch.int32)
    mixed = _mix(counter ^ _as_int32(key))
    return _mix(mixed ^ stream_salt(key))


def uniform(key: int, count: int, device: torch.device, start: int = 0) -> Tensor:  # -> (count,) float32
    """Return uniform numbers in [0, 1) with 24 bits each, the same on every device."""
    return ((_random(key, start, count, device) >> 8) & 0xFFFFFF).to(torch.float32) * 2.0**-24


def coins(streams: Sequence[tuple[int, int, int]], device: torch.device) -> Tensor:  # -> (all counts,) bool
    """Return fair coin flips from the same counters, for every stream (key, first counter, count) in order.

    Worked out chunk by chunk: an element takes some 40 bytes on the way, and a byte in the end.
    """
    ends = list(accumulate(count for _, _, count in streams))
    total = ends[-1] if ends else 0
    rows = [  # of every stream: its end, the counter that place 0 of the whole would have, and what its numbers mix in
        (end, _as_int32(start + count - end), _as_int32(key), stream_salt(key))
        for (key, start, count), end in zip(streams, ends, strict=True)
    ]
    table = upload(torch.tensor(rows, dtype=torch.int64), device)  # (S, 4)
    bounds = table[:, 0].contiguous() if streams else table
    flips = torch.empty(total, dtype=torch.bool, device=device)
    chunk = _COINS_ON_HOST if device.type == "cpu" else _COINS_ELSEWHERE
    for start in range(0, total, chunk):
        place = torch.arange(start, min(start + chunk, total), dtype=torch.int64, device=device)
        stream = torch.bucketize(place, bounds, right=True)
        first, keys, salts = table[stream, 1:].to(torch.int32).unbind(dim=1)
        mixed = _mix((place + first).to(torch.int32) ^ keys)
        flips[start : start + place.numel()] = _mix(mixed ^ salts) & 1
    return flips


def checksum(words: Tensor, start: int = 0) -> Tensor:  # (n,) int32 -> () int64 in [0, 2**32)
    """Return sum over i of mix(word_i ^ mix(start + i)) modulo 2**32.

    Every word passes through its own nonlinear map, so any changed, swapped or moved word shows with probability
    1 - 2**-32, and the sum may be taken in any order, in parallel, on any device.
    """
    position = torch.arange(start, start + words.numel(), dtype=torch.int64, device=words.device).to(torch.int32)
    return _mix(_mix(position) ^ words).sum(dtype=torch.int64) & _MASK32


def checksum_around(words: Tensor, hole: int) -> Tensor:  # (n,) int32 -> () int64 in [0, 2**32)
    """The checksum of all words but the one at ``hole``: those behind it count as if they followed those before it."""
    return (checksum(words[:hole]) + checksum(words[hole + 1 :], hole)) & _MASK32


def frame_heads(frames: Sequence[Tensor]) -> Tensor:  # P of (B,) uint8 -> (P, 10) int32
    """Of frames of one length: the nine words of the header, and the checksum of all words but the ninth."""
    words = [frame.view(torch.int32) for frame in frames]
    return torch.stack([torch.cat([own[:9], checksum_around(own, 8).to(torch.int32)[None]]) for own in words])
