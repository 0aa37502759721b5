"""DDP(static_graph=True) with parameters of two types: the end of a pass is known although torch does not say it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cluster import Cluster
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP
from two_types import TwoTypes
from workers import close, digest, flat, noise

import thinwire
from thinwire.edges.ddp_hook import Router

STATIC = {"static_graph": True}
STEPS = 5
EXACT = "density=1.0,values=fp32,dense_below=0"


def made(group: dist.ProcessGroup, form: dict[str, Any]) -> tuple[DDP, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = DDP(TwoTypes(), process_group=group, **form)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def check_equal_ranks(group: dist.ProcessGroup, model: DDP, what: str) -> None:
    bits = [None] * dist.get_world_size(group)
    dist.all_gather_object(bits, digest(*model.parameters()), group=group)
    assert len(set(bits)) == 1, f"{what}: replicas differ"


def trained(
    group: dist.ProcessGroup, method: str | None, options: dict[str, Any], form: dict[str, Any]
) -> tuple[Tensor, int]:
    """The parameters at the end, and how many steps the wire counted."""
    model, optimizer = made(group, form)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if options.get("scaler") else None
    options = {**options, "scaler": scaler} if scaler is not None else options
    wire = thinwire.attach(model, optimizer, method, **options) if method is not None else None
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(noise((8, 6), dist.get_rank(group), step, "x")).square().mean()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    steps = wire.stats.steps if wire is not None else STEPS
    check_equal_ranks(group, model, str(method))
    if wire is not None:
        wire.detach()
    return flat(model.module), steps


def follow_plain_ddp(group: dist.ProcessGroup, method: str, options: dict[str, Any], form: dict[str, Any]) -> None:
    expected, _ = trained(group, None, {}, form)
    final, steps = trained(group, method, options, form)
    assert steps == STEPS
    close(final, expected, f"{method} {options} {form}", atol=0.02)  # bfloat16 has 8 bits


@pytest.mark.parametrize(
    ("method", "options"),
    [
        (f"dgc:{EXACT}", {}),
        (f"dgc:{EXACT},scope=model", {}),
        ("dgc:density=1.0,values=int8,dense_below=0", {}),
        (f"dgc:{EXACT},clip_norm=1000.0", {}),
        (f"dgc:{EXACT}", {"on_nonfinite": "skip"}),
        (f"dgc:{EXACT}", {"scaler": True}),
        (f"gtopk:{EXACT}", {}),
        (f"gtopk:{EXACT}", {"on_nonfinite": "skip"}),
        ("dense", {}),
        ("dense", {"scaler": True}),
    ],
)
@pytest.mark.parametrize("views", [False, True])
def test_two_types_follow_plain_ddp_at_density_one(
    cluster: Cluster, method: str, options: dict[str, Any], views: bool
) -> None:
    cluster.run(follow_plain_ddp, 2, method, options, {**STATIC, "gradient_as_bucket_view": views}, timeout_s=40)


def keep_equal(group: dist.ProcessGroup, methods: list[str], form: dict[str, Any]) -> None:
    for method in methods:
        final, steps = trained(group, method, {}, form)
        assert steps == STEPS and final.isfinite().all(), method


@pytest.mark.parametrize("form", [STATIC, {"find_unused_parameters": True}, {"bucket_cap_mb": 1e-4, **STATIC}])
def test_every_method_keeps_its_ranks_equal(cluster: Cluster, form: dict[str, Any]) -> None:
    methods = ["dgc", "dgc:scope=model,density=0.1", "gtopk:density=0.1", "dropping:density=0.1", "signsgd"]
    methods += ["terngrad:scaler=model,dense_below=0", "terngrad", "blocksign:clip_norm=1.0,dense_below=1"]
    cluster.run(keep_equal, 3, methods, form, timeout_s=100)


def bad_first_pass(group: dist.ProcessGroup) -> list[str]:
    """A gradient that is not finite in the pass in which torch marks no bucket as the last."""
    found = []
    for method in ("dgc:scope=model", "dgc", "gtopk"):
        model, optimizer = made(group, STATIC)
        thinwire.attach(model, optimizer, method)
        loss = model(noise((8, 6), 0, 0, "x")).square().mean()
        try:
            (loss * (float("nan") if dist.get_rank(group) == 1 else 1.0)).backward()
            found.append("nothing was raised")
        except RuntimeError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_an_error_in_the_first_pass_is_raised_by_backward(cluster: Cluster) -> None:
    for sentences in cluster.run(bad_first_pass, 2, timeout_s=40):
        assert len(sentences) == 3
        assert all(one.startswith("NonFiniteError") and "inf or a nan" in one for one in sentences), sentences


@settings(deadline=None, max_examples=60, derandomize=True)
@given(cuts=st.sets(st.integers(1, 6)), broken=st.integers(0, 6))
def test_a_pass_begins_with_its_first_bucket_and_ends_with_the_one_that_completes_it(
    cuts: set[int], broken: int
) -> None:
    """Whatever the buckets are, also behind a pass that was broken off after some of them."""
    parameters = [torch.zeros(()) for _ in range(7)]
    buckets = [parameters[start:stop] for start, stop in pairwise([0, *sorted(cuts), 7])]
    router = Router(7)
    assert not any(router._place(bucket)[1] for bucket in buckets[: min(broken, len(buckets) - 1)])
    for _ in range(2):
        places = [router._place(bucket) for bucket in buckets]
        assert places == [(bucket is buckets[0], bucket is buckets[-1]) for bucket in buckets]


def joined(group: dist.ProcessGroup, form: dict[str, Any]) -> None:
    """Rank r has 3 + 2 r inputs; whoever has run out answers with buckets outside of any backward pass."""
    finals = []
    for method in (None, f"gtopk:{EXACT},momentum_correction=false", f"dgc:{EXACT},scope=model"):
        model, _ = made(group, form)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wire = thinwire.attach(model, optimizer, method) if method is not None else None
        with model.join():
            for step in range(3 + 2 * dist.get_rank(group)):
                optimizer.zero_grad()
                model(noise((8, 6), dist.get_rank(group), step, "x")).square().mean().backward()
                optimizer.step()
        check_equal_ranks(group, model, str(method))
        finals.append(flat(model.module))
        if wire is not None:
            assert wire.stats.steps == 3 + 2 * (dist.get_world_size(group) - 1)
            wire.detach()
    for final in finals[1:]:
        close(final, finals[0], str(form), atol=0.02)


@pytest.mark.parametrize("form", [{}, {"find_unused_parameters": True}])
def test_uneven_inputs_with_two_types(cluster: Cluster, form: dict[str, Any]) -> None:
    cluster.run(joined, 2, form, timeout_s=60)
