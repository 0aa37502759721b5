"""Good frames: literal bytes of every kind and coding, and a second implementation of the format."""

from __future__ import annotations

import math
import random
import re
import struct

import plain_wire as plain
import pytest
import torch
from frame_samples import (
    BY_NAME,
    CPU,
    GOLDEN_SPARSE,
    INDEX_CODINGS,
    KIND,
    LEVELS,
    NEGATIVE,
    SAMPLES,
    STEP,
    TAIL,
    TRITS,
    VALUE_CODINGS,
    Sample,
    context_of,
    every_sample,
    read_levels,
    trits_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import ROOT
from tensor_bytes import to_bytes, to_tensor

from thinwire.codecs import FloatsCodec, LevelsCodec, SignsCodec, SparseCodec, TernaryCodec
from thinwire.engine.payloads import Signs, Sparse, Ternary


@every_sample
def test_encoded_frames_are_the_golden_bytes(sample: Sample) -> None:
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
        elif "int2" in sample.name:  # 2 and 3 reach the mean, and their own mean is 2.5
            assert read.values == [1.0, -2.5, 2.5]
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


def test_worked_example_of_the_document_is_a_golden_frame() -> None:
    text = (ROOT / "docs" / "wire-format.md").read_text()
    blocks = re.findall(r"```hex\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 1
    rows = [line.split("  ")[0] for line in blocks[0].splitlines()]
    assert bytes.fromhex("".join(rows)) == BY_NAME["sparse-fp32-rice"].frame


# ----------------------------------------------------------------------------------------------- second implementation


QUICK = settings(deadline=None, max_examples=60, derandomize=True)


def close(a: list[float], b: list[float]) -> bool:
    return [struct.pack("<f", x) for x in a] == [struct.pack("<f", x) for x in b]


@st.composite
def sparse_frames(draw: st.DrawFn) -> tuple[Sparse, list[float]]:
    numel = draw(st.sampled_from([1, 7, 300, 1023, 4097, 200_000, 2**31 - 1]))
    indices = sorted(draw(st.sets(st.integers(0, numel - 1), max_size=min(numel, 300))))
    numbers = st.floats(-(2.0**95), 2.0**95, width=32)  # receivers refuse larger ones
    values = draw(st.lists(numbers, min_size=len(indices), max_size=len(indices)))
    capacity = len(indices) + draw(st.integers(0, 3))
    tail = draw(st.lists(numbers, max_size=3))
    return Sparse(torch.tensor(indices, dtype=torch.int64), torch.tensor(values), numel, capacity), tail


@pytest.mark.parametrize("indices", INDEX_CODINGS)
@pytest.mark.parametrize("values", VALUE_CODINGS)
@settings(deadline=None, max_examples=25, derandomize=True)
@given(case=sparse_frames())
def test_sparse_frames_equal_the_second_implementation(
    values: str, indices: str, case: tuple[Sparse, list[float]]
) -> None:
    payload, tail = case
    context, codec = context_of(payload.numel, len(tail)), SparseCodec(values, indices)
    frame = codec.encode(context, payload, torch.tensor(tail))
    assert frame.numel() == codec.nbytes(payload.numel, payload.capacity, len(tail))
    read = plain.decode(to_bytes(frame))
    back, tail_back, alarm = codec.decode(context, frame, payload.numel, payload.capacity, len(tail), CPU, "x")
    assert back.indices.tolist() == read.indices and close(back.values.tolist(), read.values)
    assert close(tail_back.tolist(), tail) and close(read.tail, tail) and not alarm
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
    context, rest = context_of(numel, tail), [0.5, -0.0][:tail]
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


def test_frame_is_read_from_any_place_in_memory() -> None:
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


def test_frame_is_not_changed_by_reading() -> None:
    for sample in SAMPLES:
        frame = to_tensor(sample.frame)
        sample.read(frame)
        assert to_bytes(frame) == sample.frame
