"""How long frames are: the written format's formulas, bits per value, and what must fit."""

from __future__ import annotations

import math

import numpy as np
import plain_wire as plain
import pytest
import torch
from oracles.selection import balanced
from traffic import layout_of, sparse_nbytes

from thinwire.codecs import FloatsCodec, LevelsCodec, SignsCodec, SparseCodec, TernaryCodec
from thinwire.engine.context import ExchangeContext, Hyper
from thinwire.engine.layout import Layout
from thinwire.engine.payloads import Sparse
from thinwire.methods import DGC, GradientDropping
from thinwire.methods.shared_parts import gathered_codec

CPU = torch.device("cpu")
RESNET50 = 25_557_032
MILLION = 1_000_000


@pytest.mark.parametrize("values", ["fp32", "fp16", "bf16", "int8", "int4", "int2"])
@pytest.mark.parametrize("indices", ["int32", "delta16", "rice"])
def test_sparse_lengths_are_the_formula(values: str, indices: str) -> None:
    codec = SparseCodec(values, indices)
    for numel in (0, 1, 7, 1023, 4097, 70_000, MILLION, RESNET50):
        for k in {0, 1, 3, 255, 257, 4096, 4097, numel // 1000, numel // 4, numel}:
            if k <= numel:
                for tail in (0, 1, 999):
                    assert codec.nbytes(numel, k, tail) == sparse_nbytes(values, indices, numel, k, tail)


def test_other_lengths_are_the_formula() -> None:
    for numel in (0, 1, 7, 8, 9, 1023, 4097, MILLION):
        for scales in (0, 1, 17):
            for tail in (0, 5):
                fixed = 36 + 4 * tail + 4 * scales
                assert SignsCodec().nbytes(numel, scales, tail) == fixed + plain.padded(math.ceil(numel / 8))
                assert TernaryCodec().nbytes(numel, scales, tail) == fixed + plain.padded(math.ceil(numel / 5))
                assert FloatsCodec().nbytes(numel, tail) == 36 + 4 * tail + 4 * numel
        for ranks in (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 100):
            bits = math.ceil(math.log2(2 * ranks + 1))
            assert LevelsCodec().nbytes(numel, ranks, 0) == 36 + plain.padded(math.ceil(numel * bits / 8))


PROMISES = [("delta16", "fp32", 48.1), ("rice", "fp32", 43.6), ("rice", "fp16", 27.6), ("rice", "int8", 19.8),
            ("rice", "int4", 15.9), ("rice", "int2", 14.2)]  # fmt: skip


@pytest.mark.parametrize(("indices", "values", "most"), PROMISES)
def test_bits_per_value_at_a_thousandth_of_resnet50(indices: str, values: str, most: float) -> None:
    """The formula, and really encoded frames of random positions that leave nothing out."""
    k, codec = round(0.001 * RESNET50), SparseCodec(values, indices)
    nbytes = codec.nbytes(RESNET50, k, 0)
    assert 8 * nbytes / k <= most
    context = ExchangeContext(Layout.of([("w", 0, RESNET50, True)]), 0, ())
    for seed in range(3):
        generator = np.random.default_rng(seed)
        chosen = np.unique(generator.integers(0, RESNET50, 2 * k))
        chosen = np.sort(generator.permutation(chosen)[:k])
        values_ = torch.from_numpy(generator.standard_normal(k).astype(np.float32))
        frame = codec.encode(context, Sparse(torch.from_numpy(chosen), values_, RESNET50, k), torch.zeros(0))
        assert frame.numel() == nbytes
        back = codec.decode(context, frame, RESNET50, k, 0, CPU, "x").content
        assert np.array_equal(back.indices.numpy(), chosen)
        body = int(frame[28:32].view(torch.int32))
        assert 8 * (36 + body) / k <= most


def test_rice_codes_are_near_the_entropy() -> None:
    """Random positions cost at most 0.1 bits more than their entropy, plus half a percent of slack."""
    for density in (0.0005, 0.001, 0.01, 0.05, 0.25):
        k = round(density * RESNET50)
        entropy = -math.log2(density) - (1 - density) / density * math.log2(1 - density)
        bits = 8 * plain.index_budget("rice", RESNET50, k) / k
        assert entropy < bits < 1.0051 * (entropy + 0.1), density


UNEVEN = {  # tensors that send quite different shares, in one frame
    "the first layers of VGG-16": [1728, 36864, 73728, 147456, 294912, 589824, 589824, 1179648],
    "a large embedding": [3_000_000, *[6500] * 80],
}


@pytest.mark.parametrize("density", [0.006, 0.0625, 0.25])
@pytest.mark.parametrize("sizes", UNEVEN.values(), ids=list(UNEVEN))
def test_frame_holds_what_uneven_quotas_choose_by_chance(sizes: list[int], density: float) -> None:
    """Its length counts on every tensor's own share; evenly spread entries would need less, and some would wait."""
    layout = layout_of(sizes)
    ks = balanced(density, sizes)
    context, spread = ExchangeContext(layout, 0, ()), tuple(zip(sizes, ks, strict=True))
    starts = np.cumsum([0, *sizes[:-1]])
    for seed in range(3):
        generator = np.random.default_rng(seed)
        parts = [
            start + np.sort(generator.choice(n, k, replace=False))
            for start, n, k in zip(starts, sizes, ks, strict=True)
        ]
        chosen = torch.from_numpy(np.concatenate(parts))
        values = torch.from_numpy(generator.standard_normal(len(chosen)).astype(np.float32))
        payload = Sparse(chosen, values, layout.numel, len(chosen), spread)
        frame = SparseCodec("int8").encode_finished(context, payload, torch.zeros(0))
        assert frame.numel() == sparse_nbytes("int8", "rice", layout.numel, len(chosen), 0, spread)
        back = SparseCodec("int8").decode(context, frame, layout.numel, len(chosen), 0, CPU, "here").content
        assert back.indices.numel() == len(chosen), "none was left out"


@pytest.mark.parametrize("indices", ["rice", "delta16"])
def test_frames_that_may_be_merged_leave_nothing_out(indices: str) -> None:
    """More than 4096 entries, half of them side by side and the rest far apart: a usual frame has no room for them."""
    numel = 2_000_000
    k, near = 6_000, torch.arange(3_000)
    far = 3_000 + torch.arange(1, 3_001) * ((numel - 3_001) // 3_000)
    payload = Sparse(torch.cat([near, far]), torch.linspace(1.0, 2.0, k), numel, k)
    layout = Layout.of([("w", 0, numel, True)])
    context = ExchangeContext(layout, 0, (Hyper(),))
    usual, roomy = SparseCodec("fp32", indices), gathered_codec(DGC(indices=indices, values="fp32"))
    for codec, left_out in ((usual, indices == "rice"), (roomy, False)):
        frame = codec.encode_finished(context, payload, torch.zeros(0))
        assert frame.numel() == codec.nbytes(numel, k, 0)
        kept = codec.decode(context, frame, numel, k, 0, CPU, "here").content
        assert (kept.indices.numel() < k) == left_out
    assert not gathered_codec(DGC(values="int8")).holds_any  # whose groups depend on the model alone
    merged = [DGC(values="fp32"), GradientDropping(values="bf16", scope="balanced")]
    alone = [DGC(values="fp32", scope="model"), DGC(values="fp32", clip_norm=1.0), GradientDropping(values="fp32")]
    assert all(gathered_codec(method).holds_any for method in merged)
    assert not any(gathered_codec(method).holds_any for method in alone)
