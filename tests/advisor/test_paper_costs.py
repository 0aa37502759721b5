"""The papers' printed numbers come out of their formulas."""

from __future__ import annotations

import math

import pytest

from thinwire.advisor import cost
from thinwire.advisor.cost.papers import GTOPK_ALPHA_S, GTOPK_BETA_S

MB = 1e6
ALEXNET, VGG_A = 4 * 61.1e6, 4 * 132.9e6  # gradient bytes in fp32


def test_gtopk_measured_alpha_and_beta() -> None:
    assert GTOPK_ALPHA_S == 0.436e-3 and pytest.approx(9e-6 * 1e-3) == GTOPK_BETA_S  # 0.436 ms and 9e-6 ms per byte


def test_gtopk_table_one_by_hand() -> None:
    """P = 32, m = 100 MB, rho = 0.001: the setting of Figure 9."""
    assert cost.gtopk_dense_s(32, 100 * MB) == pytest.approx(62 * 0.436e-3 + 2 * 31 / 32 * 1e8 * 9e-9)
    assert cost.gtopk_topk_s(32, 100 * MB, 0.001) == pytest.approx(5 * 0.436e-3 + 62 * 1e5 * 9e-9)
    assert cost.gtopk_gtopk_s(32, 100 * MB, 0.001) == pytest.approx(10 * 0.436e-3 + 20 * 1e5 * 9e-9)


def test_gtopk_figure_nine_as_the_text_describes_it() -> None:
    """Few workers: top-k is slightly faster; 32 workers: much slower; the gap grows with the message."""
    assert cost.gtopk_topk_s(4, 100 * MB, 0.001) < cost.gtopk_gtopk_s(4, 100 * MB, 0.001)
    assert cost.gtopk_topk_s(32, 100 * MB, 0.001) > 2 * cost.gtopk_gtopk_s(32, 100 * MB, 0.001)
    gaps = [cost.gtopk_topk_s(32, m * MB, 0.001) - cost.gtopk_gtopk_s(32, m * MB, 0.001) for m in (10, 50, 100, 500)]
    assert gaps == sorted(gaps) and gaps[0] > 0
    assert all(
        cost.gtopk_dense_s(p, 100 * MB) > cost.gtopk_topk_s(p, 100 * MB, 0.001) for p in (2, 4, 8, 16, 32, 64, 128)
    )


def test_gtopk_complexities() -> None:
    """O(m), O(k P) and O(k log P) of the table's second column, from the formulas without latency."""

    def at(p: int) -> tuple[float, float, float]:
        return (
            cost.gtopk_dense_s(p, 1e8, 0.0), cost.gtopk_topk_s(p, 1e8, 1e-3, 0.0), cost.gtopk_gtopk_s(p, 1e8, 1e-3, 0.0)
        )  # fmt: skip

    dense, topk, gtopk = zip(at(256), at(1024), strict=True)
    assert dense[1] / dense[0] == pytest.approx(1.0, rel=0.01)
    assert topk[1] / topk[0] == pytest.approx(4.0, rel=0.01)
    assert gtopk[1] / gtopk[0] == pytest.approx(10 / 8)


ETHERNET = cost.PaperCluster(gpu_rate=10e9, cpu_rate=10e9, net_rate=0.125e9, latency_s=5e-5)


def test_terngrad_traffic_reduction() -> None:
    """Section 3.1: 32 / log2(3) = 20.18 from worker to server, and more than 4 back for up to 127 workers."""
    up, down = cost.ternary_bits(8)
    assert 32 / up == pytest.approx(20.18, abs=0.01) and down == math.log2(17)
    assert 32 / cost.ternary_bits(127)[1] > 4


def test_terngrad_equations_by_hand() -> None:
    g, t = 100e6, 0.5
    inside = g / 10e9 * 2
    between = (5e-5 + g / 0.125e9) * 3
    assert cost.strong_scaling_s(ETHERNET, 4, 8, t, g) == pytest.approx(
        (t - g / 10e9) / 32 + inside + g / 10e9 + between
    )
    assert cost.weak_scaling_s(ETHERNET, 4, 8, t, g) == pytest.approx(t + inside + between)
    assert cost.strong_throughput(ETHERNET, 4, 8, t, g, 256) == 256 / cost.strong_scaling_s(ETHERNET, 4, 8, t, g)
    assert cost.weak_throughput(ETHERNET, 4, 8, t, g, 32) == 32 * 32 / cost.weak_scaling_s(ETHERNET, 4, 8, t, g)


def test_terngrad_one_gpu_is_what_was_profiled() -> None:
    assert cost.weak_scaling_s(ETHERNET, 1, 1, 0.3, ALEXNET) == pytest.approx(0.3)
    assert cost.strong_scaling_s(ETHERNET, 1, 1, 0.3, ALEXNET) == pytest.approx(0.3)


def test_terngrad_speedup_grows_with_gradient_and_falls_with_bandwidth() -> None:
    """Section 5: models with more communication for their computation, and slower networks, gain more."""

    def gain(nbytes: float, rate: float) -> float:
        cluster = cost.PaperCluster(10e9, 10e9, rate)
        dense = cost.weak_scaling_s(cluster, 4, 128, 0.3, nbytes)
        return dense / cost.weak_scaling_s(cluster, 4, 128, 0.3, nbytes, nbytes / 16)

    assert gain(VGG_A, 0.125e9) > gain(ALEXNET, 0.125e9) > gain(4 * 7e6, 0.125e9) > 1
    assert gain(ALEXNET, 0.125e9) > gain(ALEXNET, 1.25e9) > gain(ALEXNET, 12.5e9)


def test_dgc_density_doubles_at_every_step_until_all_is_dense() -> None:
    assert [cost.density_after(s, 0.001) for s in range(4)] == [0.001, 0.002, 0.004, 0.008]
    assert cost.density_after(10, 0.001) == 1.0
    by_hand = sum(2 * 0.001 * 2**s * ALEXNET / 0.125e9 for s in range(6))
    assert cost.sparse_all_reduce_s(64, ALEXNET, 0.001, 0.125e9) == pytest.approx(by_hand)
    dense = ALEXNET / 0.125e9 * 10
    assert cost.sparse_all_reduce_s(1024, ALEXNET, 1.0, 0.125e9) == pytest.approx(dense)


def test_dgc_alexnet_on_64_nodes() -> None:
    """Section 4.3: dense reaches about 30x on 10 Gb/s; DGC more than 40x with only 1 Gb/s."""
    wire_s = ALEXNET / 1.25e9 * 6
    one_node_s = wire_s / (64 / 30 - 1)  # what a node computes if dense has a speedup of 30
    assert cost.speedup_over_one_node(64, one_node_s, ALEXNET, 1.25e9) == pytest.approx(30)
    assert cost.speedup_over_one_node(64, one_node_s, ALEXNET, 0.125e9, density=0.001) > 40
    assert cost.speedup_over_one_node(64, one_node_s, ALEXNET, 0.125e9) < 10


@pytest.mark.parametrize("bad", [lambda: cost.gtopk_dense_s(0, 1.0), lambda: cost.gtopk_topk_s(2, 1.0, 0.0),
                                 lambda: cost.sparse_all_reduce_s(2, -1.0, 0.5, 1.0)])  # fmt: skip
def test_paper_formulas_refuse_impossible_arguments(bad: object) -> None:
    with pytest.raises(ValueError):
        bad()  # type: ignore[operator]
