"""Every way in which a frame can be bad ends in one sentence that names the sender."""

from __future__ import annotations

import random
import re
import struct

import plain_wire as plain
import pytest
import torch
from frame_samples import (
    BODY,
    BY_NAME,
    CHECKSUM,
    COUNT,
    CPU,
    EMPTY,
    FLAGS,
    INDEX,
    INDEX_CODINGS,
    KIND,
    LAYOUT,
    LEVELS,
    NUMEL,
    PARAMETER,
    SAMPLES,
    SPARSE,
    START,
    STEP,
    STEP_AT,
    TAIL_NUMEL,
    VALUE,
    VALUE_CODINGS,
    VERSION,
    Sample,
    context_of,
    every_sample,
)
from tensor_bytes import to_bytes, to_tensor
from torch import Tensor

from thinwire.codecs import FloatsCodec, LevelsCodec, SignsCodec, SparseCodec, TernaryCodec
from thinwire.engine.context import ExchangeContext, Hyper
from thinwire.engine.layout import Layout
from thinwire.engine.payloads import Sparse
from thinwire.errors import FrameError


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
    ("unknown flags", FLAGS, b"\2", "flags"),
    ("no tail", TAIL_NUMEL, u32(0), "tail of 0"),
    ("huge tail", TAIL_NUMEL, u32(2**32 - 1), "tail of 4294967295"),
    ("other layout", LAYOUT, u32(0), "layout"),
    ("earlier step", STEP_AT, u32(STEP - 1), "step 6"),
    ("later step", STEP_AT, u32(2**32 - 1), "step 4294967295"),
    ("crooked body", BODY, u32(5), "multiple of 4"),
    ("huge body", BODY, u32(2**32 - 4), "does not fit"),
    ("no body", BODY, u32(0), "bytes"),
    ("short body", BODY, u32(4), "bytes"),
]


@every_sample
@pytest.mark.parametrize("fault", HEADER_FAULTS, ids=lambda fault: fault[0])
def test_frame_with_a_bad_header_is_refused(sample: Sample, fault: tuple[str, int, bytes, str]) -> None:
    name, at, new, words = fault
    if sample is EMPTY and name == "short body":  # four bytes are right there
        sample.read(changed(sample.frame, at, new))
        return
    assert words in refused(sample, changed(sample.frame, at, new))
    refused(sample, changed(sample.frame, at, new, seal=False))


@every_sample
def test_frame_with_a_wrong_checksum_is_refused(sample: Sample) -> None:
    assert "checksum" in refused(sample, changed(sample.frame, CHECKSUM, u32(0), seal=False))


@every_sample
def test_frame_with_any_flipped_bit_is_refused(sample: Sample) -> None:
    for place in range(8 * len(sample.frame)):
        frame = bytearray(sample.frame)
        frame[place // 8] ^= 1 << place % 8
        refused(sample, bytes(frame))


@every_sample
def test_frame_of_any_shorter_length_is_refused(sample: Sample) -> None:
    for nbytes in range(len(sample.frame)):
        refused(sample, sample.frame[:nbytes])
        if nbytes >= START and nbytes % 4 == 0 and nbytes < START + struct.unpack_from("<I", sample.frame, BODY)[0]:
            refused(sample, plain.sealed(sample.frame[:nbytes]))
            # A body length that fits what is left: now the sections are too short.
            refused(sample, changed(sample.frame[:nbytes], BODY, u32(nbytes - START)))


@every_sample
def test_frame_with_trailing_bytes_is_refused(sample: Sample) -> None:
    body = struct.unpack_from("<I", sample.frame, BODY)[0]
    for nbytes in range(1, 9):
        for filler in (b"\0", b"\1", b"\xff"):
            refused(sample, sample.frame + filler * nbytes)
            if nbytes % 4 == 0:
                longer = sample.frame[: START + body] + filler * nbytes
                refused(sample, changed(longer, BODY, u32(body + nbytes)))


@every_sample
def test_frame_in_a_wrong_kind_of_tensor_is_refused(sample: Sample) -> None:
    frame = to_tensor(sample.frame)
    for wrong in (frame.to(torch.int8), frame.to(torch.int64), frame[None], frame[:0], torch.zeros(())):
        assert "bad frame from rank 3" in refused(sample, wrong)


WITH_PARAMETER = ("rice", "rice-empty", "levels")  # the end of their names


@pytest.mark.parametrize(
    "sample", [s for s in SAMPLES if not s.name.startswith("sparse")], ids=lambda sample: sample.name
)
def test_frame_fields_of_sparse_frames_must_be_zero_in_others(sample: Sample) -> None:
    for at in (INDEX, VALUE):
        refused(sample, changed(sample.frame, at, b"\1"))
    refused(sample, changed(sample.frame, COUNT, u32(sample.frame[COUNT] + 1)))


@pytest.mark.parametrize(
    "sample", [s for s in SAMPLES if not s.name.endswith(WITH_PARAMETER)], ids=lambda sample: sample.name
)
def test_frame_parameter_must_be_zero_where_there_is_none(sample: Sample) -> None:
    refused(sample, changed(sample.frame, PARAMETER, b"\1"))


@pytest.mark.parametrize("sample", SPARSE, ids=lambda sample: sample.name)
def test_bad_codings_and_counts_are_refused(sample: Sample) -> None:
    for code in (3, 4, 255):
        assert f"index coding {code} is unknown" in refused(sample, changed(sample.frame, INDEX, bytes([code])))
    for code in (6, 7, 255):
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
    context = context_of(5)
    frame = codec.encode(context, Sparse(torch.tensor([3]), torch.tensor([1.0]), 5, 1), torch.zeros(0))
    good = to_bytes(frame)
    for parameter in (0, 1, 29, 30):
        for bit in range(0, 2**15, 1111):
            unary = bytearray(2**12)
            unary[bit // 8] |= 1 << bit % 8
            body = struct.pack("<f", 1.0) + b"\xff" * plain.padded(-(-parameter // 8)) + bytes(unary)
            raw = good[:NUMEL] + u32(numel) + good[COUNT:PARAMETER] + bytes([parameter]) + good[FLAGS:TAIL_NUMEL]
            raw += u32(0) + good[LAYOUT:BODY] + u32(len(body)) + u32(0) + body
            try:
                read = codec.decode(context, to_tensor(plain.sealed(raw)), numel, 1, 0, CPU, "rank 3")
            except FrameError:
                continue
            assert 0 <= int(read.content.indices[0]) < numel


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


def test_frame_with_a_wrong_number_of_scales_is_refused() -> None:
    for name, counts in (("signs", (0, 1, 3)), ("votes", (1, 2)), ("ternary", (0, 2)), ("ternary-shared", (1,))):
        for count in counts:
            assert "scales" in refused(BY_NAME[name], changed(BY_NAME[name].frame, COUNT, u32(count)))


NUMBERS = [  # where a frame holds numbers: the tail in front, then values, their scales or ends, or scales of blocks
    *(
        (name, place)
        for name in ("sparse-fp32-rice", "sparse-int8-int32", "signs", "ternary", "dense")
        for place in (0, 4)
    ),
    ("sparse-int4-delta16", 0),
    ("sparse-int2-rice", 0),
    ("votes", 0),
    ("ternary-shared", 0),
    ("levels", 0),
]


@pytest.mark.parametrize(("name", "place"), NUMBERS)
def test_frame_with_a_number_that_would_overflow_sums_is_refused(name: str, place: int) -> None:
    sample = BY_NAME[name]
    for number in (float("inf"), float("-inf"), float("nan"), 3e38, -(2.0**96)):
        frame = replace_body(sample, place, struct.pack("<f", number))
        assert "holds an inf, a nan or a number beyond 7.9e+28" in refused(sample, frame)
        sample.read(changed(frame, FLAGS, b"\1"))  # its sender says itself that nothing of it may be used
    sample.read(replace_body(sample, place, struct.pack("<f", 2.0**88)))


@pytest.mark.parametrize(
    ("values", "number"), [("fp16", 0x7C00), ("bf16", 0xFF80), ("bf16", 0x7F7F), ("int4", 0x7FC0), ("int2", 0x7F7F)]
)
def test_short_value_that_would_overflow_sums_is_refused(values: str, number: int) -> None:
    sample = BY_NAME[f"sparse-{values}-int32"]
    assert "holds an inf, a nan" in refused(sample, replace_body(sample, 4, struct.pack("<H", number)))


def test_frame_of_another_exchange_is_refused() -> None:
    sample = BY_NAME["sparse-fp32-rice"]
    codec, frame = SparseCodec(), to_tensor(sample.frame)
    for context, words in [
        (context_of(70000, step=8), "step 7"),
        (context_of(70000, 2), "layout"),
        (ExchangeContext(Layout.of([("v", 0, 70000, True), ("b", 1, 1, False)]), STEP, (Hyper(), Hyper())), "layout"),
        (ExchangeContext(Layout.of([("w", 0, 70000, True), ("b", 1, 1, True)]), STEP, (Hyper(), Hyper())), "layout"),
    ]:
        with pytest.raises(FrameError, match=words):
            codec.decode(context, frame, 70000, 4, 1, CPU, "rank 3")
    with pytest.raises(FrameError, match="kind"):
        SignsCodec().decode(context_of(70000), frame, ((70000, 1),), 0, 1, CPU, "rank 3")
    # A later lap of the 32-bit step counter is the same step on the wire.
    codec.decode(context_of(70000, step=STEP + 2**32), frame, 70000, 4, 1, CPU, "rank 3")


def test_frame_that_claims_billions_of_elements_allocates_nothing() -> None:
    """Expecting billions of elements, a short frame that claims them is refused before anything is made of them."""
    most = 2**32 - 1
    for values in VALUE_CODINGS:
        for indices in INDEX_CODINGS:
            sample = BY_NAME[f"sparse-{values}-{indices}"]
            frame = changed(changed(sample.frame, NUMEL, u32(most)), COUNT, u32(most))
            with pytest.raises(FrameError, match="are left"):
                SparseCodec().decode(context_of(70000), to_tensor(frame), most, most, 1, CPU, "rank 3")
            frame = changed(sample.frame, TAIL_NUMEL, u32(most))
            with pytest.raises(FrameError, match="are left"):
                SparseCodec().decode(context_of(70000), to_tensor(frame), 70000, 4, most, CPU, "rank 3")
    context = context_of(11)
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
        FloatsCodec().decode(context_of(3), to_tensor(frame), most, 1, CPU, "rank 3")


def mutated(frame: bytes, numbers: random.Random) -> bytes:
    """One to four changes of bytes, bits, words or the length; the checksum fits, so that the inner checks are reached.

    Half of the changes spare what is compared with the receiver's own numbers, where all of them would end.
    """
    out = bytearray(frame)
    for _ in range(numbers.randrange(1, 5)):
        low = numbers.choice([0, START, START, PARAMETER, COUNT, BODY])
        high = {0: len(out), START: len(out), PARAMETER: FLAGS, COUNT: PARAMETER, BODY: CHECKSUM}[low]
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


def test_frame_of_noise_is_refused() -> None:
    numbers = random.Random(1)
    for sample in SAMPLES:
        for nbytes in [*range(0, 80, 7), 36, 40, 1000]:
            refused(sample, numbers.randbytes(nbytes))
            refused(sample, bytes(nbytes))
            if nbytes > START:
                refused(sample, sample.frame[:START] + numbers.randbytes(nbytes - START))
