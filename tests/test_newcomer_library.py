"""What somebody who follows the README meets first: sentences that must be true, and counters that belong together."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers
from cluster import Cluster
from workers import Run, Training

import thinwire
from thinwire import peers

EVERYBODY = [
    thinwire.DGC(density=0.02),
    thinwire.DGC(density=0.02, factor_masking=True, values="fp32", dense_below=0),
    thinwire.GTopK(density=0.02),
    thinwire.GTopK(density=0.02, momentum_correction=True),
    thinwire.TernGrad(),
    thinwire.TernGrad(scaler="model"),
    thinwire.BlockSign(),
    thinwire.BlockSign(topology="server"),
    thinwire.GradientDropping(density=0.02),
    thinwire.GradientDropping(density=0.02, local="partial"),
    thinwire.Dense(dtype="bf16"),
    peers.parse("powersgd"),
]


@pytest.mark.parametrize("n", [2, 3])
def test_on_one_machine_every_method_is_dense(cluster: Cluster, n: int) -> None:
    for optimizer in ("heavy", "nesterov-decay"):
        dense = Run(thinwire.Dense(), optimizer, 8, "net")
        runs = [dense, *(Run(method, optimizer, 8, "net", hierarchy=n) for method in EVERYBODY)]
        for reference, *others in cluster.run(workers.train, n, runs):
            for method, other in zip(EVERYBODY, others, strict=True):
                if n == 2 and optimizer == "heavy":  # a sum of two has one order
                    assert torch.equal(other["trajectory"], reference["trajectory"]), method
                torch.testing.assert_close(
                    other["trajectory"],
                    reference["trajectory"],
                    rtol=1e-6,
                    atol=1e-6,
                    msg=lambda m, t=method: f"{t}: {m}",
                )
                assert other["stats"].residual_norm == 0 and not other["leftover"].any(), method
                assert other["stats"].bytes_sent == other["stats"].frame_bytes == 0, method


class _Heard(logging.Handler):
    """Collects the sentences of the thinwire log."""

    def __init__(self) -> None:
        super().__init__()
        self.sentences: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.sentences.append(record.getMessage())


def heard(group: dist.ProcessGroup, run: Run, steps: int = 0) -> list[str]:
    """What this rank logs while a run attaches and trains."""
    handler, log = _Heard(), logging.getLogger("thinwire")
    log.addHandler(handler)
    try:
        training = Training(group, run)
        for step in range(steps):
            training.step(step)
        assert training.wire is not None
        training.wire.detach()
    finally:
        log.removeHandler(handler)
    return handler.sentences


def test_one_machine_is_told_once(cluster: Cluster) -> None:
    first, *others = cluster.run(heard, 3, Run("dgc", "heavy", hierarchy=3))
    assert len(first) == 1 and "mean is exact and nothing is compressed or kept back" in first[0], first
    assert others == [[], []]
    first, *_ = cluster.run(heard, 2, Run("signsgd", "heavy", hierarchy=2))
    assert "the update is signsgd's of it" in first[0] and "nothing is compressed" not in first[0]


def test_a_checkpoint_of_two_machines_goes_on_exactly_on_one(cluster: Cluster) -> None:
    """What the machines had kept back is sent with the first step, and momentum is not lost."""
    for one, reference in cluster.run(from_two_machines_to_one, 4):
        torch.testing.assert_close(one, reference, rtol=1e-5, atol=1e-5)


def from_two_machines_to_one(group: dist.ProcessGroup) -> tuple[Any, Any]:
    two = Training(group, Run("dgc:density=0.02,values=fp32", "heavy", hierarchy=2))
    for step in range(4):
        two.step(step)
    assert two.wire is not None
    states: list[Any] = [None] * 4
    dist.all_gather_object(states, two.wire.state_dict(), group=group)
    one = Training(group, Run("dgc:density=0.02,values=fp32", "heavy", hierarchy=4))
    one.module.load_state_dict(two.module.state_dict())
    one.wire.load_state_dict(states)
    reference = Training(group, Run(None, "heavy"))
    for step in range(6):
        reference.step(step)
    for step in range(4, 6):
        one.step(step)
    assert one.wire.stats.residual_norm == 0
    one.wire.detach()
    two.wire.detach()
    return workers.flat(one.module), workers.flat(reference.module)
