"""A second implementation of docs/wire-format.md in plain Python, written from the document and not from the engine.

Nothing of thinwire or torch is imported here: tests hold both implementations against each other.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

KINDS = {"sparse": 1, "signs": 2, "ternary": 3, "levels": 4, "dense": 5}
INDEX_CODES = {"int32": 0, "delta16": 1, "rice": 2}
VALUE_CODES = {"fp32": 0, "fp16": 1, "bf16": 2, "int8": 3, "int4": 4, "int2": 5}
HEADER = "<2sBBIIBBBBIIIII"


@dataclass
class Frame:
    """What a frame says, as Python numbers."""

    kind: str
    numel: int
    layout: int
    step: int
    tail: list[float]
    indices: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    index_coding: str = "int32"
    value_coding: str = "fp32"
    parameter: int = 0
    scales: list[float] = field(default_factory=list)
    negative: list[bool] = field(default_factory=list)
    trits: list[int] = field(default_factory=list)
    levels: list[int] = field(default_factory=list)  # as they travel, 0 .. 2 N


# -------------------------------------------------------------------------------------------- random numbers, checksum


def mix(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = x * 0x846CA68B % 2**32
    return x ^ (x >> 16)


def random_word(key: int, i: int) -> int:
    """Number i of a stream of random numbers."""
    return mix(mix((i ^ key) % 2**32) ^ mix((key + 0x9E3779B9) % 2**32))


def checksum(frame: bytes) -> int:
    """Of a whole frame: all words but the ninth, which is the checksum itself."""
    words = struct.unpack(f"<{len(frame) // 4}I", frame)
    counted = words[:8] + words[9:]
    return sum(mix(word ^ mix(i)) for i, word in enumerate(counted)) % 2**32


def sealed(frame: bytes) -> bytes:
    """The frame with a checksum that fits whatever else it says."""
    return frame[:32] + struct.pack("<I", checksum(frame)) + frame[36:]


# ------------------------------------------------------------------------------------------------------------- packing


def bits_to_bytes(bits: list[int]) -> bytes:
    return bytes(sum(bit << place for place, bit in enumerate(bits[i : i + 8])) for i in range(0, len(bits), 8))


def bytes_to_bits(data: bytes) -> list[int]:
    return [byte >> place & 1 for byte in data for place in range(8)]


def pack_uints(numbers: list[int], width: int) -> bytes:
    return bits_to_bytes([number >> place & 1 for number in numbers for place in range(width)])


def unpack_uints(data: bytes, count: int, width: int) -> list[int]:
    bits = bytes_to_bits(data)
    return [sum(bits[i * width + place] << place for place in range(width)) for i in range(count)]


def pack_trits(trits: list[int]) -> bytes:
    groups = [trits[i : i + 5] for i in range(0, len(trits), 5)]
    return bytes(sum((trit + 1) * 3**place for place, trit in enumerate(group)) for group in groups)


def unpack_trits(data: bytes, count: int) -> list[int]:
    assert all(byte < 243 for byte in data)
    return [byte // 3**place % 3 - 1 for byte in data for place in range(5)][:count]


# -------------------------------------------------------------------------------------------------------------- values


def float32(x: float) -> float:
    """x rounded to the nearest float32."""
    return float(struct.unpack("<f", struct.pack("<f", x))[0])


def floats(numbers: list[float]) -> bytes:
    return struct.pack(f"<{len(numbers)}f", *numbers)


def to_half(x: float) -> bytes:
    return struct.pack("<e", max(-65504.0, min(65504.0, x)) if math.isfinite(x) else x)


def to_bfloat(x: float) -> bytes:
    word = struct.unpack("<I", struct.pack("<f", x))[0]
    top = word + 0x7FFF + (word >> 16 & 1) >> 16  # round to nearest, ties to even
    largest = word >> 31 << 15 | 0x7F7F
    return struct.pack("<H", min(top, largest) if math.isfinite(x) else word >> 16)


def encode_values(coding: str, values: list[float]) -> list[bytes]:
    if coding == "fp32":
        return [floats(values)]
    if coding == "int4":
        return encode_four_bits(values)
    if coding == "int2":
        return encode_two_bits(values)
    if coding != "int8":
        return [b"".join(map(to_half if coding == "fp16" else to_bfloat, values))]
    scales, codes = [], []
    for start in range(0, len(values), 256):
        chunk = values[start : start + 256]
        scale = float32(max(map(abs, chunk)) / 127)
        scales.append(scale)
        codes += [max(-127, min(127, round(float32(x / (scale or 1.0))))) for x in chunk]
    return [floats(scales), struct.pack(f"<{len(codes)}b", *codes)]


def level(ends: tuple[float, float], share: float) -> float:
    """A point between the ends of a chunk, every operation rounded to float32."""
    low, high = ends
    return float32(low + float32(float32(high - low) * share))


LEVELS = (0, 4, 10, 17, 25, 35, 48, 64)


def from_bfloat(data: bytes) -> float:
    return struct.unpack("<f", b"\0\0" + data)[0]


def encode_four_bits(values: list[float]) -> list[bytes]:
    ends, codes = b"", []
    for start in range(0, len(values), 128):
        chunk = values[start : start + 128]
        sent = to_bfloat(min(map(abs, chunk))) + to_bfloat(max(map(abs, chunk)))
        ends += sent
        between = (from_bfloat(sent[:2]), from_bfloat(sent[2:]))
        for value in chunk:
            above = [a + b for a, b in pairwise(LEVELS) if abs(value) > level(between, (a + b) / 128)]
            codes.append(len(above) + (8 if value < 0 else 0))
    codes += [0] * (len(codes) % 2)
    return [ends, bytes(low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True))]


def decode_four_bits(ends: bytes, codes: bytes, count: int) -> list[float]:
    values = []
    for i in range(count):
        code, at = codes[i // 2] >> 4 * (i % 2) & 15, 4 * (i // 128)
        between = (from_bfloat(ends[at : at + 2]), from_bfloat(ends[at + 2 : at + 4]))
        values.append(level(between, LEVELS[code & 7] / 64) * (-1.0 if code & 8 else 1.0))
    return values


def sum_of(numbers: list[float]) -> float:
    """In double precision, the second half of 64 added to the first until one is left."""
    left = numbers + [0.0] * (64 - len(numbers))
    while len(left) > 1:
        left = [a + b for a, b in zip(left[: len(left) // 2], left[len(left) // 2 :], strict=True)]
    return left[0]


def encode_two_bits(values: list[float]) -> list[bytes]:
    levels, codes = b"", []
    for start in range(0, len(values), 64):
        chunk = values[start : start + 64]
        mean = float32(sum_of([abs(value) for value in chunk]) / len(chunk))
        for reaches in (False, True):
            members = [abs(value) if (abs(value) >= mean) == reaches else 0.0 for value in chunk]
            count = sum((abs(value) >= mean) == reaches for value in chunk)
            levels += to_bfloat(float32(sum_of(members) / count) if count else 0.0)
        codes += [(abs(value) >= mean) + 2 * (value < 0) for value in chunk]
    codes += [0] * (-len(codes) % 4)
    return [
        levels,
        bytes(sum(code << 2 * j for j, code in enumerate(codes[i : i + 4])) for i in range(0, len(codes), 4)),
    ]


def decode_two_bits(levels: bytes, codes: bytes, count: int) -> list[float]:
    values = []
    for i in range(count):
        code, at = codes[i // 4] >> 2 * (i % 4) & 3, 4 * (i // 64)
        magnitude = from_bfloat(levels[at + 2 * (code & 1) :][:2])
        values.append(-magnitude if code & 2 else magnitude)
    return values


# ------------------------------------------------------------------------------------------------------------- indices


def gaps_of(indices: list[int]) -> list[int]:
    return [index - before - 1 for before, index in zip([-1, *indices], indices, strict=False)]


def rice_parameter(indices: list[int], numel: int) -> int:
    """The writer's choice: the shortest of five parameters around the one that is best in the worst case."""
    k, gaps = len(indices), gaps_of(indices)
    if not k:
        return 0
    best = min(range(31), key=lambda p: k * (p + 1) + ((numel - k) >> p))

    def nbytes(p: int) -> int:
        return padded(-(-k * p // 8)) + padded(-(-sum((gap >> p) + 1 for gap in gaps) // 8))

    return min(range(max(0, best - 2), best + 3), key=nbytes)


def encode_indices(coding: str, indices: list[int], parameter: int) -> list[bytes]:
    if coding == "int32":
        return [struct.pack(f"<{len(indices)}i", *indices)]
    gaps = gaps_of(indices)
    if coding == "delta16":
        words = [word for gap in gaps for word in [0xFFFF] * (gap // 0xFFFF) + [gap % 0xFFFF]]
        return [struct.pack(f"<{len(words)}H", *words)]
    low = pack_uints([gap % 2**parameter for gap in gaps], parameter)
    return [low, bits_to_bytes([bit for gap in gaps for bit in [0] * (gap >> parameter) + [1]])]


def index_budget(coding: str, numel: int, k: int, holds_any: bool = False, spread: Any = ()) -> int:
    if k == 0:
        return 0
    if coding == "int32":
        return 4 * k
    if coding == "delta16":
        return padded(2 * (k + (numel // 65535 if holds_any else min(numel // 65535, 8 + k // 256))))
    bits = min(k * (p + 1) + ((numel - k) >> p) for p in range(31))
    if k > 4096 and not holds_any:
        means = []
        for p in range(31):
            shares = [(part_k, (1 - part_k / part) ** 2**p) for part, part_k in spread or [(numel, k)]]
            means.append(sum(part_k * (p + 1 + q / (1 - q)) for part_k, q in shares))
        bits = min(bits, math.ceil(1.005 * min(means)))
    return padded(-(-bits // 8)) + 8


# -------------------------------------------------------------------------------------------------------------- frames


def padded(nbytes: int) -> int:
    return nbytes + -nbytes % 4


def encode(frame: Frame, nbytes: int | None = None) -> bytes:
    """The bytes of a frame, zero-filled up to ``nbytes``."""
    count, sections = 0, [floats(frame.tail)]
    if frame.kind == "sparse":
        count = len(frame.indices)
        sections += encode_values(frame.value_coding, frame.values)
        sections += encode_indices(frame.index_coding, frame.indices, frame.parameter)
    elif frame.kind in ("signs", "ternary"):
        count = len(frame.scales)
        coded = bits_to_bytes(frame.negative) if frame.kind == "signs" else pack_trits(frame.trits)
        sections += [floats(frame.scales), coded]
    elif frame.kind == "levels":
        sections += [pack_uints(frame.levels, frame.parameter)]
    else:
        sections += [floats(frame.values)]
    body = b"".join(section + bytes(-len(section) % 4) for section in sections)
    header = struct.pack(
        HEADER, b"TW", 1, KINDS[frame.kind], frame.numel, count, INDEX_CODES[frame.index_coding],
        VALUE_CODES[frame.value_coding], frame.parameter, 0, len(frame.tail), frame.layout, frame.step, len(body), 0,
    )  # fmt: skip
    whole = header + body
    return sealed(whole + bytes((nbytes if nbytes is not None else len(whole)) - len(whole)))


def decode(data: bytes) -> Frame:
    """Read a good frame; anything else fails an assertion."""
    magic, version, kind, numel, count, index_code, value_code, parameter, zero, *rest = struct.unpack(
        HEADER, data[:36]
    )
    tail, layout, step, body_nbytes, checksum_ = rest
    assert (magic, version, zero, checksum_) == (b"TW", 1, 0, checksum(data))
    body, start = data[36 : 36 + body_nbytes], 0
    assert len(body) == body_nbytes and not any(data[36 + body_nbytes :])

    def take(nbytes: int) -> bytes:
        nonlocal start
        section = body[start : start + nbytes]
        start += padded(nbytes)
        assert start <= len(body)
        return section

    def take_floats(number: int) -> list[float]:
        return list(struct.unpack(f"<{number}f", take(4 * number)))

    name = {code: name for name, code in KINDS.items()}[kind]
    frame = Frame(name, numel, layout, step, take_floats(tail), parameter=parameter)
    if name == "sparse":
        frame.value_coding = {code: name for name, code in VALUE_CODES.items()}[value_code]
        frame.index_coding = {code: name for name, code in INDEX_CODES.items()}[index_code]
        if frame.value_coding == "fp32":
            frame.values = take_floats(count)
        elif frame.value_coding == "fp16":
            frame.values = list(struct.unpack(f"<{count}e", take(2 * count)))
        elif frame.value_coding == "bf16":
            words = struct.unpack(f"<{count}H", take(2 * count))
            frame.values = [struct.unpack("<f", struct.pack("<I", word << 16))[0] for word in words]
        elif frame.value_coding == "int2":
            frame.values = decode_two_bits(take(4 * -(-count // 64)), take(-(-count // 4)), count)
        elif frame.value_coding == "int4":
            frame.values = decode_four_bits(take(4 * -(-count // 128)), take(-(-count // 2)), count)
        else:
            scales = take_floats(-(-count // 256))
            codes = struct.unpack(f"<{count}b", take(count))
            frame.values = [float32(code * scales[i // 256]) for i, code in enumerate(codes)]
        last = -1
        if frame.index_coding == "int32":
            frame.indices = list(struct.unpack(f"<{count}i", take(4 * count)))
        elif frame.index_coding == "delta16":
            for word in struct.unpack(f"<{(len(body) - start) // 2}H", take(len(body) - start)):
                last += word if word == 0xFFFF else word + 1
                frame.indices += [last] if word != 0xFFFF else []
            frame.indices = frame.indices[:count]  # an odd number of words has a zero word behind it
        else:
            lows = unpack_uints(take(-(-count * parameter // 8)), count, parameter)
            quotient = 0
            for bit in bytes_to_bits(take(len(body) - start)):
                if bit:
                    last += (quotient << parameter) + lows[len(frame.indices)] + 1
                    frame.indices.append(last)
                quotient = 0 if bit else quotient + 1
        assert len(frame.indices) == count
    elif name in ("signs", "ternary"):
        frame.scales = take_floats(count)
        if name == "signs":
            frame.negative = [bool(bit) for bit in bytes_to_bits(take(-(-numel // 8)))][:numel]
        else:
            frame.trits = unpack_trits(take(-(-numel // 5)), numel)
    elif name == "levels":
        frame.levels = unpack_uints(take(-(-numel * parameter // 8)), numel, parameter)
    else:
        frame.values = take_floats(numel)
    assert start == len(body)
    return frame
