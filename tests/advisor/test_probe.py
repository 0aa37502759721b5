"""alpha and beta are the same on all ranks, and grow with the link's latency and slowness."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from cluster import Cluster
from torch import Tensor

from thinwire.advisor.link import Link, measure_link
from thinwire.transport import ThreadNet, ThreadWorld, TorchNet, overhead

BURST = 200_000  # bytes that pass at once, as in front of a token bucket


class ShapedNet(ThreadNet):
    """Ranks that are threads, on links of a known latency and rate that let a burst pass."""

    def __init__(self, net: ThreadNet, alpha_s: float, beta_s_per_byte: float) -> None:
        super().__init__(net.world, net.rank)
        self.alpha_s, self.beta_s_per_byte = alpha_s, beta_s_per_byte

    def _shaped(self, rounds: int, nbytes: float) -> None:
        time.sleep(rounds * self.alpha_s + max(0.0, nbytes - BURST) * self.beta_s_per_byte)

    def all_gather(self, frame: Tensor, room: Tensor | None = None, pairwise: bool = False) -> list[Tensor]:
        self._shaped(self.size - 1, (self.size - 1) * frame.numel())
        return super().all_gather(frame)

    def all_reduce(self, tensor: Tensor, largest: bool = False) -> None:
        if tensor.numel() > 1:  # not the meetings and agreements around it
            rounds = 2 * (self.size - 1)
            self._shaped(rounds, rounds / self.size * tensor.numel() * tensor.element_size())
        super().all_reduce(tensor, largest)


@pytest.mark.parametrize(("alpha_s", "beta"), [(0.002, 8 / 100e6), (0.004, 8 / 20e6), (0.03, 8 / 20e6)])
def test_measure_link_finds_a_known_link_behind_its_burst(alpha_s: float, beta: float) -> None:
    links = ThreadWorld(3).run(lambda net: measure_link(ShapedNet(net, alpha_s, beta)))
    assert links[0] == links[1] == links[2]
    assert links[0].beta_s_per_byte == pytest.approx(beta, rel=0.3)
    assert links[0].alpha_s >= alpha_s


def probe(group: Any) -> tuple[Link, int, int]:
    net = TorchNet(group, torch.device("cpu"))
    return measure_link(net), net.traffic.handed + net.traffic.sent, net.traffic.overhead


def test_measure_link_agrees_on_real_ranks_and_leaves_the_ratio_alone(cluster: Cluster) -> None:
    for size in (2, 3):
        results = cluster.run(probe, size)
        assert all(link == results[0][0] for link, _, _ in results)
        assert results[0][0].alpha_s > 0 and results[0][0].beta_s_per_byte > 0
        assert all(counted == 0 and overhead > 0 for _, counted, overhead in results)


def test_aside_stays_out_of_the_ratio_when_it_fails() -> None:
    net = ThreadNet(ThreadWorld(1), 0)
    net.traffic.handed = 7
    with pytest.raises(ZeroDivisionError), overhead(net):
        net.traffic.handed, net.traffic.seconds = 100, 1.0
        raise ZeroDivisionError
    assert (net.traffic.handed, net.traffic.seconds) == (7, 0.0)


def test_link_of_a_group_of_one_is_free() -> None:
    link = ThreadWorld(1).run(measure_link)[0]
    assert link == Link(0.0, 0.0) and link.seconds(1e9, 5) == 0.0 and link.rate_bits == float("inf")


def test_link_reads_well() -> None:
    assert str(Link(0.001, 8e-9)) == "1 ms per round, 1 Gb/s"
    assert str(Link(0.0, 8 / 250e3)) == "0 ms per round, 250 kb/s"
    assert Link(0.5, 2.0).seconds(10, 3) == 21.5
