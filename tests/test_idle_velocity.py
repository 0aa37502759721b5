"""Without momentum there is nothing to keep a velocity for: no memory is taken, and every result stays."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from cluster import Cluster
from workers import SHAPES, Run, Training, flat, own_part

import thinwire
from thinwire.layout import Hyper, Layout, Turn
from thinwire.memory import MomentumCorrection
from thinwire.payloads import Accepted, Sparse

GTOPK, DGC = "gtopk:density=0.05", "dgc:density=0.05,factor_masking=true,dense_below=0,values=fp32"


def trained(group: dist.ProcessGroup, spec: str, optimizer: str) -> dict[str, Any]:
    """Some steps, a state that was saved when an idle velocity was kept, and some steps more."""
    training = Training(group, Run(spec, optimizer))
    assert isinstance(training.wire, thinwire.Wire)
    for step in range(3):
        training.step(step)
    memory = training.wire._memory
    kept = {kind: sorted(vectors) for kind, vectors in memory.state.named.items()}
    state = training.wire.state_dict()
    saved = copy.deepcopy(state)
    if "velocity" in own_part(saved)["aggregator"]["memory"]:
        for vector in own_part(saved)["aggregator"]["memory"]["velocity"].values():
            vector.normal_(generator=torch.Generator().manual_seed(1))
    training.wire.load_state_dict(saved if optimizer == "plain" else state)
    for step in range(3, 5):
        training.step(step)
    training.wire.detach()
    keys = {kind: sorted(vectors) for kind, vectors in own_part(state)["aggregator"]["memory"].items()}
    return {"final": flat(training.module), "kept": kept, "keys": keys}


def test_sgd_without_momentum_needs_no_velocity(cluster: Cluster) -> None:
    for spec in (GTOPK, DGC):
        corrected = cluster.run(trained, 3, spec, "plain")
        plain = cluster.run(trained, 3, f"{spec},momentum_correction=false", "plain")
        heavy = cluster.run(trained, 3, spec, "heavy")
        for one, other, moved in zip(corrected, plain, heavy, strict=True):
            assert torch.equal(one["final"], other["final"]), "momentum correction without momentum is error feedback"
            assert one["kept"] == {"velocity": [], "residual": sorted(SHAPES)}
            assert moved["kept"] == {"velocity": sorted(SHAPES), "residual": sorted(SHAPES)}
            assert one["keys"] == moved["keys"] == moved["kept"], "a saved state has the same keys all the same"


def test_momentum_that_is_switched_on_later_starts_as_that_of_sgd() -> None:
    memory, layout = MomentumCorrection(masking=True), Layout.of([("w", 0, 4, True)])
    nothing = Sparse(torch.zeros(0, dtype=torch.int64), torch.zeros(0), 4, 0)
    sent = 0.0
    for step, momentum in enumerate((0.0, 0.5, 0.5, 0.0, 0.5)):
        turn = Turn(layout, step, (Hyper(lr=0.1, momentum=momentum),), (torch.zeros(4),))
        x = memory.compensate(turn, torch.full((4,), float(step + 1)))
        memory.retain(turn, x, Accepted(nothing, x[4:], sent=nothing.indices))
        sent = float(x[0])
        if step == 0:
            assert not memory.state.named["velocity"]
    # SGD's buffer: none, 2, 1 + 3, kept while there is no momentum, 2 + 5. The residual is the sum of the updates.
    assert sent == 1 + 2 + 4 + 4 + 7
