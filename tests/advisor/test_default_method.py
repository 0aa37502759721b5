"""The method that is taken when none is given: a table of what is chosen, and attach with real ranks."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cluster import Cluster
from heard import Heard
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from workers import sentence_of

import thinwire
from thinwire.advisor.default_method import SMALL, default_method

ROWS = {
    "large": [("weight", 0, torch.Size([4000, 1000])), ("bias", 1, torch.Size([4000]))],
    "small": [("weight", 0, torch.Size([100, 100]))],
    "vectors": [(f"scale{n}", n, torch.Size([500])) for n in range(400)],  # DGC leaves them dense
}


@pytest.mark.parametrize(("model", "ranks", "other", "epochs", "spec", "why"), [
    ("large", 1, None, True, "dense", "there is nobody to send to"),
    ("small", 4, None, True, "dense", "a model of 10,000 parameters is too small to gain from compression"),
    ("small", 4, "Adam", True, "dense", "too small"),
    ("vectors", 4, None, True, "dense", "with these tensors and 4 ranks no method sends much less"),
    ("large", 2, None, True, "dgc:warmup=4 epochs", "with SGD it sends"),
    ("large", 6, None, True, "dgc:warmup=4 epochs", "times less than dense behind its warm-up, and was as accurate"),
    ("large", 4, None, False, "dgc", "a warm-up of 4 epochs, for which give steps_per_epoch=len(loader)"),
    ("large", 16, None, True, "blocksign", "with SGD on 16 ranks"),
    ("large", 64, None, False, "blocksign", "with SGD on 64 ranks"),
    ("large", 4, "AdamW", True, "dense:dtype=bf16", "wants wire.averaged() around evaluation"),
    ("large", 64, "Muon and AdamW", False, "dense:dtype=bf16", "with Muon and AdamW nothing that sends less"),
])  # fmt: skip
def test_rule(model: str, ranks: int, other: str | None, epochs: bool, spec: str, why: str) -> None:
    found = default_method(ROWS[model], ranks, other, epochs)
    assert found.spec == spec and why in found.reason, found
    assert default_method(ROWS[model], ranks, other, epochs) == found
    thinwire.parse_method(found.spec)


def attached(
    group: dist.ProcessGroup, make: Any, inputs: int, options: dict[str, Any]
) -> tuple[list[str], list[int], str]:
    handler, log = Heard(), logging.getLogger("thinwire")
    torch.manual_seed(0)
    model = DDP(nn.Linear(inputs, 400), process_group=group)
    log.addHandler(handler)
    try:
        wire = thinwire.attach(model, make(model), **options)
    finally:
        log.removeHandler(handler)
    model(torch.ones(2, inputs)).square().mean().backward()
    chosen = str(wire.method)
    wire.detach()
    return handler.sentences, handler.levels, chosen


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def damped(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)


def two(model: nn.Module) -> list[torch.optim.Optimizer]:
    weight, bias = model.parameters()
    return [torch.optim.Muon([weight], lr=0.1), torch.optim.AdamW([bias])]


@pytest.mark.parametrize(("make", "inputs", "options", "chosen"), [
    (sgd, SMALL // 100, {"steps_per_epoch": 50}, "dgc:warmup=200"),
    (sgd, SMALL // 100, {}, "dgc"),
    (sgd, 8, {"method": None}, "dense"),
    (sgd, SMALL // 100, {"hierarchy": 2}, "dense"),
    (damped, SMALL // 100, {}, "dense:dtype=bf16"),
    (two, SMALL // 100, {"steps_per_epoch": 50}, "dense:dtype=bf16"),
])  # fmt: skip
def test_attach_without_a_method_chooses_one_and_says_which_and_why(
    cluster: Cluster, make: Any, inputs: int, options: dict[str, Any], chosen: str
) -> None:
    (told, levels, first), (other, _, second) = cluster.run(attached, 2, make, inputs, options)
    assert first == second == chosen and not other
    assert len(told) == 1 and told[0].startswith(f"thinwire: no method was given, so {chosen} is used: ")
    assert levels == [logging.WARNING]  # what is shown where logging was not set up


def test_attach_without_a_method_on_one_rank_says_one_line(cluster: Cluster) -> None:
    ((told, _, chosen),) = cluster.run(attached, 1, sgd, SMALL // 100, {})
    assert chosen == "dense" and told == ["thinwire: no method was given, so dense is used: there is nobody to send to"]


def wrong(group: dist.ProcessGroup) -> None:
    model = DDP(nn.Linear(400, 400), process_group=group)
    for steps in (0, -1, 1.5, True, "4"):
        said = sentence_of(ValueError, lambda s=steps: thinwire.attach(model, sgd(model), steps_per_epoch=s))
        assert "steps_per_epoch must be the number of optimizer steps in an epoch" in said
    for optimizer in ([], None, object()):
        assert "optimizer" in sentence_of(ValueError, lambda o=optimizer: thinwire.attach(model, o))
    mine = 10 + dist.get_rank(group)
    said = sentence_of(ValueError, lambda: thinwire.attach(model, sgd(model), steps_per_epoch=mine))
    assert "method" in said and "warmup=40" in said
    thinwire.attach(model, sgd(model), steps_per_epoch=10).detach()


def test_attach_without_a_method_refuses_what_does_not_fit_on_all_ranks(cluster: Cluster) -> None:
    cluster.run(wrong, 2)
