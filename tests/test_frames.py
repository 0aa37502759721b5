"""The frame: literal bytes of every kind and coding, a second implementation, and every way a frame can be bad."""

from __future__ import annotations

import math
import random
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plain_wire as plain
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire import kernels
from thinwire.codecs import FloatsCodec, LevelsCodec, SignsCodec, SparseCodec, TernaryCodec
from thinwire.engine.context import ExchangeContext, Hyper
from thinwire.engine.layout import Layout
from thinwire.engine.payloads import Signs, Sparse, Ternary
from thinwire.errors import FrameError

CPU = torch.device("cpu")
INDEX_CODINGS, VALUE_CODINGS = ("int32", "delta16", "rice"), ("fp32", "fp16", "bf16", "int8", "int4")
QUICK = settings(deadline=None, max_examples=60, derandomize=True)
STEP, TAIL = 7, [0.5]

# Offsets of the header's fields.
VERSION, KIND, NUMEL, COUNT, INDEX, VALUE, PARAMETER, ZERO = 2, 3, 4, 8, 12, 13, 14, 15
TAIL_NUMEL, LAYOUT, TURN, BODY, CHECKSUM, START = 16, 20, 24, 28, 32, 36


def turn_of(numel: int, tail: int = 1, step: int = STEP) -> ExchangeContext:
    layout = Layout.of([("w", 0, numel, True), ("b", 1, tail, False)])
    return ExchangeContext(layout, step, (Hyper(), Hyper()))


def to_tensor(frame: bytes) -> Tensor:
    return torch.frombuffer(bytearray(frame), dtype=torch.uint8) if frame else torch.zeros(0, dtype=torch.uint8)


def to_bytes(frame: Tensor) -> bytes:
    return bytes(frame.tolist())


# -------------------------------------------------------------------------------------------------------- golden bytes

# Entries 0, 5 and 69999 of 70000 with values 1, -2 and 3; room for four; a tail of 0.5; step 7; layout w:70000, b:1.
# The last gap is 69993: in delta16 an escape and 4458.
GOLDEN_SPARSE = {
    ("fp32", "int32"): """
        54570101 70110100 03000000 00000000 01000000 5cd7fd1d 07000000 1c000000 ed301769
        0000003f 0000803f 000000c0 00004040 00000000 05000000 6f110100 00000000 00000000""",
    ("fp32", "delta16"): """
        54570101 70110100 03000000 01000000 01000000 5cd7fd1d 07000000 18000000 a00c6562
        0000003f 0000803f 000000c0 00004040 00000400 ffff6a11 00000000 00000000""",
    ("fp32", "rice"): """
        54570101 70110100 03000000 02000c00 01000000 5cd7fd1d 07000000 1c000000 2ffbd268
        0000003f 0000803f 000000c0 00004040 00400069 01000000 03000800 00000000 00000000""",
    ("fp16", "int32"): """
        54570101 70110100 03000000 00010000 01000000 5cd7fd1d 07000000 18000000 7dc19015
        0000003f 003c00c0 00420000 00000000 05000000 6f110100 00000000""",
    ("fp16", "delta16"): """
        54570101 70110100 03000000 01010000 01000000 5cd7fd1d 07000000 14000000 a5890979
        0000003f 003c00c0 00420000 00000400 ffff6a11 00000000""",
    ("fp16", "rice"): """
        54570101 70110100 03000000 02010c00 01000000 5cd7fd1d 07000000 18000000 2c0aabca
        0000003f 003c00c0 00420000 00400069 01000000 03000800 00000000""",
    ("bf16", "int32"): """
        54570101 70110100 03000000 00020000 01000000 5cd7fd1d 07000000 18000000 39d477c7
        0000003f 803f00c0 40400000 00000000 05000000 6f110100 00000000""",
    ("bf16", "delta16"): """
        54570101 70110100 03000000 01020000 01000000 5cd7fd1d 07000000 14000000 e7d48d71
        0000003f 803f00c0 40400000 00000400 ffff6a11 00000000""",
    ("bf16", "rice"): """
        54570101 70110100 03000000 02020c00 01000000 5cd7fd1d 07000000 18000000 390ae630
        0000003f 803f00c0 40400000 00400069 01000000 03000800 00000000""",
    ("int8", "int32"): """
        54570101 70110100 03000000 00030000 01000000 5cd7fd1d 07000000 18000000 ad2dc06c
        0000003f 0683c13c 2aab7f00 00000000 05000000 6f110100 00000000""",
    ("int8", "delta16"): """
        54570101 70110100 03000000 01030000 01000000 5cd7fd1d 07000000 14000000 6ed2d583
        0000003f 0683c13c 2aab7f00 00000400 ffff6a11 00000000""",
    ("int8", "rice"): """
        54570101 70110100 03000000 02030c00 01000000 5cd7fd1d 07000000 18000000 3ec86ec3
        0000003f 0683c13c 2aab7f00 00400069 01000000 03000800 00000000""",
    ("int4", "int32"): """
        54570101 70110100 03000000 00040000 01000000 5cd7fd1d 07000000 18000000 625d1838
        0000003f 803f4040 d0070000 00000000 05000000 6f110100 00000000""",
    ("int4", "delta16"): """
        54570101 70110100 03000000 01040000 01000000 5cd7fd1d 07000000 14000000 97c23b31
        0000003f 803f4040 d0070000 00000400 ffff6a11 00000000""",
    ("int4", "rice"): """
        54570101 70110100 03000000 02040c00 01000000 5cd7fd1d 07000000 18000000 765079be
        0000003f 803f4040 d0070000 00400069 01000000 03000800 00000000""",
}
GOLDEN_EMPTY = """
    54570101 70110100 00000000 02000000 01000000 5cd7fd1d 07000000 04000000 3cba0eb7
    0000003f 00000000 00000000 00000000 00000000 00000000 00000000 00000000 00000000"""
# Eleven elements; blocks of eight and three; four bytes of filling.
GOLDEN_SIGNS = """
    54570102 0b000000 02000000 00000000 01000000 bccba071 07000000 10000000 1676be63
    0000003f 0000803e 0000c03f 59030000 00000000"""
GOLDEN_VOTES = """
    54570102 0b000000 00000000 00000000 01000000 bccba071 07000000 08000000 0b0400a8
    0000003f 59030000"""
GOLDEN_TERNARY = """
    54570103 0b000000 01000000 00000000 01000000 bccba071 07000000 0c000000 11bbb2aa
    0000003f 0000803e a74c0000"""
GOLDEN_SHARED = """
    54570103 0b000000 00000000 00000000 01000000 bccba071 07000000 08000000 f1c5a7f9
    0000003f a74c0000"""
# Sums of three ranks' trits, three bits each.
GOLDEN_LEVELS = """
    54570104 0b000000 00000000 00000300 01000000 bccba071 07000000 0c000000 4c425b5b
    0000003f 88c67ab0 00000000"""
GOLDEN_DENSE = """
    54570105 03000000 00000000 00000000 01000000 dd53eafa 07000000 10000000 bd7a6661
    0000003f 0000803f 000000c0 00004040"""

NEGATIVE = [True, False, False, True, True, False, True, False, True, True, False]
TRITS = [1, 0, -1, -1, 1, 0, 0, 1, 1, -1, -1]
LEVELS = [-3, -2, -1, 0, 1, 2, 3, 0, -3, 3, -1]
BLOCKS = ((8, 1), (3, 1))


@dataclass(frozen=True)
class Sample:
    """One good frame, how the engine makes it and reads it, and what must hold of whatever was read."""

    name: str
    frame: bytes
    numel: int
    encode: Callable[[], Tensor]
    decode: Callable[[Tensor], tuple[Any, Tensor]]
    check: Callable[[Any, Tensor], None]

    def read(self, frame: bytes | Tensor) -> tuple[Any, Tensor]:
        payload, tail = self.decode(frame if isinstance(frame, Tensor) else to_tensor(frame))
        self.check(payload, tail)
        return payload, tail


def sparse_sample(values: str, indices: str, text: str, count: int = 3) -> Sample:
    codec, context = SparseCodec(values, indices), turn_of(70000)
    payload = Sparse(torch.tensor([0, 5, 69999])[:count], torch.tensor([1.0, -2.0, 3.0])[:count], 70000, 4)

    def check(payload: Sparse, tail: Tensor) -> None:
        assert payload.indices.dtype == torch.int64 and payload.values.dtype == torch.float32
        assert payload.indices.shape == payload.values.shape and payload.indices.numel() <= 4
        listed = payload.indices.tolist()
        assert listed == sorted(set(listed)) and all(0 <= index < 70000 for index in listed)
        assert tail.shape == (1,)

    return Sample(
        f"sparse-{values}-{indices}" + ("" if count else "-empty"),
        bytes.fromhex(text),
        70000,
        lambda: codec.encode(context, payload, torch.tensor(TAIL)),
        lambda frame: codec.decode(context, frame, 70000, 4, 1, CPU, "rank 3"),
        check,
    )


def trits_of(levels: list[int], ranks: int) -> list[Tensor]:
    """Packed trits of so many ranks whose sums are these levels."""
    given_ = torch.tensor(levels, dtype=torch.int64)
    return [kernels.pack_trits((given_.sign() * (given_.abs() > rank)).to(torch.int8)) for rank in range(ranks)]


def read_levels(context: ExchangeContext, frame: Tensor, numel: int, ranks: int, tail: int) -> tuple[Tensor, Tensor]:
    """The levels: with a scale of N the mean is the sum, exactly."""
    part = torch.empty(numel)
    rest = LevelsCodec().decode_mean(context, frame, ranks, tail, [part], torch.tensor([float(ranks)]), "rank 3")
    return part, rest


def other_samples() -> list[Sample]:
    context, three, tail = turn_of(11), turn_of(3), torch.tensor(TAIL)
    signs = Signs(torch.tensor(NEGATIVE), torch.tensor([0.25, 1.5]), BLOCKS)
    votes = Signs(torch.tensor(NEGATIVE), torch.zeros(0), BLOCKS)
    trits = Ternary.of(torch.tensor(TRITS, dtype=torch.int8), torch.tensor([0.25]), ((11, 1),))
    values, shared = torch.tensor([1.0, -2.0, 3.0]), torch.tensor([0.25])
    nbytes = SignsCodec().nbytes(11, 2, 1) + 4

    def is_signs(payload: Signs, tail: Tensor) -> None:
        assert payload.negative.shape == (11,) and payload.negative.dtype == torch.bool and tail.shape == (1,)

    def is_trits(payload: Ternary, tail: Tensor) -> None:
        assert payload.trits.shape == (11,) and set(payload.trits.tolist()) <= {-1, 0, 1} and tail.shape == (1,)
        assert payload.scales.shape == (1,)

    def is_levels(payload: Tensor, tail: Tensor) -> None:
        assert payload.shape == (11,) and int(payload.abs().max()) <= 3 and tail.shape == (1,)

    def is_floats(payload: Tensor, tail: Tensor) -> None:
        assert payload.shape == (3,) and tail.shape == (1,)

    return [
        Sample(
            "signs", bytes.fromhex(GOLDEN_SIGNS), 11,
            lambda: SignsCodec().encode(context, signs, tail, nbytes),
            lambda frame: SignsCodec().decode(context, frame, BLOCKS, 2, 1, CPU, "rank 3"), is_signs,
        ),
        Sample(
            "votes", bytes.fromhex(GOLDEN_VOTES), 11,
            lambda: SignsCodec().encode(context, votes, tail),
            lambda frame: SignsCodec().decode(context, frame, BLOCKS, 0, 1, CPU, "rank 3"), is_signs,
        ),
        Sample(
            "ternary", bytes.fromhex(GOLDEN_TERNARY), 11,
            lambda: TernaryCodec().encode(context, trits, tail, with_scales=True),
            lambda frame: TernaryCodec().decode(context, frame, ((11, 1),), None, 1, CPU, "rank 3"), is_trits,
        ),
        Sample(
            "ternary-shared", bytes.fromhex(GOLDEN_SHARED), 11,
            lambda: TernaryCodec().encode(context, trits, tail, with_scales=False),
            lambda frame: TernaryCodec().decode(context, frame, ((11, 1),), shared, 1, CPU, "rank 3"), is_trits,
        ),
        Sample(
            "levels", bytes.fromhex(GOLDEN_LEVELS), 11,
            lambda: LevelsCodec().encode_sums(context, trits_of(LEVELS, 3), 11, tail, LevelsCodec().nbytes(11, 3, 1)),
            lambda frame: read_levels(context, frame, 11, 3, 1), is_levels,
        ),
        Sample(
            "dense", bytes.fromhex(GOLDEN_DENSE), 3,
            lambda: FloatsCodec().encode(three, values, tail),
            lambda frame: FloatsCodec().decode(three, frame, 3, 1, CPU, "rank 3"), is_floats,
        ),
    ]  # fmt: skip


SPARSE = [sparse_sample(values, indices, text) for (values, indices), text in GOLDEN_SPARSE.items()]
EMPTY = sparse_sample("fp32", "rice", GOLDEN_EMPTY, count=0)
SAMPLES = [*SPARSE, EMPTY, *other_samples()]
BY_NAME = {sample.name: sample for sample in SAMPLES}
every_sample = pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)


@every_sample
def test_golden_bytes(sample: Sample) -> None:
    assert to_bytes(sample.encode()).hex() == sample.frame.hex()


def test_every_kind_and_coding_has_golden_bytes() -> None:
    assert {sample.frame[KIND] for sample in SAMPLES} == {1, 2, 3, 4, 5}
    assert set(GOLDEN_SPARSE) == {(values, indices) for values in VALUE_CODINGS for indices in INDEX_CODINGS}


@every_sample
def test_golden_frames_are_read_back(sample: Sample) -> None:
    payload, tail = sample.read(sample.frame)
    assert tail.tolist() == TAIL
    read = plain.decode(sample.frame)
    assert (read.kind, read.numel, read.step, read.tail) == (sample.name.split("-")[0].replace("votes", "signs"),
                                                             sample.numel, STEP, TAIL)  # fmt: skip
    if isinstance(payload, Sparse):
        assert payload.indices.tolist() == read.indices == [0, 5, 69999][: len(read.indices)]
        assert payload.values.tolist() == read.values
        if "int4" in sample.name:  # the ends 1 and 3, and 35/64 of the way between them
            assert read.values == [1.0, -2.09375, 3.0]
        elif "int8" not in sample.name:
            assert read.values == [1.0, -2.0, 3.0][: len(read.values)]
    elif isinstance(payload, Signs):
        assert payload.negative.tolist() == read.negative == NEGATIVE
        assert payload.scales.tolist() == read.scales == ([0.25, 1.5] if sample.name == "signs" else [])
    elif isinstance(payload, Ternary):
        assert payload.trits.tolist() == read.trits == TRITS and payload.scales.tolist() == [0.25]
    elif sample.name == "levels":
        assert payload.tolist() == [level - 3 for level in read.levels] == LEVELS
    else:
        assert payload.tolist() == read.values == [1.0, -2.0, 3.0]


def test_the_worked_example_of_the_document_is_a_golden_frame() -> None:
    text = (Path(__file__).parents[1] / "docs" / "wire-format.md").read_text()
    blocks = re.findall(r"```hex\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 1
    rows = [line.split("  ")[0] for line in blocks[0].splitlines()]
    assert bytes.fromhex("".join(rows)) == BY_NAME["sparse-fp32-rice"].frame


# ----------------------------------------------------------------------------------------------- second implementation


def close(a: list[float], b: list[float]) -> bool:
    return [struct.pack("<f", x) for x in a] == [struct.pack("<f", x) for x in b]


@st.composite
def sparse_frames(draw: st.DrawFn) -> tuple[Sparse, list[float]]:
    numel = draw(st.sampled_from([1, 7, 300, 1023, 4097, 200_000, 2**31 - 1]))
    indices = sorted(draw(st.sets(st.integers(0, numel - 1), max_size=min(numel, 300))))
    values = draw(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=len(indices),
                           max_size=len(indices)))  # fmt: skip
    capacity = len(indices) + draw(st.integers(0, 3))
    tail = draw(st.lists(st.floats(width=32, allow_nan=False), max_size=3))
    return Sparse(torch.tensor(indices, dtype=torch.int64), torch.tensor(values), numel, capacity), tail


@pytest.mark.parametrize("indices", INDEX_CODINGS)
@pytest.mark.parametrize("values", VALUE_CODINGS)
@settings(deadline=None, max_examples=25, derandomize=True)
@given(case=sparse_frames())
def test_sparse_frames_equal_the_second_implementation(
    values: str, indices: str, case: tuple[Sparse, list[float]]
) -> None:
    payload, tail = case
    context, codec = turn_of(payload.numel, len(tail)), SparseCodec(values, indices)
    frame = codec.encode(context, payload, torch.tensor(tail))
    assert frame.numel() == codec.nbytes(payload.numel, payload.capacity, len(tail))
    read = plain.decode(to_bytes(frame))
    back, tail_back = codec.decode(context, frame, payload.numel, payload.capacity, len(tail), CPU, "x")
    assert back.indices.tolist() == read.indices and close(back.values.tolist(), read.values)
    assert close(tail_back.tolist(), tail) and close(read.tail, tail)
    if indices == "int32":
        assert read.indices == payload.indices.tolist()
    # What fitted is a part of what was given, and encodes to the same bytes in both implementations.
    place = {index: value for index, value in zip(payload.indices.tolist(), payload.values.tolist(), strict=True)}
    assert set(read.indices) <= set(place)
    kept = [place[index] for index in read.indices]
    parameter = plain.rice_parameter(read.indices, payload.numel) if indices == "rice" else 0
    again = plain.Frame("sparse", payload.numel, context.layout.fingerprint, STEP, tail, read.indices, kept, indices,
                        values, parameter)  # fmt: skip
    if values != "int8" or all(abs(x) < 1e38 and (x == 0 or abs(x) > 1e-30) for x in kept):
        assert plain.encode(again, frame.numel()) == to_bytes(frame)


@QUICK
@given(data=st.data(), numel=st.sampled_from([0, 1, 7, 8, 9, 64, 1023]), tail=st.integers(0, 2))
def test_dense_frames_equal_the_second_implementation(data: st.DataObject, numel: int, tail: int) -> None:
    context, rest = turn_of(numel, tail), [0.5, -0.0][:tail]
    numbers = random.Random(data.draw(st.integers(0, 2**32)))
    common = {"numel": numel, "layout": context.layout.fingerprint, "step": STEP, "tail": rest}
    bits = [numbers.random() < 0.5 for _ in range(numel)]
    scales = [numbers.random() for _ in range(min(numel, 2))]
    scales = torch.tensor(scales).tolist()
    frame = SignsCodec().encode(context, Signs(torch.tensor(bits, dtype=torch.bool), torch.tensor(scales), ()),
                                torch.tensor(rest))  # fmt: skip
    assert to_bytes(frame) == plain.encode(plain.Frame("signs", scales=scales, negative=bits, **common))
    assert frame.numel() == SignsCodec().nbytes(numel, len(scales), tail)

    trits = [numbers.randrange(-1, 2) for _ in range(numel)]
    payload = Ternary.of(torch.tensor(trits, dtype=torch.int8), torch.tensor(scales), ((numel, 1),))
    frame = TernaryCodec().encode(context, payload, torch.tensor(rest), with_scales=True)
    assert to_bytes(frame) == plain.encode(plain.Frame("ternary", scales=scales, trits=trits, **common))
    assert frame.numel() == TernaryCodec().nbytes(numel, len(scales), tail)

    ranks = data.draw(st.sampled_from([1, 2, 3, 4, 5, 7, 8, 100, 1000]))
    width = math.ceil(math.log2(2 * ranks + 1))
    levels = [numbers.randrange(-ranks, ranks + 1) for _ in range(numel)]
    nbytes = LevelsCodec().nbytes(numel, ranks, tail)
    frame = LevelsCodec().encode_sums(context, trits_of(levels, ranks), numel, torch.tensor(rest), nbytes)
    shifted = [level + ranks for level in levels]
    assert to_bytes(frame) == plain.encode(plain.Frame("levels", parameter=width, levels=shifted, **common))
    assert frame.numel() == nbytes
    assert read_levels(context, frame, numel, ranks, tail)[0].tolist() == levels

    values = [float(x) for x in torch.tensor([numbers.uniform(-9, 9) for _ in range(numel)])]
    frame = FloatsCodec().encode(context, torch.tensor(values), torch.tensor(rest))
    assert to_bytes(frame) == plain.encode(plain.Frame("dense", values=values, **common))
    assert frame.numel() == FloatsCodec().nbytes(numel, tail)


def test_a_frame_is_read_from_any_place_in_memory() -> None:
    """Frames of an all-to-all lie behind each other; a view may start anywhere and have any stride."""
    for sample in SAMPLES:
        good = to_tensor(sample.frame)
        for offset in range(1, 9):
            row = torch.full((good.numel() + 16,), 0xAA, dtype=torch.uint8)
            row[offset : offset + good.numel()] = good
            sample.read(row[offset : offset + good.numel()])
        strided = torch.full((good.numel(), 2), 0xAA, dtype=torch.uint8)
        strided[:, 0] = good
        sample.read(strided[:, 0])


def test_reading_does_not_change_the_frame() -> None:
    for sample in SAMPLES:
        frame = to_tensor(sample.frame)
        sample.read(frame)
        assert to_bytes(frame) == sample.frame


# ---------------------------------------------------------------------------------------------------------- bad frames


def changed(frame: bytes, at: int, new: bytes, seal: bool = True) -> bytes:
    frame = frame[:at] + new + frame[at + len(new) :]
    return plain.sealed(frame) if seal else frame


def u32(number: int) -> bytes:
    return struct.pack("<I", number)


def refused(sample: Sample, frame: bytes | Tensor) -> str:
    """The frame raises FrameError; returns its sentence."""
    with pytest.raises(FrameError) as caught:
        sample.read(frame)
    sentence = str(caught.value)
    assert sentence.startswith("bad frame from rank 3: ") and "\n" not in sentence and len(sentence) < 160
    return sentence


HEADER_FAULTS = [
    ("magic", 0, b"tW", "starts with"),
    ("version 0", VERSION, b"\0", "version is 0"),
    ("version 2", VERSION, b"\2", "version is 2"),
    ("kind 0", KIND, b"\0", "kind is 0"),
    ("kind 6", KIND, b"\6", "kind is 6"),
    ("kind 255", KIND, b"\xff", "kind is 255"),
    ("fewer elements", NUMEL, u32(1), "1 elements"),
    ("too many elements", NUMEL, u32(2**32 - 1), "4294967295 elements"),
    ("too many entries", COUNT, u32(2**32 - 1), "4294967295"),
    ("more entries", COUNT, u32(2**31), "2147483648"),
    ("unknown flags", ZERO, b"\2", "flags"),
    ("no tail", TAIL_NUMEL, u32(0), "tail of 0"),
    ("huge tail", TAIL_NUMEL, u32(2**32 - 1), "tail of 4294967295"),
    ("other layout", LAYOUT, u32(0), "layout"),
    ("earlier step", TURN, u32(STEP - 1), "step 6"),
    ("later step", TURN, u32(2**32 - 1), "step 4294967295"),
    ("crooked body", BODY, u32(5), "multiple of 4"),
    ("huge body", BODY, u32(2**32 - 4), "does not fit"),
    ("no body", BODY, u32(0), "bytes"),
    ("short body", BODY, u32(4), "bytes"),
]


@every_sample
@pytest.mark.parametrize("fault", HEADER_FAULTS, ids=lambda fault: fault[0])
def test_a_bad_header_is_refused(sample: Sample, fault: tuple[str, int, bytes, str]) -> None:
    name, at, new, words = fault
    if sample is EMPTY and name == "short body":
        return  # four bytes are right there
    assert words in refused(sample, changed(sample.frame, at, new))
    refused(sample, changed(sample.frame, at, new, seal=False))


@every_sample
def test_a_wrong_checksum_is_refused(sample: Sample) -> None:
    assert "checksum" in refused(sample, changed(sample.frame, CHECKSUM, u32(0), seal=False))


@every_sample
def test_every_flipped_bit_is_found(sample: Sample) -> None:
    for place in range(8 * len(sample.frame)):
        frame = bytearray(sample.frame)
        frame[place // 8] ^= 1 << place % 8
        refused(sample, bytes(frame))


@every_sample
def test_every_shorter_frame_is_refused(sample: Sample) -> None:
    for nbytes in range(len(sample.frame)):
        refused(sample, sample.frame[:nbytes])
        if nbytes >= START and nbytes % 4 == 0 and nbytes < START + struct.unpack_from("<I", sample.frame, BODY)[0]:
            refused(sample, plain.sealed(sample.frame[:nbytes]))
            # A body length that fits what is left: now the sections are too short.
            refused(sample, changed(sample.frame[:nbytes], BODY, u32(nbytes - START)))


@every_sample
def test_trailing_bytes_are_refused(sample: Sample) -> None:
    body = struct.unpack_from("<I", sample.frame, BODY)[0]
    for nbytes in range(1, 9):
        for filler in (b"\0", b"\1", b"\xff"):
            refused(sample, sample.frame + filler * nbytes)
            if nbytes % 4 == 0:
                longer = sample.frame[: START + body] + filler * nbytes
                refused(sample, changed(longer, BODY, u32(body + nbytes)))


@every_sample
def test_a_wrong_kind_of_tensor_is_refused(sample: Sample) -> None:
    frame = to_tensor(sample.frame)
    for wrong in (frame.to(torch.int8), frame.to(torch.int64), frame[None], frame[:0], torch.zeros(())):
        assert "bad frame from rank 3" in refused(sample, wrong)


@every_sample
def test_fields_that_a_kind_does_not_have_must_be_zero(sample: Sample) -> None:
    if not sample.name.startswith("sparse"):
        for at in (INDEX, VALUE):
            refused(sample, changed(sample.frame, at, b"\1"))
        refused(sample, changed(sample.frame, COUNT, u32(sample.frame[COUNT] + 1)))
    if not sample.name.endswith(("rice", "rice-empty", "levels")):
        refused(sample, changed(sample.frame, PARAMETER, b"\1"))


@pytest.mark.parametrize("sample", SPARSE, ids=lambda sample: sample.name)
def test_bad_codings_and_counts_are_refused(sample: Sample) -> None:
    for code in (3, 4, 255):
        assert f"index coding {code} is unknown" in refused(sample, changed(sample.frame, INDEX, bytes([code])))
    for code in (5, 6, 255):
        assert f"value coding {code} is unknown" in refused(sample, changed(sample.frame, VALUE, bytes([code])))
    assert "5 entries, 4 are allowed" in refused(sample, changed(sample.frame, COUNT, u32(5)))
    for count in (0, 2, 4):
        refused(sample, changed(sample.frame, COUNT, u32(count)))


def replace_body(sample: Sample, at: int, new: bytes) -> bytes:
    return changed(sample.frame, START + at, new)


def test_bad_int32_indices_are_refused() -> None:
    sample = BY_NAME["sparse-fp32-int32"]
    at = 16  # tail and three values come first
    for indices, words in [
        ([5, 0, 69999], "not rising"),
        ([0, 5, 5], "not rising"),
        ([-1, 5, 69999], "below zero"),
        ([0, 5, 70000], "outside"),
        ([0, 5, 2**31 - 1], "outside"),
        ([0, 5, -(2**31)], "not rising"),
        ([-(2**31), 5, 6], "below zero"),
    ]:
        assert words in refused(sample, replace_body(sample, at, struct.pack("<3i", *indices)))
    sample.read(replace_body(sample, at, struct.pack("<3i", 1, 2, 69998)))


def test_bad_distances_are_refused() -> None:
    sample = BY_NAME["sparse-fp32-delta16"]
    escape = 0xFFFF
    for words in [
        [0, 4, escape, escape],  # no end
        [0, 4, escape, 4459],  # 70000
        [0, escape, escape, 4],  # far outside
        [escape, escape, escape, escape],
        [0, 4, 1, 1],  # four entries
        [0, 4, 1, escape],  # an escape behind the last entry
    ]:
        refused(sample, replace_body(sample, 16, struct.pack("<4H", *words)))
    sample.read(replace_body(sample, 16, struct.pack("<4H", 0, 4, 7, 0)))  # an odd number of words and its filling
    # The filling is one zero word behind an odd number of words, and nothing else.
    longer = changed(sample.frame[:-4], BODY, u32(28))
    for words in ([0, 4, 7, escape, escape, 0], [0, 4, 7, 0, 0, 0], [0, 4, escape, 7, 0, 0]):
        refused(sample, changed(longer, START + 16, struct.pack("<6H", *words)))
    empty = changed(changed(sample.frame, COUNT, u32(0)), BODY, u32(8))
    for words in ([escape, 0], [0, 0], [escape, escape]):
        refused(sample, changed(empty, START + 4, struct.pack("<2H", *words)))


def test_bad_rice_codes_are_refused() -> None:
    sample = BY_NAME["sparse-fp32-rice"]
    for parameter in (31, 32, 63, 64, 255):
        words = refused(sample, changed(sample.frame, PARAMETER, bytes([parameter])))
        assert f"Rice parameter {parameter}" in words
    for parameter in range(31):
        if parameter != 12:
            try:
                sample.read(changed(sample.frame, PARAMETER, bytes([parameter])))
            except FrameError:
                continue
    unary = 24
    assert "exactly 3" in refused(sample, replace_body(sample, unary, bytes(4)))
    assert "exactly 3" in refused(sample, replace_body(sample, unary, b"\xff\xff\xff\xff"))
    assert "exactly 3" in refused(sample, replace_body(sample, unary, b"\x03\x00\x08\x80"))
    refused(sample, replace_body(sample, unary, b"\x03\x00\x00\x80"))  # a gap beyond the elements
    refused(sample, replace_body(sample, unary, b"\x03\x00\x10\x00"))
    low = 16
    refused(sample, replace_body(sample, low, b"\x00\x40\x00\x6a\x01"))  # one beyond the last element? 70015
    longer = changed(sample.frame[:-4], BODY, u32(32))
    assert "behind" in refused(sample, longer)


def test_huge_quotients_do_not_wrap_around() -> None:
    """A quotient times 2**parameter that leaves the range is found, whatever it becomes in 64 bits."""
    numel, codec = 2**32 - 1, SparseCodec("fp32", "rice")
    context = turn_of(5)
    frame = codec.encode(context, Sparse(torch.tensor([3]), torch.tensor([1.0]), 5, 1), torch.zeros(0))
    good = to_bytes(frame)
    for parameter in (0, 1, 29, 30):
        for bit in range(0, 2**15, 1111):
            unary = bytearray(2**12)
            unary[bit // 8] |= 1 << bit % 8
            body = struct.pack("<f", 1.0) + b"\xff" * plain.padded(-(-parameter // 8)) + bytes(unary)
            raw = good[:NUMEL] + u32(numel) + good[COUNT:PARAMETER] + bytes([parameter]) + good[ZERO:TAIL_NUMEL]
            raw += u32(0) + good[LAYOUT:BODY] + u32(len(body)) + u32(0) + body
            try:
                payload, _ = codec.decode(context, to_tensor(plain.sealed(raw)), numel, 1, 0, CPU, "rank 3")
            except FrameError:
                continue
            assert 0 <= int(payload.indices[0]) < numel


def test_bad_trits_are_refused() -> None:
    for name, at in (("ternary", 8), ("ternary-shared", 4)):
        sample = BY_NAME[name]
        for byte in (243, 250, 255):
            assert "trits" in refused(sample, replace_body(sample, at, bytes([byte])))
        sample.read(replace_body(sample, at, b"\xf2\xf2"))


def test_bad_levels_are_refused() -> None:
    sample = BY_NAME["levels"]
    for place in range(11):
        levels = [level + 3 for level in LEVELS]
        levels[place] = 7
        assert "level is above 6" in refused(sample, replace_body(sample, 4, plain.pack_uints(levels, 3)))
    for bits in (0, 1, 2, 4, 32, 255):
        assert "bits a level" in refused(sample, changed(sample.frame, PARAMETER, bytes([bits])))


def test_a_wrong_number_of_scales_is_refused() -> None:
    for name, counts in (("signs", (0, 1, 3)), ("votes", (1, 2)), ("ternary", (0, 2)), ("ternary-shared", (1,))):
        for count in counts:
            assert "scales" in refused(BY_NAME[name], changed(BY_NAME[name].frame, COUNT, u32(count)))


def test_a_frame_of_another_exchange_is_refused() -> None:
    sample = BY_NAME["sparse-fp32-rice"]
    codec, frame = SparseCodec(), to_tensor(sample.frame)
    for context, words in [
        (turn_of(70000, step=8), "step 7"),
        (turn_of(70000, 2), "layout"),
        (ExchangeContext(Layout.of([("v", 0, 70000, True), ("b", 1, 1, False)]), STEP, (Hyper(), Hyper())), "layout"),
        (ExchangeContext(Layout.of([("w", 0, 70000, True), ("b", 1, 1, True)]), STEP, (Hyper(), Hyper())), "layout"),
    ]:
        with pytest.raises(FrameError, match=words):
            codec.decode(context, frame, 70000, 4, 1, CPU, "rank 3")
    with pytest.raises(FrameError, match="kind"):
        SignsCodec().decode(turn_of(70000), frame, ((70000, 1),), 0, 1, CPU, "rank 3")
    # A later lap of the 32-bit step counter is the same step on the wire.
    codec.decode(turn_of(70000, step=STEP + 2**32), frame, 70000, 4, 1, CPU, "rank 3")


def test_huge_claims_allocate_nothing() -> None:
    """Expecting billions of elements, a short frame that claims them is refused before anything is made of them."""
    most = 2**32 - 1
    for values in VALUE_CODINGS:
        for indices in INDEX_CODINGS:
            sample = BY_NAME[f"sparse-{values}-{indices}"]
            frame = changed(changed(sample.frame, NUMEL, u32(most)), COUNT, u32(most))
            with pytest.raises(FrameError, match="are left"):
                SparseCodec().decode(turn_of(70000), to_tensor(frame), most, most, 1, CPU, "rank 3")
            frame = changed(sample.frame, TAIL_NUMEL, u32(most))
            with pytest.raises(FrameError, match="are left"):
                SparseCodec().decode(turn_of(70000), to_tensor(frame), 70000, 4, most, CPU, "rank 3")
    context = turn_of(11)
    with pytest.raises(FrameError, match="are left"):
        frame = changed(BY_NAME["votes"].frame, NUMEL, u32(most))
        SignsCodec().decode(context, to_tensor(frame), ((most, 1),), 0, 1, CPU, "rank 3")
    with pytest.raises(FrameError, match="are left"):
        frame = changed(BY_NAME["ternary"].frame, NUMEL, u32(most))
        TernaryCodec().decode(context, to_tensor(frame), ((most, 1),), None, 1, CPU, "rank 3")
    with pytest.raises(FrameError, match="are left"):
        frame = changed(BY_NAME["levels"].frame, NUMEL, u32(most))
        parts = [torch.zeros(1).expand(most)]
        LevelsCodec().decode_mean(context, to_tensor(frame), 3, 1, parts, torch.ones(1), "rank 3")
    with pytest.raises(FrameError, match="are left"):
        frame = changed(BY_NAME["dense"].frame, NUMEL, u32(most))
        FloatsCodec().decode(turn_of(3), to_tensor(frame), most, 1, CPU, "rank 3")


def mutated(frame: bytes, numbers: random.Random) -> bytes:
    """One to four changes of bytes, bits, words or the length; the checksum fits, so that the inner checks are reached.

    Half of the changes spare what is compared with the receiver's own numbers, where all of them would end.
    """
    out = bytearray(frame)
    for _ in range(numbers.randrange(1, 5)):
        low = numbers.choice([0, START, START, PARAMETER, COUNT, BODY])
        high = {0: len(out), START: len(out), PARAMETER: ZERO, COUNT: PARAMETER, BODY: CHECKSUM}[low]
        if low >= high:
            continue
        at = numbers.randrange(low, high)
        action = numbers.randrange(6)
        if action == 0:
            out[at] = numbers.choice([0, 1, 2, 3, 4, 30, 31, 127, 128, 242, 243, 254, 255])
        elif action == 1:
            out[at] ^= 1 << numbers.randrange(8)
        elif action == 2:
            out[at] = numbers.randrange(256)
        elif action == 3:
            at -= at % 4
            out[at : at + 4] = u32(numbers.choice([0, 1, 2**31 - 1, 2**31, 2**32 - 1, numbers.randrange(2**32)]))
        elif action == 4 and len(out) > START:
            out = out[: numbers.randrange(START, len(out) + 1) // 4 * 4]
            if numbers.random() < 0.5:
                out[BODY:CHECKSUM] = u32(len(out) - START)
        elif action == 5:
            out += bytes(numbers.choice([0, 255, numbers.randrange(256)]) for _ in range(4))
            if numbers.random() < 0.5:
                out[BODY:CHECKSUM] = u32(len(out) - START)
    return plain.sealed(bytes(out))


@every_sample
def test_mutated_frames_are_read_or_refused(sample: Sample) -> None:
    numbers = random.Random(sample.name)
    refusals, sentences = 0, set()
    for _ in range(2000):
        frame = mutated(sample.frame, numbers)
        try:
            sample.read(frame)
        except FrameError as error:
            refusals += 1
            assert str(error).startswith("bad frame from rank 3: ") and "\n" not in str(error)
            sentences.add(re.sub(r"\d+", "#", str(error)))
    assert refusals > 900 and len(sentences) >= 5


def test_noise_is_refused() -> None:
    numbers = random.Random(1)
    for sample in SAMPLES:
        for nbytes in [*range(0, 80, 7), 36, 40, 1000]:
            refused(sample, numbers.randbytes(nbytes))
            refused(sample, bytes(nbytes))
            if nbytes > START:
                refused(sample, sample.frame[:START] + numbers.randbytes(nbytes - START))
