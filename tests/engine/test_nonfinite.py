"""Gradients and frames that are not finite, or whose sums would not be: nothing bad is kept. Learning rates of zero."""

from __future__ import annotations

import struct

import plain_wire as plain
import pytest
import torch
from frame_samples import START
from generators import torch_generator_untouched  # noqa: F401  every test of this file
from means import mean_of
from tensor_bytes import to_bytes, to_tensor
from torch import Tensor

from thinwire.engine.context import ExchangeContext, Hyper
from thinwire.engine.layout import Layout
from thinwire.errors import FrameError, NonFiniteError
from thinwire.methods import METHODS
from thinwire.transport import ThreadNet, ThreadWorld

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", ["dgc", "gtopk", "terngrad", "blocksign", "dropping", "signsgd"])
@pytest.mark.parametrize(("odd", "one_buffer"), [(NAN, False), (INF, True), (-INF, False), (3e38, True)])
def test_nonfinite_gradient_stops_all_ranks_and_touches_no_residual(
    odd: float, one_buffer: bool, name: str, ranks: int
) -> None:
    """One rank's bad gradient is heard by every rank in the same exchange; its own memory stays bit for bit."""
    layout = Layout.of([("w", 0, 1000, True), ("b", 1, 40, True)])
    hypers = (Hyper(lr=0.1, momentum=0.9),) * 2

    def work(net: ThreadNet) -> str:
        exchange = METHODS[name]().aggregator(net, True)
        mean_of(exchange, ExchangeContext(layout, 0, hypers), torch.linspace(-1, 1, 1040))
        before = exchange.state_dict()
        grad = torch.linspace(-1, 1, 1040)
        if net.rank == ranks - 1:
            grad[1002] = odd
        parts = [part if one_buffer else part.clone() for part in layout.split(grad.clone())]
        with pytest.raises(NonFiniteError) as caught:
            exchange.reduce(ExchangeContext(layout, 1, hypers), parts)
        if net.rank == ranks - 1:
            assert torch.equal(torch.cat(parts).isfinite(), grad.isfinite()), (
                "whoever looks at the gradient finds what is wrong"
            )
        for kind, vectors in exchange.state_dict()["memory"].items():
            for name_, after in vectors.items():
                if isinstance(after, Tensor):
                    assert bool(torch.isfinite(after).all())
                    assert net.rank != ranks - 1 or torch.equal(after, before["memory"][kind][name_])
        return str(caught.value)

    sentences = ThreadWorld(ranks).run(work)
    assert "'b' on this rank" in sentences[-1]
    assert all("another rank" in sentence for sentence in sentences[:-1])


@pytest.mark.parametrize("number", [INF, NAN, 3e38])
def test_server_keeps_its_error_when_a_frame_would_overflow_it(number: float) -> None:
    layout = Layout.of([("w", 0, 300, True)])

    def forged(frame: Tensor) -> Tensor:
        data = to_bytes(frame)
        return to_tensor(plain.sealed(data[:START] + struct.pack("<f", number) + data[START + 4 :]))

    def work(net: ThreadNet) -> None:
        exchange = METHODS["blocksign"](dense_below=1).aggregator(net, True)
        contexts = [ExchangeContext(layout, step, (Hyper(lr=0.1, momentum=0.9),)) for step in range(3)]
        mean_of(exchange, contexts[0], torch.linspace(-1, 1, 300))
        before, sent = exchange.state_dict()["collective"]["residual"]["w"].clone(), net.all_to_all
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(net, "all_to_all", lambda frames, *rest: [forged(frame) for frame in sent(frames, *rest)])
            with pytest.raises(FrameError, match="bad frame from rank 0: it holds an inf, a nan or a number beyond"):
                mean_of(exchange, contexts[1], torch.linspace(-1, 1, 300))
        assert torch.equal(exchange.state_dict()["collective"]["residual"]["w"], before)
        assert bool(mean_of(exchange, contexts[2], torch.linspace(-1, 1, 300)).isfinite().all())

    ThreadWorld(1).run(work)


def test_blocksign_at_learning_rate_zero_leaves_both_errors_alone() -> None:
    """Nothing of such a step is applied, so nothing may enter or leave an error; the velocity goes on as SGD's does."""
    layout = Layout.of([("w", 0, 300, True), ("b", 1, 20, True)])

    def work(net: ThreadNet) -> None:
        exchange = METHODS["blocksign"]().aggregator(net, True)
        for step, rate in enumerate([0.1, 0.0, 0.0, 0.05]):
            before = exchange.state_dict()
            hypers = (Hyper(lr=rate, momentum=0.9), Hyper(lr=0.1, momentum=0.9))
            generator = torch.Generator().manual_seed(10 * step + net.rank)
            mean_of(exchange, ExchangeContext(layout, step, hypers), torch.randn(320, generator=generator))
            after = exchange.state_dict()
            for room in ("memory", "collective"):
                for name in set(before[room]["residual"]) & set(after[room]["residual"]):
                    same = torch.equal(before[room]["residual"][name], after[room]["residual"][name])
                    assert same == (rate == 0.0 and name == "w"), (room, name, step)
                serves = room == "memory" or "w" in after[room]["residual"]
                assert after[room]["rates"].get("w") == ((rate or 0.1) if serves else None)

    ThreadWorld(3).run(work)
