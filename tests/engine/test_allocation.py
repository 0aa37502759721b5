"""What a step needs beside the method's state, on the CPU over real Gloo processes: at most a tenth of the gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from allocations import Allocations

from thinwire.engine.context import ExchangeContext, Hyper
from thinwire.engine.layout import Layout
from thinwire.kernels.native import library
from thinwire.methods import DGC, GradientDropping, GTopK, parse_method
from thinwire.transport import TorchNet

NUMEL = 4_400_000  # frames long enough that they go round by round


def step_memory(group: dist.ProcessGroup, spec: str) -> tuple[int, int, int]:
    """Of a step in steady state: bytes that live at once, the largest single one, and what is kept for all steps."""
    rows = [("a", 0, NUMEL // 2, True), ("b", 1, NUMEL // 2 - 100, True), ("c", 2, 100, False)]
    layout, hypers = Layout.of(rows), (Hyper(lr=0.1, momentum=0.9, weight_decay=1e-4),) * 3
    net = TorchNet(group, torch.device("cpu"))
    aggregator = parse_method(spec).aggregator(net, True)
    generator = torch.Generator().manual_seed(net.rank)
    weights = tuple(torch.randn(segment.numel, generator=generator) for segment in layout.segments)
    parts = [torch.empty(segment.numel) for segment in layout.segments]
    for step in range(5):
        for part in parts:
            part.normal_(generator=generator)
        context = ExchangeContext(layout, step, hypers, weights)
        with Allocations() as counted:
            aggregator.reduce(context, parts)
    space = getattr(getattr(aggregator, "collective", None), "_space", None)
    kept = sum(buffer.numel() for buffer in space._buffers.values()) if space is not None else 0
    return counted.peak, counted.largest, kept + aggregator.stages.workspace.nbytes


def test_allocations_are_counted() -> None:
    with Allocations() as counted:
        a = torch.zeros(1000)
        b = a.view(10, 100) + 1
        del a
        c = b.clone()
    assert counted.peak == 8000 and counted.live == 8000 and b.shape == c.shape


needs_native = pytest.mark.skipif(library.handle() is None, reason=f"no native library here: {library.why_not()}")


PAPER_DGC, PAPER_GTOPK = DGC.paper, GTopK.paper
PAPERS = [PAPER_DGC, "dgc:density=0.001", PAPER_GTOPK]
FRUGAL = ["dgc:density=0.006", "terngrad", "blocksign"]
DEFAULTS = ["dgc", "terngrad", "blocksign", "gtopk", "dropping"]


LOCAL = "dropping:density=0.01,values=fp32,local=partial,sync_every=1000"  # what is averaged is no part of a step


@needs_native
@pytest.mark.parametrize(
    "spec", [*FRUGAL, "gtopk:density=0.01", *PAPERS, "dropping:density=0.01,values=fp32", LOCAL, "blocksign:block=4096"]
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_step_needs_a_tenth_of_the_gradient_at_most(cluster: Any, spec: str, ranks: int) -> None:
    for peak, _largest, kept in cluster.run(step_memory, ranks, spec):
        assert peak + kept < 0.1 * 4 * NUMEL, (peak, kept)


@needs_native
@pytest.mark.parametrize("ranks", [2, 4])
def test_global_top_k_needs_nine_times_its_density(cluster: Any, ranks: int) -> None:
    """35 bytes an entry by the table of docs/decisions.md, where an element of the gradient has 4."""
    for peak, _largest, kept in cluster.run(step_memory, ranks, "gtopk"):
        assert peak + kept < 9 * GTopK().density * 4 * NUMEL, (peak, kept)


@needs_native
@pytest.mark.parametrize("method", [DGC(), GradientDropping()])
def test_all_gather_needs_ten_times_the_density_with_four_ranks(cluster: Any, method: Any) -> None:
    """An all-gather holds every rank's frame: fewer bytes an entry than global top-k with two ranks, more with many."""
    for peak, _largest, kept in cluster.run(step_memory, 4, method.in_full):
        assert peak + kept < 10 * method.density * 4 * NUMEL, (peak, kept)


@needs_native
@pytest.mark.parametrize("spec", [*DEFAULTS, PAPER_DGC])
def test_step_allocates_next_to_nothing(cluster: Any, spec: str) -> None:
    """Lists and frames lie in memory that is kept; what remains are headers, scales and the small dense tail."""
    for peak, largest, kept in cluster.run(step_memory, 4, spec):
        assert largest <= 4096 and peak <= 16384 and kept > 0, (largest, peak)


def warmed_up(group: dist.ProcessGroup, spec: str, steps: int) -> tuple[int, int]:
    """The memory that is kept in the densest part of a warm-up, and after it."""
    layout, hyper = Layout.of([("a", 0, 100_000, True)]), (Hyper(lr=0.1, momentum=0.9),)
    net = TorchNet(group, torch.device("cpu"))
    aggregator: Any = parse_method(spec).aggregator(net, True)
    generator, kept = torch.Generator().manual_seed(net.rank), []
    for step in range(steps):
        grad = torch.randn(100_000, generator=generator)
        aggregator.reduce(ExchangeContext(layout, step, hyper, (grad,)), [grad])
        kept.append(aggregator.stages.workspace.nbytes)
    return max(kept), kept[-1]


@needs_native
@pytest.mark.parametrize(
    ("spec", "share"), [("dgc:warmup=16,density=0.006", 0.1), ("gtopk:warmup=16", 9 * GTopK().density)]
)
def test_warm_up_gives_its_memory_back(cluster: Any, spec: str, share: float) -> None:
    for most, last in cluster.run(warmed_up, 2, spec, 220):
        assert last < share * 4 * 100_000 < most, (most, last)
