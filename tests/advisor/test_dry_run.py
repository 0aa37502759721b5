"""A method's exchanges in a group that is only pretended."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import thinwire
from thinwire.advisor.microbench import DryRun

ROWS = [("a.weight", 0, torch.Size([64, 300])), ("a.bias", 1, torch.Size([64])), ("b.weight", 2, torch.Size([9000, 4])),
        ("b.scale", 3, torch.Size([5000]))]  # fmt: skip


@pytest.mark.parametrize("spec", ["dgc", "gtopk", "terngrad", "blocksign", "signsgd", "dropping", "dense",
                                  "dense:dtype=bf16", "noop"])  # fmt: skip
def test_dry_run_times_every_exchange_of_every_method_in_a_pretended_group(spec: str) -> None:
    for size in (2, 16):
        run = DryRun(thinwire.parse_method(spec), [ROWS[:2], ROWS[2:]], size, True, torch.device("cpu"))
        ticks = iter(range(100))  # a clock that goes on by one whenever it is read
        assert [run.seconds(lambda: next(ticks)) for _ in range(2)] == [2, 2], "each exchange is timed, in every step"  # noqa: B023
    with pytest.raises(ValueError, match="power of two"):
        DryRun(thinwire.parse_method(spec), [ROWS], 3, True, torch.device("cpu"))


def test_dry_run_that_is_closed_frees_its_model_at_once() -> None:
    """The next method's weights, momentum and residuals find room where the last one's were."""
    for first in (True, False):  # the first use of an optimizer imports much of torch
        gc.disable()
        try:
            run = DryRun(thinwire.parse_method("dgc"), [ROWS[:2], ROWS[2:]], 2, True, torch.device("cpu"))
            run.seconds()
            kept = weakref.ref(run._reducer)
            run.close()
            del run
            assert first or kept() is None
        finally:
            gc.enable()
