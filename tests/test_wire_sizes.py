"""Bytes: counted traffic equals the written format's formulas, and the bits a value or element keep their promises."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import plain_wire as plain
import pytest
import torch
from oracles.selection import balanced
from torch import Tensor

from thinwire.codecs import FloatsCodec, LevelsCodec, SignsCodec, SparseCodec, TernaryCodec
from thinwire.engine.context import ExchangeContext, Hyper
from thinwire.engine.layout import Layout
from thinwire.engine.payloads import Sparse
from thinwire.methods import DGC, BlockSign, Dense, GradientDropping, GTopK, Method, Noop, SignSGD, TernGrad
from thinwire.transport import ThreadNet, ThreadWorld

CPU = torch.device("cpu")
RESNET50 = 25_557_032
MILLION = 1_000_000


# -------------------------------------------------------------------------------------------------- the sparse promise


def sparse_nbytes(values: str, indices: str, numel: int, k: int, tail: int, spread: Any = ()) -> int:
    """The document's formula."""
    sections = {"fp32": 4 * k, "fp16": plain.padded(2 * k), "bf16": plain.padded(2 * k),
                "int8": 4 * -(-k // 256) + plain.padded(k),
                "int4": 4 * -(-k // 128) + plain.padded(-(-k // 2))}  # fmt: skip
    return 36 + 4 * tail + sections[values] + plain.index_budget(indices, numel, k, spread=spread)


@pytest.mark.parametrize("values", ["fp32", "fp16", "bf16", "int8", "int4"])
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
            ("rice", "int4", 15.9)]  # fmt: skip


@pytest.mark.parametrize(("indices", "values", "most"), PROMISES)
def test_bits_a_value_at_a_thousandth_of_resnet50(indices: str, values: str, most: float) -> None:
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
        back, _ = codec.decode(context, frame, RESNET50, k, 0, CPU, "x")
        assert np.array_equal(back.indices.numpy(), chosen)
        body = int(frame[28:32].view(torch.int32))
        assert 8 * (36 + body) / k <= most


def test_rice_is_near_the_entropy() -> None:
    """Random positions cost at most 0.1 bits more than their entropy, plus half a percent of slack."""
    for density in (0.0005, 0.001, 0.01, 0.05, 0.25):
        k = round(density * RESNET50)
        entropy = -math.log2(density) - (1 - density) / density * math.log2(1 - density)
        bits = 8 * plain.index_budget("rice", RESNET50, k) / k
        assert entropy < bits < 1.0051 * (entropy + 0.1), density


# ------------------------------------------------------------------------------------------------------ real exchanges


def layout_of(sizes: list[int], tail: int = 0) -> Layout:
    rows = [(f"w{i}", i, n, True) for i, n in enumerate(sizes)]
    return Layout.of(rows + ([("bias", len(sizes), tail, False)] if tail else []))


def traffic(method: Method, layout: Layout, size: int, seed: int = 0) -> list[Any]:
    """One exchange of every rank through the method's real parts; returns the ranks' counters."""
    hypers = (Hyper(lr=0.1),) * len(layout.segments)
    weights = tuple(torch.zeros(segment.numel) for segment in layout.segments)

    # Read by one thread: torch's lock of the generator and the interpreter's can wait for each other.
    before = torch.get_rng_state()

    def work(net: ThreadNet) -> tuple[Any, Tensor]:
        aggregator = method.aggregator(net, optimizer_is_sgd=True)
        grad = np.random.default_rng([seed, net.rank]).standard_normal(layout.numel, dtype=np.float32)
        mean = aggregator.mean(ExchangeContext(layout, 3, hypers, weights), torch.from_numpy(grad)).clone()
        return net.traffic, mean

    results = ThreadWorld(size).run(work)
    assert torch.equal(before, torch.get_rng_state())
    if not isinstance(method, Noop):
        assert all(torch.equal(mean, results[0][1]) for _, mean in results)
    return [counters for counters, _ in results]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("values", ["fp32", "int8", "int4"])
@pytest.mark.parametrize("indices", ["int32", "delta16", "rice"])
def test_all_gather_bytes(size: int, values: str, indices: str) -> None:
    layout = layout_of([5000, 300, 41_000], tail=17)
    for scope, entries in (("tensor", 50 + 3 + 410), ("balanced", sum(balanced(0.01, [5000, 300, 41_000])))):
        method = DGC(density=0.01, scope=scope, values=values, indices=indices, factor_masking=True)
        frame = sparse_nbytes(values, indices, 46_300, entries, 17)
        for counters in traffic(method, layout, size):
            assert counters.handed == (frame if size > 1 else 0)
            assert counters.sent == counters.received == (size - 1) * frame


UNEVEN = {  # tensors that send quite different shares, in one frame
    "the first layers of VGG-16": [1728, 36864, 73728, 147456, 294912, 589824, 589824, 1179648],
    "a large embedding": [3_000_000, *[6500] * 80],
}


@pytest.mark.parametrize("density", [0.006, 0.0625, 0.25])
@pytest.mark.parametrize("sizes", UNEVEN.values(), ids=list(UNEVEN))
def test_a_frame_holds_what_uneven_quotas_choose_by_chance(sizes: list[int], density: float) -> None:
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
        back, _ = SparseCodec("int8").decode(context, frame, layout.numel, len(chosen), 0, CPU, "here")
        assert back.indices.numel() == len(chosen), "none was left out"


def test_gradient_dropping_bytes() -> None:
    frame = sparse_nbytes("int8", "rice", 46_300, 463, 17)
    for counters in traffic(GradientDropping(density=0.01), layout_of([5000, 300, 41_000], tail=17), 3):
        assert (counters.handed, counters.sent, counters.received) == (frame, 2 * frame, 2 * frame)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7, 8])
def test_butterfly_bytes(size: int) -> None:
    """log2 P swaps a rank; extras send one frame and get the result and a mask, proxies the other way round."""
    numel, tail, k = 46_300, 17, 463
    frame = sparse_nbytes("fp32", "rice", numel, k, tail)
    mask = 36 + plain.padded(math.ceil(k / 8))
    power = 1 << (size.bit_length() - 1)
    swaps = int(math.log2(power))
    for rank, counters in enumerate(traffic(GTopK(density=0.01), layout_of([5000, 300, 41_000], tail=tail), size)):
        if rank >= power:
            sent, received = frame, frame + mask
        elif rank < size - power:
            sent, received = (swaps + 1) * frame + mask, (swaps + 1) * frame
        else:
            sent = received = swaps * frame
        assert (counters.handed, counters.sent, counters.received) == (sent, sent, received), rank


def slices(numel: int, size: int) -> list[int]:
    return [numel * (r + 1) // size - numel * r // size for r in range(size)]


def ceil4(bits: int) -> int:
    return plain.padded(math.ceil(bits / 8))


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("method", [SignSGD(), BlockSign(), BlockSign(block=4096)], ids=str)
def test_one_bit_an_element_each_way(method: Method, size: int) -> None:
    """Sharded: each way a rank hands over its part of one bit an element; headers and scales are counted."""
    shares = slices(MILLION, size)
    block = getattr(method, "block", None)
    for rank, counters in enumerate(traffic(method, layout_of([MILLION]), size)):

        def scales(r: int, server: bool) -> int:
            if block is None:
                return 0
            if block == "tensor":
                return 1
            start, stop = MILLION * r // size, MILLION * (r + 1) // size
            return math.ceil((stop - start) / block) if server else (stop - 1) // block - start // block + 1

        up = [36 + 4 * scales(r, False) + ceil4(shares[r]) for r in range(size)]
        down = max(36 + 4 * scales(r, True) + ceil4(shares[r]) for r in range(size))
        others = sum(up) - up[rank]
        assert counters.handed == others + down
        assert counters.sent == others + (size - 1) * down
        assert counters.received == (size - 1) * (up[rank] + down)
        most_scales = 0 if block is None else 4 * (size if block == "tensor" else MILLION // 4096 + size + 1)
        # One bit an element up and one down; the ring of the answers carries (N - 1) / N of it.
        assert 8 * (others - most_scales) / MILLION <= 1.02
        assert 8 * ((size - 1) * down - most_scales) / MILLION <= 1.02
        assert 8 * (counters.sent - 2 * most_scales) / MILLION <= 2.04


@pytest.mark.parametrize("two_way", [True, False])
def test_one_server_for_all(two_way: bool) -> None:
    size = 3
    up = 36 + 4 + ceil4(MILLION)
    down = up if two_way else 36 + 4 * MILLION
    ranks = traffic(BlockSign(topology="server", two_way=two_way), layout_of([MILLION]), size)
    assert (ranks[0].sent, ranks[0].received) == (2 * down, 2 * up)
    for counters in ranks[1:]:
        assert (counters.handed, counters.sent, counters.received) == (up, up, down)
        assert 8 * counters.sent / MILLION <= 1.02
        assert not two_way or 8 * counters.received / MILLION <= 1.02


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("topology", ["server", "sharded"])
def test_terngrad_bits(topology: str, size: int) -> None:
    """At most 1.61 bits an element up; ceil(log2(2N+1)) bits down where the scalers are shared."""
    numel, bits = 400_000, math.ceil(math.log2(2 * size + 1))
    scaler = 4  # bytes in the all-reduce of one shared scaler
    on_link = round(2 * (size - 1) / size * scaler)
    shares = slices(numel, size) if topology == "sharded" else [numel]
    up = [36 + plain.padded(math.ceil(share / 5)) for share in shares]
    down = max(36 + ceil4(share * bits) for share in shares)
    for rank, counters in enumerate(traffic(TernGrad(topology=topology), layout_of([numel]), size)):
        if topology == "sharded":
            others = sum(up) - up[rank]
            assert counters.handed == scaler + others + down
            assert counters.sent == on_link + others + (size - 1) * down
            assert counters.received == on_link + (size - 1) * (up[rank] + down)
            assert 8 * others / numel <= 1.61
            assert 8 * (size - 1) * down / numel <= bits
        elif rank:
            assert (counters.handed, counters.sent, counters.received) == (
                scaler + up[0],
                on_link + up[0],
                on_link + down,
            )
            assert 8 * up[0] / numel <= 1.61 and 8 * down / numel <= bits + 0.01
        else:
            assert counters.sent == on_link + (size - 1) * down
            assert counters.received == on_link + (size - 1) * up[0]


def test_terngrad_with_own_scalers_answers_in_floats() -> None:
    numel, size = 60_000, 3
    up, down = 36 + 4 + plain.padded(numel // 3 // 5), 36 + 4 * numel // 3
    for counters in traffic(TernGrad(share_scaler=False), layout_of([numel]), size):
        assert (counters.handed, counters.sent) == (2 * up + down, 2 * (up + down))


def test_small_and_excluded_tensors_in_sharded_exchanges() -> None:
    """Small tensors are served whole by rank (ordinal mod N), the tail is cut into slices, shards may be empty."""
    layout = layout_of([100, 5000, 8], tail=7)
    size = 4
    whole = {0: 100, 2: 8}
    coded = [slices(5000, size)[r] + whole.get(r, 0) for r in range(size)]
    tails = slices(7, size)
    up = [36 + 4 * tails[r] + ceil4(coded[r]) for r in range(size)]
    for rank, counters in enumerate(traffic(SignSGD(), layout, size)):
        assert counters.sent == sum(up) - up[rank] + (size - 1) * max(up)
    # Only rank 1 serves anything here: ordinal 1, and no tail.
    only = Layout.of([("w", 1, 50, True)])
    frame = 36 + 8
    for rank, counters in enumerate(traffic(SignSGD(), only, size)):
        assert counters.sent == (frame if rank != 1 else 0) + (size - 1) * frame


@pytest.mark.parametrize("size", [1, 2, 3])
def test_dense_and_noop_bytes(size: int) -> None:
    numel = 1001
    for counters in traffic(Noop(), layout_of([numel]), size):
        assert (counters.handed, counters.sent, counters.received) == (0, 0, 0)
    for counters in traffic(Dense(), layout_of([numel]), size):
        assert counters.handed == (4 * numel if size > 1 else 0)
        assert counters.sent == counters.received == round(2 * (size - 1) / size * 4 * numel)
    share = 2 * math.ceil(numel / size)
    for counters in traffic(Dense(dtype="bf16"), layout_of([numel]), size):
        assert counters.sent == counters.received == 2 * (size - 1) * share


def test_ratio_of_dgc_at_a_thousandth() -> None:
    """A million elements at 0.1 %: every rank hands over 700 times less than dense fp32."""
    for counters in traffic(DGC(density=0.001, values="fp32", factor_masking=True), layout_of([MILLION]), 2):
        assert 4 * MILLION / counters.handed > 680
    for counters in traffic(DGC(density=0.001, values="int8", factor_masking=True), layout_of([MILLION]), 2):
        assert 4 * MILLION / counters.handed > 1400


@pytest.mark.parametrize("indices", ["rice", "delta16"])
def test_frames_that_may_be_merged_leave_nothing_out(indices: str) -> None:
    """More than 4096 entries, half of them side by side and the rest far apart: a usual frame has no room for them."""
    numel = 2_000_000
    k, near = 6_000, torch.arange(3_000)
    far = 3_000 + torch.arange(1, 3_001) * ((numel - 3_001) // 3_000)
    payload = Sparse(torch.cat([near, far]), torch.linspace(1.0, 2.0, k), numel, k)
    layout = Layout.of([("w", 0, numel, True)])
    context = ExchangeContext(layout, 0, (Hyper(),))
    usual, roomy = SparseCodec("fp32", indices), DGC(indices=indices, values="fp32").codec
    for codec, left_out in ((usual, indices == "rice"), (roomy, False)):
        frame = codec.encode_finished(context, payload, torch.zeros(0))
        assert frame.numel() == codec.nbytes(numel, k, 0)
        kept, _ = codec.decode(context, frame, numel, k, 0, CPU, "here")
        assert (kept.indices.numel() < k) == left_out
    assert not DGC(values="int8").codec.holds_any  # whose groups depend on the model alone
    merged = [DGC(values="fp32"), GradientDropping(values="bf16", scope="balanced")]
    alone = [DGC(values="fp32", scope="model"), DGC(values="fp32", clip_norm=1.0), GradientDropping(values="fp32")]
    assert all(method.codec.holds_any for method in merged) and not any(method.codec.holds_any for method in alone)
