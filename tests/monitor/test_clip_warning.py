"""A loop that goes on clipping after the exchange is told so, once; what else a loop does is not taken for that."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cluster import Cluster
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire

CLIPPED = "clip_norm=..."


def trained(group: dist.ProcessGroup, method: str, clips: str, options: dict[str, Any]) -> list[str]:
    """What the steps of a small model warn of, on this rank."""
    torch.manual_seed(dist.get_rank(group))
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 5)),
        process_group=group,
        bucket_cap_mb=0.002,
        **options,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    wire = thinwire.attach(model, optimizer, method)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(5):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            if not options.get("static_graph"):  # which DDP does not let begin with a pass that is not exchanged
                with model.no_sync():
                    model(torch.randn(6, 30)).square().mean().backward()
            model(torch.randn(6, 30)).square().mean().backward()
            if clips == "norm":
                nn.utils.clip_grad_norm_(model.parameters(), 1e-4)
            elif clips == "later":
                nn.utils.clip_grad_norm_(model.parameters(), 1e6 if step < 4 else 1e-4)
            elif clips == "nothing":
                nn.utils.clip_grad_norm_(model.parameters(), 1e6)
            elif clips == "logs":
                nn.utils.clip_grad_norm_(model.parameters(), torch.inf)
            elif clips == "value":
                nn.utils.clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()
    wire.detach()
    told = [one for one in caught if issubclass(one.category, RuntimeWarning)]
    assert all(one.filename == __file__ for one in told), "the line of this loop, and none of torch's"
    return [str(one.message) for one in told]


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}])
@pytest.mark.parametrize("method", ["dgc:density=0.1", "blocksign", "gtopk:density=0.1"])
def test_clipping_after_the_exchange_is_warned_of_once(cluster: Cluster, method: str, options: dict[str, Any]) -> None:
    for clips in ("norm", "value", "later"):
        first, second = cluster.run(trained, 2, method, clips, options)
        assert len(first) == 1 and CLIPPED in first[0] and method.partition(":")[0] in first[0] and not second
    for clips in ("", "nothing", "logs"):
        assert cluster.run(trained, 2, method, clips, options) == [[], []], clips


@pytest.mark.parametrize("method", ["dense", "dense:dtype=bf16", "terngrad"])
def test_clipping_the_mean_gradient_is_not_warned_of(cluster: Cluster, method: str) -> None:
    assert cluster.run(trained, 2, method, "norm", {}) == [[], []]


def in_closures(group: dist.ProcessGroup, method: str) -> list[str]:
    """The optimizer runs the backward pass, and gradients are cleared by zeros behind its step."""
    model = DistributedDataParallel(nn.Linear(30, 40), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    wire = thinwire.attach(model, optimizer, method)

    def closure() -> torch.Tensor:
        loss = model(torch.randn(6, 30)).square().mean()
        loss.backward()
        return loss

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            optimizer.step(closure)
            optimizer.zero_grad(set_to_none=False)
    wire.detach()
    return [str(one.message) for one in caught if issubclass(one.category, RuntimeWarning)]


def test_clearing_behind_a_step_with_a_closure_is_not_taken_for_clipping(cluster: Cluster) -> None:
    for method in ("dgc:density=0.1", "blocksign"):
        assert cluster.run(in_closures, 2, method) == [[], []]


def switched(group: dist.ProcessGroup, methods: list[str], clips: bool) -> list[str]:
    """Five steps with each method."""
    model = DistributedDataParallel(nn.Linear(30, 40), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    wire = thinwire.attach(model, optimizer, methods[0])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(5 * len(methods)):
            if step and step % 5 == 0:
                wire.switch(methods[step // 5])
            optimizer.zero_grad()
            model(torch.randn(6, 30)).square().mean().backward()
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 1e-4)
            optimizer.step()
    wire.detach()
    return [str(one.message) for one in caught if issubclass(one.category, RuntimeWarning)]


def test_clipping_is_warned_of_once_a_switch_makes_it_matter(cluster: Cluster) -> None:
    """As with method="auto", which begins dense."""
    first, second = cluster.run(switched, 2, ["dense", "dgc:density=0.1", "gtopk:density=0.1"], True)
    assert len(first) == 1 and "dgc:clip_norm" in first[0] and not second
    assert cluster.run(switched, 2, ["dense", "dgc:density=0.1"], False) == [[], []]
