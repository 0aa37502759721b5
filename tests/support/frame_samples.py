"""Good frames of every kind and coding, byte by byte, how the engine makes and reads each, and what must hold of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tensor_bytes import to_tensor
from torch import Tensor

from thinwire import kernels
from thinwire.codecs import FloatsCodec, LevelsCodec, SignsCodec, SparseCodec, TernaryCodec
from thinwire.codecs.frame import Decoded
from thinwire.engine.context import ExchangeContext, Hyper
from thinwire.engine.layout import Layout
from thinwire.engine.payloads import Signs, Sparse, Ternary

CPU = torch.device("cpu")
INDEX_CODINGS, VALUE_CODINGS = ("int32", "delta16", "rice"), ("fp32", "fp16", "bf16", "int8", "int4", "int2")
STEP, TAIL = 7, [0.5]

# Offsets of the header's fields.
VERSION, KIND, NUMEL, COUNT, INDEX, VALUE, PARAMETER, FLAGS = 2, 3, 4, 8, 12, 13, 14, 15
TAIL_NUMEL, LAYOUT, STEP_AT, BODY, CHECKSUM, START = 16, 20, 24, 28, 32, 36


def context_of(numel: int, tail: int = 1, step: int = STEP) -> ExchangeContext:
    layout = Layout.of([("w", 0, numel, True), ("b", 1, tail, False)])
    return ExchangeContext(layout, step, (Hyper(), Hyper()))


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
    ("int2", "int32"): """
        54570101 70110100 03000000 00050000 01000000 5cd7fd1d 07000000 18000000 00ad8a90
        0000003f 803f2040 1c000000 00000000 05000000 6f110100 00000000""",
    ("int2", "delta16"): """
        54570101 70110100 03000000 01050000 01000000 5cd7fd1d 07000000 14000000 fccf54f5
        0000003f 803f2040 1c000000 00000400 ffff6a11 00000000""",
    ("int2", "rice"): """
        54570101 70110100 03000000 02050c00 01000000 5cd7fd1d 07000000 18000000 04ee85ab
        0000003f 803f2040 1c000000 00400069 01000000 03000800 00000000""",
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
    decode: Callable[[Tensor], Decoded[Any]]
    check: Callable[[Any, Tensor], None]

    def read(self, frame: bytes | Tensor) -> tuple[Any, Tensor]:
        given = frame if isinstance(frame, Tensor) else to_tensor(frame)
        payload, tail, alarm = self.decode(given)
        assert alarm == bool(given[FLAGS])
        self.check(payload, tail)
        return payload, tail


def sparse_sample(values: str, indices: str, text: str, count: int = 3) -> Sample:
    codec, context = SparseCodec(values, indices), context_of(70000)
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


def read_levels(context: ExchangeContext, frame: Tensor, numel: int, ranks: int, tail: int) -> Decoded[Tensor]:
    """The levels: with a scale of N the mean is the sum, exactly."""
    part = torch.empty(numel)
    rest = LevelsCodec().decode_mean(context, frame, ranks, tail, [part], torch.tensor([float(ranks)]), "rank 3")
    return Decoded(part, rest.tail, rest.alarm)


def other_samples() -> list[Sample]:
    context, three, tail = context_of(11), context_of(3), torch.tensor(TAIL)
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
