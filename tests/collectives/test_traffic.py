"""Counted traffic of every collective equals the written format's formulas."""

from __future__ import annotations

import math

import plain_wire as plain
import pytest
from oracles.selection import balanced
from traffic import ceil4, layout_of, slices, sparse_nbytes, traffic

from thinwire.engine.layout import Layout
from thinwire.methods import DGC, BlockSign, Dense, GradientDropping, GTopK, Method, Noop, SignSGD, TernGrad

MILLION = 1_000_000


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("values", ["fp32", "int8", "int4", "int2"])
@pytest.mark.parametrize("indices", ["int32", "delta16", "rice"])
def test_all_gather_sends_its_frame_to_every_other_rank(size: int, values: str, indices: str) -> None:
    layout = layout_of([5000, 300, 41_000], tail=17)
    for scope, entries in (("tensor", 50 + 3 + 410), ("balanced", sum(balanced(0.01, [5000, 300, 41_000])))):
        method = DGC(density=0.01, scope=scope, values=values, indices=indices, factor_masking=True)
        frame = sparse_nbytes(values, indices, 46_300, entries, 17)
        for counters in traffic(method, layout, size):
            assert counters.handed == (frame if size > 1 else 0)
            assert counters.sent == counters.received == (size - 1) * frame


def test_gradient_dropping_sends_one_frame_to_every_other_rank() -> None:
    frame = sparse_nbytes("int8", "rice", 46_300, 463, 17)
    for counters in traffic(GradientDropping(density=0.01), layout_of([5000, 300, 41_000], tail=17), 3):
        assert (counters.handed, counters.sent, counters.received) == (frame, 2 * frame, 2 * frame)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7, 8])
def test_global_topk_sends_its_butterflys_frames(size: int) -> None:
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


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("method", [SignSGD(), BlockSign(), BlockSign(block=4096)], ids=str)
def test_sharded_signs_take_one_bit_per_element_each_way(method: Method, size: int) -> None:
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
def test_one_server_gets_and_sends_all_signs(two_way: bool) -> None:
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
def test_terngrad_takes_its_bits_per_element_each_way(topology: str, size: int) -> None:
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


def test_terngrad_with_own_scalers_is_answered_in_floats() -> None:
    numel, size = 60_000, 3
    up, down = 36 + 4 + plain.padded(numel // 3 // 5), 36 + 4 * numel // 3
    for counters in traffic(TernGrad(share_scaler=False), layout_of([numel]), size):
        assert (counters.handed, counters.sent) == (2 * up + down, 2 * (up + down))


def test_sharded_signs_serve_small_tensors_whole_and_the_tail_in_slices() -> None:
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
def test_dense_sends_a_ring_and_noop_nothing(size: int) -> None:
    numel = 1001
    for counters in traffic(Noop(), layout_of([numel]), size):
        assert (counters.handed, counters.sent, counters.received) == (0, 0, 0)
    for counters in traffic(Dense(), layout_of([numel]), size):
        assert counters.handed == (4 * numel if size > 1 else 0)
        assert counters.sent == counters.received == round(2 * (size - 1) / size * 4 * numel)
    share = 2 * math.ceil(numel / size)
    for counters in traffic(Dense(dtype="bf16"), layout_of([numel]), size):
        assert counters.sent == counters.received == 2 * (size - 1) * share


def test_dgc_at_a_thousandth_sends_hundreds_of_times_less() -> None:
    """A million elements at 0.1 %: every rank hands over 700 times less than dense fp32."""
    for counters in traffic(DGC(density=0.001, values="fp32", factor_masking=True), layout_of([MILLION]), 2):
        assert 4 * MILLION / counters.handed > 680
    for counters in traffic(DGC(density=0.001, values="int8", factor_masking=True), layout_of([MILLION]), 2):
        assert 4 * MILLION / counters.handed > 1400
