"""Where compression leaves nothing out it is plain DDP, to rounding: DESIGN.md's equalities."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import workers
from cluster import Cluster
from workers import Run

import thinwire

STEPS = 8
SGDS = ["plain", "heavy", "nesterov", "nesterov-decay", "maximize", "maximize-nesterov", "groups"]
EXACT: dict[str, Any] = {"density": 1.0, "factor_masking": False, "values": "fp32"}


def some(N: int) -> list[str]:
    """All optimizers with 3 ranks; with other numbers the one that has something of each."""
    return SGDS if N == 3 else ["groups"]


def compare(cluster: Cluster, N: int, task: str, optimizers: list[str], methods: list[Any], **tolerance: float) -> None:
    """Every method under every optimizer follows plain DDP with that optimizer at every step, on every rank."""
    grid = [(optimizer, method) for optimizer in optimizers for method in [None, *methods]]
    runs = [Run(method, optimizer, STEPS, task) for optimizer, method in grid]
    for results in cluster.run(workers.train, N, runs):
        for (optimizer, method), result in zip(grid, results, strict=True):
            if method is None:
                reference = result["trajectory"]
                assert (reference[-1] - reference[0]).abs().max() > 0.01  # it does train
                continue
            what = f"{method} with {optimizer} on {N} ranks"
            limits = {"rtol": 1e-5, "atol": 3e-6, **tolerance}
            torch.testing.assert_close(
                result["trajectory"], reference, **limits, msg=lambda found, what=what: f"{what}: {found}"
            )
            assert result["leftover"].abs().max() <= limits["atol"], what


@pytest.mark.parametrize("N", [1, 2, 3, 4, 5])
def test_dgc_at_density_one_without_masking_is_sgd(cluster: Cluster, N: int) -> None:
    methods = [thinwire.DGC(**EXACT, dense_below=0), thinwire.DGC(**EXACT)]
    compare(cluster, N, "net", some(N), methods)
    compare(cluster, N, "dot", ["groups"], methods[1:])


@pytest.mark.parametrize("N", [1, 2, 3, 4, 5])
def test_gtopk_and_dropping_at_density_one_are_dense_ddp(cluster: Cluster, N: int) -> None:
    methods = [
        thinwire.GTopK(density=1.0),
        thinwire.GradientDropping(density=1.0, values="fp32"),
        thinwire.GTopK(density=1.0, momentum_correction=True, dense_below=50),
        thinwire.GradientDropping(density=1.0, values="fp32", momentum_correction=True),
        thinwire.GradientDropping(density=1.0, values="fp32", scope="balanced", dense_below=50),
        thinwire.DGC(density=1.0, momentum_correction=False, values="fp32"),
    ]
    compare(cluster, N, "net", ["groups"], methods)
    compare(cluster, N, "net", ["adam" if N % 2 else "adamw"], [methods[0], methods[1], methods[-1]], atol=2e-4)


@pytest.mark.parametrize("N", [1, 2, 3, 4, 5])
def test_dense_is_ddp_and_nearly_so_with_16_bits(cluster: Cluster, N: int) -> None:
    compare(cluster, N, "net", ["groups"], [thinwire.Dense()])
    compare(cluster, N, "net", ["groups"], [thinwire.Dense(dtype="fp16"), thinwire.Dense(dtype="bf16")], atol=2e-2)


def test_error_feedback_that_rounds_is_dense_ddp_in_the_long_run(cluster: Cluster) -> None:
    """With 16-, 8- or 4-bit values the rounding error is sent later, so constant pulls end where dense DDP ends."""
    methods = [thinwire.DGC(density=1.0, momentum_correction=False, values=v) for v in ("fp16", "bf16", "int8", "int4")]
    runs = [Run(method, "plain", 15, trajectory=False) for method in [None, *methods]]
    for reference, *others in cluster.run(workers.train, 3, runs):
        for method, other in zip(methods, others, strict=True):
            torch.testing.assert_close(
                other["final"] - workers.LR * other["leftover"], reference["final"], rtol=1e-5, atol=3e-6
            )
            rounding = (other["final"] - reference["final"]).abs().max()
            assert 0 < rounding < 0.05, method


def test_masking_at_density_one_takes_all_momentum_away(cluster: Cluster) -> None:
    """The other side of the equality: with masking every velocity is cleared after every step."""
    runs = [
        Run(thinwire.DGC(density=1.0, dense_below=0, values="fp32", factor_masking=True), "heavy", STEPS, "net"),
        Run(None, "plain", STEPS, "net"),
    ]
    masked, plain = cluster.run(workers.train, 2, runs)[0]
    torch.testing.assert_close(masked["trajectory"], plain["trajectory"], rtol=1e-5, atol=3e-6)
