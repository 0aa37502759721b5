"""An exchange: nothing is lost in between, it repeats bit for bit, and goes on from its state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from generators import torch_generator_untouched  # noqa: F401  every test of this file
from means import mean_of
from torch import Tensor

from thinwire.codecs import SparseCodec
from thinwire.collectives import AllGather, GlobalTopK
from thinwire.compressors import TopK
from thinwire.engine.aggregators import Exchange
from thinwire.engine.context import ExchangeContext, Hyper
from thinwire.engine.layout import Layout
from thinwire.engine.payloads import Sparse
from thinwire.kernels import stream_key
from thinwire.memory import ErrorFeedback
from thinwire.transport import ThreadNet, ThreadWorld


def run_exchange(size: int, numel: int, make: Callable[[ThreadNet], Exchange], gradient: Callable[[int, int], Tensor],
                 steps: int = 4) -> None:  # fmt: skip
    """Over a run: what all ranks applied + what all kept = what was put in; and all ranks apply the same bits."""
    layout = Layout.of([("w", 0, numel - 3, True), ("b", 1, 3, False)])
    hypers = (Hyper(), Hyper())

    def work(net: ThreadNet) -> tuple[list[Tensor], Tensor, Tensor]:
        exchange, means, put_in = make(net), [], torch.zeros(numel, dtype=torch.float64)
        for step in range(steps):
            grad = gradient(net.rank, step)
            put_in += grad.double()
            means.append(mean_of(exchange, ExchangeContext(layout, step, hypers), grad))
        named = exchange.memory.state.named["residual"]
        return means, torch.cat([named["w"], named["b"]]).double(), put_in

    results = ThreadWorld(size).run(work)
    applied = size * sum(mean.double() for mean in results[0][0])
    for means, _, _ in results:
        assert all(torch.equal(a, b) for a, b in zip(means, results[0][0], strict=True))
    kept, put_in = sum(row[1] for row in results), sum(row[2] for row in results)
    assert float((applied + kept - put_in).abs().max()) <= 2e-5 * float(put_in.abs().max() + 1)
    assert float(applied.abs().max()) > 0


@pytest.mark.parametrize("indices", ["int32", "delta16", "rice"])
@pytest.mark.parametrize("values", ["fp32", "fp16", "bf16", "int8", "int4", "int2"])
@pytest.mark.parametrize("collective", [AllGather, GlobalTopK])
def test_exchange_loses_nothing(collective: type, values: str, indices: str) -> None:
    for size in (1, 2, 3, 6):
        run_exchange(
            size,
            2003,
            lambda net: Exchange(ErrorFeedback(), TopK(0.02, scope="tensor" if collective is AllGather else "model"),
                                 collective(SparseCodec(values, indices)), net),
            lambda rank, step: torch.from_numpy(
                np.random.default_rng([rank, step]).standard_normal(2003).astype(np.float32)),
        )  # fmt: skip


@pytest.mark.parametrize("collective", [AllGather, GlobalTopK])
def test_exchange_loses_nothing_of_frames_that_overflow(collective: type) -> None:
    """Runs of neighbours with wide gaps between them need more 16-bit distances than the frame has room for."""
    numel, k = 1_200_003, 30

    def gradient(rank: int, step: int) -> Tensor:
        generator = np.random.default_rng([rank, step])
        grad = (generator.standard_normal(numel) * 1e-3).astype(np.float32)
        for place in (5, 600_000, 1_199_900):
            grad[place : place + 12] = 10 + generator.random(12)
        return torch.from_numpy(grad)

    codec = SparseCodec("fp32", "delta16")
    left_out = []

    def make(net: ThreadNet) -> Exchange:
        class Counting(SparseCodec):
            def encode(
                self, context: ExchangeContext, payload: Sparse, tail: Tensor, *options: Any, **named: Any
            ) -> Tensor:
                frame = codec.encode(context, payload, tail, *options, **named)
                written = int(frame[8:12].view(torch.int32))
                left_out.append(payload.indices.numel() - written)
                return frame

        counting = Counting("fp32", "delta16")
        return Exchange(ErrorFeedback(), TopK(k / (numel - 3), scope="model"), collective(counting), net)

    run_exchange(3, numel, make, gradient, steps=3)
    assert max(left_out) > 0, "the case is meant to overflow"


def test_exchange_repeats_bit_for_bit() -> None:
    def run() -> list[Tensor]:
        def work(net: ThreadNet) -> Tensor:
            layout = Layout.of([("w", 0, 2000, True)])
            exchange = Exchange(ErrorFeedback(), TopK(0.01, sampled=True), AllGather(SparseCodec("int8")), net)
            out = [
                mean_of(
                    exchange,
                    ExchangeContext(layout, step, (Hyper(),)),
                    torch.from_numpy(np.random.default_rng([net.rank, step]).standard_normal(2000).astype(np.float32)),
                )
                for step in range(4)
            ]
            return torch.stack(out)

        return ThreadWorld(3).run(work)

    first, second = run(), run()
    assert all(torch.equal(a, b) and torch.equal(a, first[0]) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("sampled", [False, True])
def test_exchange_goes_on_from_its_state(sampled: bool) -> None:
    """A resumed run makes the same choices as one that was never broken off, also where a sample misleads."""
    numel, k = 20_000, 400
    layout = Layout.of([("w", 0, numel, True)])
    stride = numel // (32 * numel // k)

    def work(net: ThreadNet) -> list[bool]:
        def make() -> Exchange:
            return Exchange(ErrorFeedback(), TopK(k / numel, sampled=sampled), AllGather(SparseCodec()), net)

        straight, same = make(), []
        for step in range(6):
            context = ExchangeContext(layout, step, (Hyper(),))
            grad = torch.from_numpy(np.random.default_rng([9, step]).standard_normal(numel).astype(np.float32))
            grad[stream_key(0, step, 0, "w") % stride :: stride] *= 3  # the sample sees larger values than the rest
            resumed = make()
            resumed.load_state_dict(straight.state_dict())
            same.append(torch.equal(mean_of(straight, context, grad), mean_of(resumed, context, grad)))
        return same

    assert ThreadWorld(1).run(work) == [[True] * 6]


def test_exchange_in_a_local_mode_has_the_dense_tail_that_was_accepted() -> None:
    """It was a view of the residual, zero once the memory had kept the rest: "partial" subtracts it after that."""
    layout = Layout.of([("w", 0, 10, True), ("b", 1, 3, False)])

    def work(net: ThreadNet) -> torch.Tensor:
        exchange = Exchange(ErrorFeedback(), TopK(1.0), AllGather(SparseCodec()), net, local="partial")
        return mean_of(exchange, ExchangeContext(layout, 0, (Hyper(),) * 2), torch.arange(13.0) + net.rank)

    for mean in ThreadWorld(2).run(work):  # all of it was sent: G - S + L is G, in both parts
        assert torch.equal(mean, torch.arange(13.0) + 0.5)
