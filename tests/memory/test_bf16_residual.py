"""Residuals and velocities in bfloat16: half the memory, rounded by chance, nothing lost on average."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import workers
from cluster import Cluster
from means import mean_of
from workers import LR, Run, own_part, tensors_of

import thinwire
from thinwire.engine.context import ExchangeContext, Hyper
from thinwire.engine.layout import Layout
from thinwire.memory import ErrorFeedback, MomentumCorrection, RescaledError
from thinwire.transport import ThreadNet, ThreadWorld

METHODS = [
    ("heavy", "dgc:density=0.02,factor_masking=true,values=fp32,residual=bf16"),
    ("plain", "gtopk:density=0.02,residual=bf16"),
    ("heavy", "gtopk:density=0.02,factor_masking=true,residual=bf16"),
    ("nesterov", "blocksign:dense_below=1,residual=bf16"),
    ("plain", "dropping:density=0.02,residual=bf16"),
]


@pytest.mark.parametrize("optimizer, spec", METHODS)
def test_bf16_residual_keeps_what_was_put_in_up_to_rounding(cluster: Cluster, optimizer: str, spec: str) -> None:
    """Constant pulls: parameters plus what is kept are SGD's own, whatever was rounded on the way."""
    steps = 12
    narrow = Run(spec.replace("factor_masking=true", "factor_masking=false"), optimizer, steps)
    wide = Run(str(narrow.method).replace(",residual=bf16", "").replace(":residual=bf16", ""), optimizer, steps)
    errors = []
    for reference, half, whole in cluster.run(workers.train, 3, [Run(None, optimizer, steps), narrow, wide]):
        after = [run["final"] - LR * run["leftover"] for run in (half, whole)]
        if optimizer != "plain":  # momentum still acts on what is in the velocities, equally in both
            assert (after[0] - after[1]).abs().max() < 0.1
        else:
            assert (after[1] - reference["final"]).abs().max() < 1e-4
        errors.append((after[0] - after[1]).double())
        # Each step rounds a residual (and a velocity) of a few units: 2^-8 of it at most, in either direction.
        assert errors[-1].abs().max() < LR * steps * 2**-8 * 20
        assert abs(float(errors[-1].mean())) < LR * 0.01, "rounding pulls to one side"
        assert half["leftover"].abs().max() > 0.1


def test_bf16_residual_is_half_as_large_and_ranks_stay_equal(cluster: Cluster) -> None:
    runs = [Run(spec, optimizer, 8) for optimizer, spec in METHODS]
    everybody = cluster.run(workers.train, 3, runs)
    for run, *results in zip(runs, *everybody, strict=True):
        assert len({workers.digest(result["trajectory"]) for result in results}) == 1, run.method
    for sizes in cluster.run(state_bytes, 2):
        for spec, (half, whole) in sizes.items():
            assert half == whole / 2, spec


def state_bytes(group: Any) -> dict[str, tuple[int, int]]:
    found = {}
    for optimizer, spec in METHODS:
        counts = []
        for text in (spec, spec.replace("residual=bf16", "residual=fp32")):
            training = workers.Training(group, Run(text, optimizer))
            training.step(0)
            memory = own_part(training.wire.state_dict())["aggregator"]["memory"]
            counts.append(sum(t.numel() * t.element_size() for t in tensors_of(memory)))
            training.wire.detach()
        found[spec] = (counts[0], counts[1])
    return found


@pytest.mark.parametrize("kind", [ErrorFeedback, MomentumCorrection, RescaledError])
def test_bf16_residual_is_as_it_was_after_a_failed_exchange(kind: Any) -> None:
    spec = {ErrorFeedback: "dropping", MomentumCorrection: "dgc:dense_below=0", RescaledError: "blocksign"}[kind]
    method = thinwire.parse_method(spec + (",residual=bf16" if ":" in spec else ":residual=bf16"))
    layout = Layout.of([("w", 0, 300, True)])

    def work(net: ThreadNet) -> bool:
        exchange: Any = method.aggregator(net, True)
        assert type(exchange.memory) is kind
        hypers = (Hyper(0.1, 0.9),)
        mean_of(exchange, ExchangeContext(layout, 0, hypers), workers.noise((300,), net.rank, 0, "w"))
        before = exchange.memory.state_dict()
        bad = workers.noise((300,), net.rank, 1, "w")
        if net.rank == 1:
            bad[7] = float("nan")
        with pytest.raises(RuntimeError):
            mean_of(exchange, ExchangeContext(layout, 1, hypers), bad)
        same = all(torch.equal(before[k]["w"], exchange.memory.state_dict()[k]["w"]) for k in before if k != "rates")
        mean_of(exchange, ExchangeContext(layout, 2, hypers), workers.noise((300,), net.rank, 2, "w"))
        return same

    assert ThreadWorld(3).run(work) == [True] * 3
