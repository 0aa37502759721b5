"""From chosen entries to the finished frame: Golomb-Rice indices, values, header and checksum, all on the device.

docs/wire-format.md is the specification; thinwire.codecs writes the same bytes with plain torch. A frame whose indices
need more than the budget is left without its magic word: whoever takes it to the wire sees that and lets the codec
leave out the smallest entries instead.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.gpu.cuda_graphs import Recorder
from thinwire.kernels.gpu.two_bits import two_bit_encode
from thinwire.kernels.reference import four_bit_encode
from thinwire.kernels.uploads import upload

_BLOCK = 256  # entries a program: those that share an int8 scale
_TRIED = 5  # Rice parameters that are compared
_HEADER_WORDS = 9
_STEP_WORD = 6
VALUE_CODES = {"fp32": 0, "fp16": 1, "bf16": 2, "int8": 3, "int4": 4, "int2": 5}


@triton.jit
def mix(x):
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _gap(indices, i, count):
    index = tl.load(indices + i, mask=i < count, other=0)
    before = tl.load(indices + i - 1, mask=(i < count) & (i > 0), other=-1)
    return tl.where(i < count, (index - before - 1).to(tl.int32), 0)


@triton.jit
def _sum_quotients(indices, count, sums, smallest, num_blocks, TRIED: tl.constexpr, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    gap = _gap(indices, block * BLOCK + tl.arange(0, BLOCK), count)
    for place in tl.static_range(TRIED):
        tl.store(sums + place * num_blocks + block, tl.sum(gap >> (smallest + place), axis=0))


@triton.jit
def _padded_words(bits):
    return (bits + 31) // 32


@triton.jit
def _write_entries(
    frame, header, bad, indices, values, count, sums, smallest, num_blocks, value_start, budget_words,
    CODE: tl.constexpr, TRIED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    b = tl.arange(0, BLOCKS)
    best, best_words, before = count * 0, count * 0 + 0x7FFFFFFF, count * 0
    for place in tl.static_range(TRIED):
        row = tl.load(sums + place * num_blocks + b, mask=b < num_blocks, other=0)
        unary = _padded_words(tl.sum(row, axis=0) + count)
        total = _padded_words(count * (smallest + place)) + unary
        if total < best_words:
            best, best_words = smallest + place, total
            before = tl.sum(tl.where(b < block, row, 0), axis=0)
    if CODE == 0:
        value_words = count
    elif CODE == 3:
        value_words = (count + 255) // 256 + (count + 3) // 4
    elif CODE == 4:
        value_words = (count + 127) // 128 + (count + 7) // 8
    elif CODE == 5:
        value_words = (count + 63) // 64 + (count + 15) // 16
    else:
        value_words = (count + 1) // 2
    if block == 0:
        w = tl.arange(0, 16)
        word = tl.load(header + w, mask=w < 8, other=0)
        flag = (tl.load(bad) != 0).to(tl.int32)
        fits = best_words <= budget_words
        word = tl.where(w == 0, tl.where(fits, word, 0), word)
        word = tl.where(w == 3, word | (best << 16) | (flag << 24), word)
        word = tl.where(w == 7, word + 4 * (value_words + best_words), word)
        tl.store(frame + w, word, mask=w < 8)
    if best_words > budget_words:
        return
    i = block * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    value = tl.load(values + i, mask=inside, other=0.0)
    if CODE == 0:
        tl.store(frame + value_start + i, value.to(tl.int32, bitcast=True), mask=inside)
    elif CODE == 3:
        magnitude = tl.max(tl.reshape(tl.abs(value), (BLOCK // 256, 256)), axis=1)
        finite = (value.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000
        whole = tl.min(tl.reshape(finite.to(tl.int32), (BLOCK // 256, 256)), axis=1)
        scale = tl.minimum(tl.div_rn(magnitude, 127.0), 2.67938838e36)
        scale = tl.where(whole != 0, scale, float("nan"))
        chunk = block * (BLOCK // 256) + tl.arange(0, BLOCK // 256)
        tl.store(frame + value_start + chunk, scale.to(tl.int32, bitcast=True), mask=chunk < (count + 255) // 256)
        divisor = tl.where(scale > 0, scale, 1.0)
        ratio = tl.div_rn(
            tl.reshape(value, (BLOCK // 256, 256)), tl.broadcast_to(divisor[:, None], (BLOCK // 256, 256))
        )
        ratio = tl.where((whole != 0)[:, None], ratio, 0.0)
        # Adding and taking away 1.5 * 2**23 rounds to the nearest integer, halves to even, as torch does.
        rounded = tl.minimum(tl.maximum(ratio, -127.0), 127.0)
        rounded = (rounded + 12582912.0) - 12582912.0
        code = tl.reshape(rounded.to(tl.int8), (BLOCK,))
        out = frame.to(tl.pointer_type(tl.int8)) + 4 * (value_start + (count + 255) // 256)
        tl.store(out + i, code, mask=inside)
    elif CODE < 3:  # 4 and 5 are in the frame already
        finite = (value.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000
        if CODE == 1:
            limit = 65504.0
            half = tl.where(finite, tl.minimum(tl.maximum(value, -limit), limit), value).to(tl.float16)
            tl.store(frame.to(tl.pointer_type(tl.float16)) + 2 * value_start + i, half, mask=inside)
        else:
            # To nearest, ties to even; a finite value that would round to infinity becomes the largest finite one.
            bits = value.to(tl.uint32, bitcast=True)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            rounded = tl.where((rounded & 0x7FFF) > 0x7F7F, (rounded & 0x8000) | 0x7F7F, rounded)
            quiet = tl.where((bits & 0x007FFFFF) != 0, 0x40, 0).to(tl.uint32)
            rounded = tl.where(finite, rounded, (bits >> 16) | quiet)
            tl.store(frame.to(tl.pointer_type(tl.int16)) + 2 * value_start + i, rounded.to(tl.int16), mask=inside)
    gap = _gap(indices, i, count)
    low = (gap & ((1 << best) - 1)).to(tl.uint32, bitcast=True)
    bit = i * best
    shift = (bit & 31).to(tl.uint32)
    low_start = value_start + value_words
    tl.atomic_or(frame + low_start + (bit >> 5), (low << shift).to(tl.int32, bitcast=True), mask=inside & (best > 0))
    spills = inside & ((bit & 31) + best > 32)
    rest = (low >> tl.where(spills, 32 - (bit & 31), 0).to(tl.uint32)).to(tl.int32, bitcast=True)
    tl.atomic_or(frame + low_start + (bit >> 5) + 1, rest, mask=spills)
    one = before + tl.cumsum(gap >> best, axis=0) + i  # the bit that ends this entry's quotient
    unary_start = low_start + _padded_words(count * best)
    bit = tl.full((BLOCK,), 1, tl.uint32) << (one & 31).to(tl.uint32)
    tl.atomic_or(frame + unary_start + (one >> 5), bit.to(tl.int32, bitcast=True), mask=inside)


@triton.jit
def _add_checksum(frame, num_words, workspace, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    counted = (i < num_words) & (i != 8)
    word = tl.load(frame + i, mask=counted, other=0).to(tl.uint32, bitcast=True)
    position = tl.where(i < 8, i, i - 1).to(tl.uint32)
    mixed = tl.where(counted, mix(mix(position) ^ word), 0)
    tl.atomic_add(workspace, tl.sum(mixed, axis=0).to(tl.int32, bitcast=True))
    if tl.atomic_add(workspace + 1, 1) == tl.num_programs(0) - 1:  # the last one writes the sum
        tl.store(frame + 8, tl.atomic_add(workspace, 0))


def encode_rice_frame(
    nbytes: int,
    fields: tuple[int, ...],
    tail: Tensor,
    indices: Tensor,
    values: Tensor,
    coding: str,
    best: int,
    budget_nbytes: int,
    flag: Tensor | None,
) -> Tensor:  # (t,) float32, (k,) int64, (k,) float32 -> (nbytes,) uint8
    device, count = indices.device, indices.numel()
    smallest = max(0, best - 2)
    tried, num_blocks = best + 3 - smallest, max(1, -(-count // _BLOCK))
    tensors = (tail, indices, values) if flag is None else (tail, indices, values, flag)
    header = _header(tuple(map(_signed, fields[:_STEP_WORD])), fields[_STEP_WORD + 1], device)
    addresses = [(t.data_ptr(), t.numel()) for t in (header, *tensors)]
    key = (nbytes, coding, best, budget_nbytes, *addresses)
    header[_STEP_WORD : _STEP_WORD + 1].fill_(_signed(fields[_STEP_WORD]))

    def launch() -> Tensor:
        return _launch(header, nbytes, tail, indices, values, coding, smallest, tried, num_blocks, budget_nbytes, flag)

    frame, overwritten = _recorder(device).run(key, launch, header)
    return frame.clone() if overwritten else frame


_own = threading.local()  # buffers that a recording writes to belong to one thread


def _recorder(device: torch.device) -> Recorder[Tensor]:
    recorders: dict[torch.device, Recorder[Tensor]] = _own.__dict__.setdefault("recorders", {})
    return recorders.setdefault(device, Recorder(device))


def _signed(field: int) -> int:
    return field - (1 << 32) if field >= 1 << 31 else field


def _header(front: tuple[int, ...], body_nbytes: int, device: torch.device) -> Tensor:  # -> (9,) int32
    """The header's words but for the step, which is filled in; a thread has its own."""
    headers: dict[Hashable, Tensor] = _own.__dict__.setdefault("headers", {})
    key = (front, body_nbytes, device)
    if key not in headers:
        if len(headers) > 64:
            headers.clear()  # recordings that used them hold on to theirs
        headers[key] = upload(torch.tensor([*front, 0, body_nbytes, 0], dtype=torch.int32), device)
    return headers[key]


def _launch(
    header: Tensor,
    nbytes: int,
    tail: Tensor,
    indices: Tensor,
    values: Tensor,
    coding: str,
    smallest: int,
    tried: int,
    num_blocks: int,
    budget_nbytes: int,
    flag: Tensor | None,
) -> Tensor:  # -> (nbytes,) uint8
    device, count = indices.device, indices.numel()
    frame = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    words = frame.view(torch.int32)
    # Two counters that must be zero, then the sums.
    workspace = torch.zeros(2 + _TRIED * num_blocks, dtype=torch.int32, device=device)
    sums = workspace[2:]
    if tail.numel():
        start = 4 * _HEADER_WORDS
        frame[start : start + 4 * tail.numel()].view(torch.float32).copy_(tail)
    if coding in ("int4", "int2"):
        ends, codes = four_bit_encode(values) if coding == "int4" else two_bit_encode(values)
        start = 4 * (_HEADER_WORDS + tail.numel())
        frame[start : start + 2 * ends.numel()].view(torch.bfloat16).copy_(ends.flatten())
        frame[start + 2 * ends.numel() :][: codes.numel()].copy_(codes)
    grid = (num_blocks,)
    _sum_quotients[grid](indices, count, sums, smallest, num_blocks, tried, _BLOCK)
    _write_entries[grid](
        words, header, flag if flag is not None else workspace, indices, values, count, sums, smallest, num_blocks,
        _HEADER_WORDS + tail.numel(), budget_nbytes // 4, VALUE_CODES[coding], tried, _BLOCK,
        triton.next_power_of_2(num_blocks),
    )  # fmt: skip
    _add_checksum[(triton.cdiv(words.numel(), 4096),)](words, words.numel(), workspace, 4096)
    return frame


@triton.jit
def _sum_words(words, count, start, total, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words + i, mask=i < count, other=0).to(tl.uint32, bitcast=True)
    mixed = tl.where(i < count, mix(mix((start + i).to(tl.uint32)) ^ word), 0)
    tl.atomic_add(total, tl.sum(mixed, axis=0).to(tl.int32, bitcast=True))


def checksum(words: Tensor, start: int = 0) -> Tensor:  # (n,) int32 -> () int64
    total = torch.zeros((), dtype=torch.int32, device=words.device)
    if words.numel():
        _sum_words[(triton.cdiv(words.numel(), 4096),)](words, words.numel(), start, total, 4096)
    return total.to(torch.int64) & 0xFFFFFFFF


def checksum_around(words: Tensor, hole: int) -> Tensor:  # (n,) int32 -> () int64
    return (checksum(words[:hole]) + checksum(words[hole + 1 :], start=hole)) & 0xFFFFFFFF
