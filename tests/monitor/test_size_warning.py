"""A method that sends more than dense training would is told once; one that saves something is not."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from cluster import Cluster
from heard import Heard
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from thinwire.monitor import size_warning

WORDS = "times as much as dense training"


def said(group: dist.ProcessGroup, method: str, width: int, switch: str | None, options: dict[str, Any]) -> list[str]:
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2)), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    handler = Heard()
    size_warning.log.addHandler(handler)
    try:
        wire = thinwire.attach(model, optimizer, method, **options)
        for step in range(12):
            if step == 6 and switch is not None:
                wire.switch(switch)
            optimizer.zero_grad()
            model(torch.randn(5, 4)).square().mean().backward()
            optimizer.step()
        wire.detach()
    finally:
        size_warning.log.removeHandler(handler)
    return [sentence for sentence in handler.sentences if WORDS in sentence]


SMALL, LARGE = 3, 600
TOO_MUCH = "dgc:density=1.0,dense_below=0,values=fp32"


def test_a_method_that_sends_more_than_dense_is_told_once(cluster: Cluster) -> None:
    (told,), other = cluster.run(said, 2, TOO_MUCH, SMALL, None, {})
    assert TOO_MUCH.partition(",")[0] in told and 'wire.switch("dense")' in told and not other
    (told,), _ = cluster.run(said, 2, "dense", LARGE, TOO_MUCH, {})
    assert "dgc" in told


def test_what_saves_bytes_or_will_after_its_warm_up_is_not_told(cluster: Cluster) -> None:
    for method, width in (
        ("dense", SMALL),
        ("dense:dtype=bf16", LARGE),
        ("noop", SMALL),
        ("dgc:density=0.05", LARGE),
        ("dgc:density=0.05,warmup=10,values=fp32", LARGE),
        ("terngrad", LARGE),
    ):
        assert cluster.run(said, 2, method, width, None, {}) == [[], []], method
    assert cluster.run(said, 1, TOO_MUCH, SMALL, None, {}) == [[]]
