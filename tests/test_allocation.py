"""What a step allocates beside the method's state, in steady state: nothing near the size of the gradient."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from thinwire.kernels import cpu
from thinwire.layout import Hyper, Layout, Turn
from thinwire.methods import parse_method
from thinwire.transport import ThreadNet, ThreadWorld

NUMEL = 1_000_000


class Allocations(TorchDispatchMode):
    """Counts the bytes of tensors that operators of this thread make: how many live at once, at most."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in given:
                nbytes = tensor.untyped_storage().nbytes()
                self.live += nbytes
                self.peak = max(self.peak, self.live)
                weakref.finalize(tensor, self._gone, nbytes)
        return result

    def _gone(self, nbytes: int) -> None:
        self.live -= nbytes


def peak_of(spec: str, ranks: int) -> float:
    """The most bytes that one step of the worst rank has allocated at once, as a share of the gradient."""
    rows = [("a", 0, NUMEL // 2, True), ("b", 1, NUMEL // 2 - 100, True), ("c", 2, 100, False)]
    layout, hypers = Layout.of(rows), (Hyper(lr=0.1, momentum=0.9, weight_decay=1e-4),) * 3

    def work(net: ThreadNet) -> int:
        aggregator = parse_method(spec).aggregator(net, True)
        generator = torch.Generator().manual_seed(net.rank)
        weights = tuple(torch.randn(segment.numel, generator=generator) for segment in layout.segments)
        parts = [torch.empty(segment.numel) for segment in layout.segments]
        counted = Allocations()
        for step in range(10):
            for part in parts:
                part.normal_(generator=generator)
            if step < 9:
                aggregator.reduce(Turn(layout, step, hypers, weights), parts)
            else:
                with counted:
                    aggregator.reduce(Turn(layout, step, hypers, weights), parts)
        return counted.peak

    return max(ThreadWorld(ranks).run(work)) / (4 * NUMEL)


def test_allocations_are_seen() -> None:
    with Allocations() as counted:
        a = torch.zeros(1000)
        b = a.view(10, 100) + 1
        del a
        c = b.clone()
    assert counted.peak == 8000 and counted.live == 8000 and b.shape == c.shape


@pytest.mark.skipif(cpu.library() is None, reason=f"no native library here: {cpu.why_not()}")
@pytest.mark.parametrize("spec", ["dgc", "gtopk"])
def test_a_sparse_step_needs_a_tenth_of_the_gradient_at_most(spec: str) -> None:
    assert peak_of(spec, 4) < 0.1
