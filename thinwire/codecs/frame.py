"""The frame: one contiguous uint8 buffer with a 36-byte header. docs/wire-format.md is its specification.

A frame that came from the wire is untrusted: every length, count and range is checked before anything is read,
nothing is read past the end, and whatever is wrong raises one FrameError that says what.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from thinwire.engine.context import ExchangeContext
from thinwire.errors import FrameError
from thinwire.kernels import FRAME_LIMIT, checksum_around, first_nonfinite, frame_heads
from thinwire.kernels.uploads import once_a_thread, upload

MAGIC = b"TW"
VERSION = 1
HEADER = struct.Struct("<2sBBIIBBBBIIIII")
HEADER_NBYTES = HEADER.size  # 36
_CHECKSUM_AT = 32
_FLAGS_AT = 15
_STEP_AT = 24

KINDS = {"sparse": 1, "signs": 2, "ternary": 3, "levels": 4, "dense": 5}


Content = TypeVar("Content")


class Decoded(NamedTuple, Generic[Content]):
    """What a frame says: its coded part, its dense tail, (t,) float32, and whether its sender's alarm rings."""

    content: Content
    tail: Tensor
    alarm: bool


@dataclass(frozen=True)
class Header:
    """The fields of a frame's header that vary; the rest is fixed by the format."""

    kind: str
    numel: int  # coded elements that the frame speaks about
    count: int  # entries of a sparse frame, scales of a sign or ternary frame
    tail: int  # dense float32 elements behind the coded part
    layout: int  # fingerprint of what is exchanged
    step: int
    index_code: int = 0
    value_code: int = 0
    parameter: int = 0  # Rice parameter, or bits a level
    alarm: bool = False  # a rank that this frame speaks for has a gradient that is not finite


def padded(nbytes: int) -> int:
    """Sections start at multiples of four bytes."""
    return -(-nbytes // 4) * 4


def frame_size(*section_nbytes: int) -> int:
    """Return the length of a frame with sections of these lengths."""
    return HEADER_NBYTES + sum(padded(nbytes) for nbytes in section_nbytes)


def as_bytes(tensor: Tensor) -> Tensor:  # any dtype -> (nbytes,) uint8
    """View a tensor's memory as bytes."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def pack_header(header: Header, body_nbytes: int) -> bytes:
    """The header's bytes, the checksum left zero."""
    return HEADER.pack(
        MAGIC, VERSION, KINDS[header.kind], header.numel, header.count, header.index_code, header.value_code,
        header.parameter, int(header.alarm), header.tail, header.layout, header.step & 0xFFFFFFFF, body_nbytes, 0,
    )  # fmt: skip


@once_a_thread(most=256)
def _header_on_device(header: Header, body_nbytes: int, device: torch.device) -> Tensor:  # (36,) uint8
    return upload(torch.frombuffer(bytearray(pack_header(header, body_nbytes)), dtype=torch.uint8), device)


def is_finished(frame: Tensor) -> bool:  # (B,) uint8
    """Whether a frame that a GPU wrote is complete: see SparseCodec.encode."""
    return int(frame[0]) == MAGIC[0]


class Section(Protocol):
    """What writes itself into its place in a frame."""

    @property
    def nbytes(self) -> int: ...

    def write(self, out: Tensor) -> None: ...  # (nbytes,) uint8


def header_words(header: Header, body_nbytes: int) -> tuple[int, ...]:
    """The header's first eight words: all but the checksum."""
    return struct.unpack("<8I", pack_header(header, body_nbytes)[: 4 * 8])


def build(
    header: Header,
    sections: Sequence[Tensor | Section],
    nbytes: int | None = None,
    flag: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:  # uint8 sections -> (B,) uint8
    """Put header and sections into one buffer, zero-filled up to ``nbytes`` where that is given.

    ``flag`` is an alarm that only the device knows of yet; ``out`` is where the frame should lie, with its length.
    """
    device = next((section.device for section in sections if isinstance(section, Tensor)), torch.device("cpu"))
    body = frame_size(*(section.nbytes for section in sections)) - HEADER_NBYTES
    length = nbytes if nbytes is not None else HEADER_NBYTES + body
    frame = out if out is not None else torch.empty(length, dtype=torch.uint8, device=device)
    assert frame.numel() >= HEADER_NBYTES + body, "a frame larger than its budget must not be built"
    if device.type == "cpu":
        frame[:HEADER_NBYTES] = torch.frombuffer(bytearray(pack_header(header, body)), dtype=torch.uint8)
    else:  # all but the step is the same at every step, and lies on the device already
        frame[:HEADER_NBYTES] = _header_on_device(replace(header, step=0), body, device)
        step = header.step & 0xFFFFFFFF
        frame[_STEP_AT : _STEP_AT + 4].view(torch.int32).fill_(step - (1 << 32) if step >= 1 << 31 else step)
    if flag is not None:
        frame[_FLAGS_AT : _FLAGS_AT + 1] |= (flag != 0).to(torch.uint8)
    start = HEADER_NBYTES
    for section in sections:
        stop = start + section.nbytes
        if isinstance(section, Tensor):
            frame[start:stop] = section
        else:
            section.write(frame[start:stop])
        start += padded(section.nbytes)
        if stop < start:
            frame[stop:start] = 0
    if start < frame.numel():
        frame[start:] = 0
    frame[_CHECKSUM_AT:HEADER_NBYTES] = as_bytes(_frame_checksum(frame).to(torch.int32))
    return frame


def _frame_checksum(frame: Tensor) -> Tensor:  # -> () int64
    """Of everything but the checksum field; the zero filling counts too, so that a cut frame is found wherever."""
    return checksum_around(frame.view(torch.int32), _CHECKSUM_AT // 4)


def _first_bytes(frame: Tensor) -> bytes:  # (B,) uint8, contiguous -> the header's bytes
    if frame.device.type == "cpu":
        return ctypes.string_at(frame.data_ptr(), HEADER_NBYTES)
    return bytes(frame[:HEADER_NBYTES].tolist())


def entries_of(frame: Tensor) -> int:  # (B,) uint8
    """How many entries a frame of our own says that it has."""
    count: int = HEADER.unpack(_first_bytes(frame))[4]
    return count


@dataclass(frozen=True)
class Head:
    """The header of a frame, and the checksum that it should have."""

    fields: bytes
    checksum: int


def read_heads(frames: Sequence[Tensor]) -> list[Head]:  # P of (B,) uint8, on a GPU
    """Read all headers and compute all checksums with one wait for the device."""
    rows = frame_heads(frames).cpu()  # (P, 10) int32
    return [Head(bytes(as_bytes(row[:9]).tolist()), int(row[9]) & 0xFFFFFFFF) for row in rows]


class Body:
    """The sections of a checked frame, taken one after the other."""

    def __init__(self, content: Tensor, origin: str) -> None:
        self._content, self._start, self.origin = content, 0, origin

    @property
    def remaining(self) -> int:
        return self._content.numel() - self._start

    def take(self, nbytes: int, what: str) -> Tensor:  # -> (nbytes,) uint8
        if nbytes < 0 or padded(nbytes) > self.remaining:
            raise FrameError(
                f"bad frame from {self.origin}: {what} needs {nbytes} bytes, {self.remaining} are left in the body"
            )
        section = self._content[self._start : self._start + nbytes]
        self._start += padded(nbytes)
        return section

    def take_floats(self, count: int, what: str) -> Tensor:  # -> (count,) float32
        return self.take(4 * count, what).view(torch.float32)

    def finish(self) -> None:
        if self.remaining:
            raise FrameError(f"bad frame from {self.origin}: {self.remaining} bytes of the body belong to nothing")


def _check(origin: str, *expected: tuple[bool, str]) -> None:
    """Refuse a frame with the sentence of the first of these that does not hold."""
    for holds, otherwise in expected:
        if not holds:
            raise FrameError(f"bad frame from {origin}: {otherwise}")


def open_frame(
    frame: Tensor,
    context: ExchangeContext,
    kind: str,
    numel: int,
    tail: int,
    device: torch.device,
    origin: str,
    head: Head | None = None,
) -> tuple[Header, Body]:  # frame: (B,) uint8
    """Check the header against what this exchange expects, check the checksum, and return header and body.

    ``head`` is what ``read_heads`` read of a frame on a GPU.
    """
    _check(
        origin,
        (frame.dtype == torch.uint8 and frame.dim() == 1, "it is not a vector of bytes"),
        (frame.numel() >= HEADER_NBYTES, f"{frame.numel()} bytes are too short for the {HEADER_NBYTES}-byte header"),
        (frame.numel() % 4 == 0, f"its length {frame.numel()} is not a multiple of 4"),
    )
    if frame.storage_offset() % 4 or frame.data_ptr() % 4 or not frame.is_contiguous():
        frame = frame.clone()
    fields = HEADER.unpack(head.fields if head is not None else _first_bytes(frame))
    magic, version, kind_code, numel_, count, index_code, value_code, parameter, flags = fields[:9]
    tail_, layout, step, body_nbytes, sum_ = fields[9:]
    other_layout = "it carries other parameters than this rank is exchanging (layout fingerprints differ)"
    room = frame.numel() - HEADER_NBYTES
    _check(
        origin,
        (magic == MAGIC, f"it starts with {magic!r}, not with {MAGIC!r}"),
        (version == VERSION, f"its format version is {version}, this library reads version {VERSION}"),
        (flags <= 1, f"its flags {flags} are unknown"),
        (kind_code == KINDS[kind], f"its kind is {kind_code}, expected {KINDS[kind]} ({kind})"),
        (layout == context.layout.fingerprint, other_layout),
        (step == context.step & 0xFFFFFFFF, f"it belongs to step {step}, this rank is at step {context.step}"),
        (numel_ == numel, f"it speaks about {numel_} elements, expected {numel}"),
        (tail_ == tail, f"it has a dense tail of {tail_} elements, expected {tail}"),
        (kind == "sparse" or index_code == value_code == 0, "it names a coding that its kind does not have"),
        (kind in ("sparse", "levels") or parameter == 0, f"its kind has no parameter, it has {parameter}"),
        (count <= max(numel, 1), f"it claims {count} entries for {numel} elements"),
        (body_nbytes % 4 == 0, f"its body length {body_nbytes} is not a multiple of 4"),
        (body_nbytes <= room, f"its body of {body_nbytes} bytes does not fit into {room}"),
    )
    computed = head.checksum if head is not None else int(_frame_checksum(frame))
    _check(origin, (computed == sum_, "its checksum does not match"))
    header = Header(kind, numel_, count, tail_, layout, step, index_code, value_code, parameter, alarm=bool(flags))
    return header, Body(frame[HEADER_NBYTES : HEADER_NBYTES + body_nbytes].to(device), origin)


def check_numbers(read: Iterable[tuple[str, bool, Sequence[Tensor]]]) -> None:
    """Refuse numbers whose sums could overflow; every frame gives its origin, its alarm and what it holds, as float32.

    Frames whose sender's alarm rings may hold anything: their exchange ends before any of it is kept.
    """
    numbers = [(origin, tensor) for origin, alarm, tensors in read if not alarm for tensor in tensors]
    bad = first_nonfinite([tensor for _, tensor in numbers], FRAME_LIMIT)
    if bad is not None:
        raise FrameError(
            f"bad frame from {numbers[bad][0]}: it holds an inf, a nan or a number beyond {FRAME_LIMIT:.1e}, which no "
            "finite gradient makes"
        )
