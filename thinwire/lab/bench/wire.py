"""How close the index codings come to the entropy of a random choice, and how many bits a value takes in all."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from thinwire.codecs import SparseCodec
from thinwire.codecs.frame import HEADER_NBYTES, _frame_checksum
from thinwire.codecs.indices import INDEX_CODES
from thinwire.codecs.values import VALUE_CODES, value_sections_nbytes
from thinwire.engine.context import ExchangeContext, Hyper
from thinwire.engine.layout import Layout
from thinwire.engine.payloads import Sparse
from thinwire.lab.bench import published_codec
from thinwire.lab.bench.rows import commit, hardware, measure, percentiles, today


@dataclass(frozen=True)
class WireRow:
    """One coding at one density: ``index_bits`` and ``bits`` a value, headers included in the latter.

    ``checksum_ms`` is one checksum of the frame; encoding and decoding contain one each, and ``checksum_share`` is the
    part of their time that both take. ``error`` is the squared error of the values as a share of their square, where
    they are the largest of a Gaussian gradient.
    """

    values: str
    indices: str
    numel: int
    density: float
    frame_bytes: int
    bits: float
    index_bits: float
    entropy_bits: float
    ratio: float
    error: float
    encode_ms: float | None  # None: not measured
    decode_ms: float | None
    checksum_ms: float | None
    checksum_share: float | None
    commit: str
    hardware: str
    date: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def entropy_bits(density: float) -> float:
    """Bits a chosen element that say which ones were chosen, when each is with this probability."""
    p = density
    return (-p * math.log2(p) - (1 - p) * math.log2(1 - p)) / p if p < 1 else 0.0


def wire_rows(numel: int, densities: list[float]) -> list[WireRow]:
    context = ExchangeContext(Layout.of([("gradient", 0, numel, True)]), 0, (Hyper(),))
    rows = []
    for density in densities:
        generator = torch.Generator().manual_seed(0)
        k = max(1, round(density * numel))
        gradient = torch.randn(numel, generator=generator)
        indices = gradient.abs().topk(k, sorted=False).indices.sort().values
        payload = Sparse(indices, gradient[indices], numel, k)
        rows += [
            _row(SparseCodec(values, coding), context, payload) for values in VALUE_CODES for coding in INDEX_CODES
        ]
        if numel >= published_codec.CHUNK:
            rows.append(_published(gradient, density))
    return rows


def _published(gradient: torch.Tensor, density: float) -> WireRow:
    values, numel = published_codec.largest_of_chunks(gradient, density), gradient.numel()
    bins, read = published_codec.quantized(values)
    k, size = len(values), published_codec.nbytes(len(values))
    return WireRow(
        values="2 bits", indices="12 bits, SparseLoCo's", numel=numel, density=k / numel, frame_bytes=size,
        bits=8 * size / k, index_bits=published_codec.PLACE_BITS, entropy_bits=entropy_bits(k / numel),
        ratio=4 * numel / size, error=published_codec.squared_error(values, read[bins]),
        encode_ms=None, decode_ms=None, checksum_ms=None, checksum_share=None,
        commit=commit(), hardware=hardware(torch.device("cpu")), date=today(),
    )  # fmt: skip


def _row(codec: SparseCodec, context: ExchangeContext, payload: Sparse) -> WireRow:
    host, tail, numel, k = torch.device("cpu"), torch.zeros(0), payload.numel, payload.capacity
    frame = codec.encode(context, payload, tail)
    read = codec.decode(context, frame, numel, k, 0, host, "bench").content
    error = published_codec.squared_error(payload.values, read.values)
    encode = measure(lambda i: codec.encode(context, payload, tail), host, repeats=5, warmup=1)
    decode = measure(lambda i: codec.decode(context, frame, numel, k, 0, host, "bench"), host, repeats=5, warmup=1)
    check = percentiles(measure(lambda i: _frame_checksum(frame), host, repeats=15, warmup=3))[1]
    encode_ms, decode_ms = percentiles(encode)[1], percentiles(decode)[1]
    value_bytes = sum(value_sections_nbytes(codec.values, k))
    return WireRow(
        values=codec.values, indices=codec.indices, numel=numel, density=k / numel, frame_bytes=frame.numel(),
        bits=8 * frame.numel() / k, index_bits=8 * (frame.numel() - HEADER_NBYTES - value_bytes) / k,
        entropy_bits=entropy_bits(k / numel), ratio=4 * numel / frame.numel(), error=error, encode_ms=encode_ms,
        decode_ms=decode_ms, checksum_ms=check, checksum_share=2 * check / (encode_ms + decode_ms),
        commit=commit(), hardware=hardware(host), date=today(),
    )  # fmt: skip
