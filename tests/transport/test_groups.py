"""What ranks must agree on is compared, and what a peer says of itself is not trusted."""

from __future__ import annotations

import pytest
import torch

import thinwire
from thinwire.transport import ThreadNet, ThreadWorld
from thinwire.transport.groups import check_agreement


def test_check_agreement_refuses_parameters_in_another_order() -> None:
    shapes = [("a", "[2] float32"), ("b", "[2] float32")]

    def work(net: ThreadNet) -> str:
        with pytest.raises(ValueError) as caught:
            check_agreement(net, {"parameters": dict(shapes if net.rank == 0 else shapes[::-1])}, None)
        return str(caught.value)

    first, second = ThreadWorld(2).run(work)
    assert first == second and "order" in first and "rank 1" in first


def test_check_agreement_does_not_trust_a_peers_length_or_text() -> None:
    """A peer that announced a terabyte made every rank allocate it."""

    class Liar(ThreadNet):
        def all_gather(
            self, frame: torch.Tensor, room: torch.Tensor | None = None, pairwise: bool = False
        ) -> list[torch.Tensor]:
            frames = super().all_gather(frame)
            if frame.numel() == 8:
                frames[1] = torch.tensor([self.lie], dtype=torch.int64).view(torch.uint8)
            elif self.lie > 0:
                frames[1] = torch.full_like(frames[1], 0xFF)
            return frames

    def work(net: ThreadNet, lie: int) -> str:
        liar = Liar(net.world, net.rank)
        liar.lie = lie
        with pytest.raises(thinwire.FrameError) as caught:
            check_agreement(liar, {"method": "dgc"}, None)
        return str(caught.value)

    for lie, word in ((1 << 40, "text of"), (-5, "text of"), (0, "text of"), (3, "UTF-8")):
        for sentence in ThreadWorld(2).run(lambda net, lie=lie: work(net, lie)):
            assert "bad frame from rank 1" in sentence and word in sentence
