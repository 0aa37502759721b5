"""Uneven inputs: ranks that run out go on giving what they kept, and the model is the one that all inputs made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers
from cluster import Cluster
from torch.distributed.algorithms.join import Join
from workers import Run, Training, close, flat

import thinwire

EXACT = "dgc:density=1.0,factor_masking=false,dense_below=0,values=fp32"
MIXED = f"perlayer:[ab]=dense,*=({EXACT})"


def uneven(group: dist.ProcessGroup, optimizer: str, methods: list[Any], form: dict[str, Any]) -> None:
    """Rank r has 3 + 2 r inputs an epoch, two epochs; at density 1 the parameters are plain DDP's."""
    finals = []
    for method in methods:
        training = Training(group, Run(None, optimizer, ddp=form))
        if method is not None:
            training.wire = thinwire.attach(training.model, training.optimizer, method, guard="warn", guard_every=2)
        for epoch in range(2):
            with training.model.join():
                for step in range(3 + 2 * training.rank):
                    training.step(10 * epoch + step)
        bits = [None] * dist.get_world_size(group)
        dist.all_gather_object(bits, workers.digest(flat(training.module)), group=group)
        assert len(set(bits)) == 1, f"{method}: replicas differ after the join"
        finals.append(flat(training.module))
        if training.wire is not None:
            stats = training.wire.stats
            assert stats.steps == 2 * (3 + 2 * (dist.get_world_size(group) - 1)), (
                "every rank took part in all exchanges"
            )
            training.wire.detach()
    for method, other in zip(methods[1:], finals[1:], strict=True):
        if method in (EXACT, "gtopk:density=1.0", "dense", MIXED):
            close(other, finals[0], f"{method} {optimizer} {form}", atol=1e-5)


@pytest.mark.parametrize("optimizer", ["plain", "decay", "nesterov-decay"])
def test_uneven_inputs_follow_plain_ddp_at_density_one(cluster: Cluster, optimizer: str) -> None:
    methods = [
        None,
        EXACT,
        "gtopk:density=1.0",
        "dense",
        "dgc:density=0.05",
        "terngrad:dense_below=0",
        "blocksign:dense_below=1",
        "signsgd",
        MIXED,
    ]
    if optimizer != "plain":  # an optimizer's own momentum stops on a rank that has run out, in plain DDP too
        methods = [None, EXACT, "dgc:density=0.05", "blocksign:dense_below=1", "perlayer:[ab]=dense,*=dgc"]
    cluster.run(uneven, 3, optimizer, methods, {})


def test_uneven_inputs_follow_plain_ddp_in_other_forms_of_ddp(cluster: Cluster) -> None:
    for form in ({"bucket_cap_mb": 1e-5}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}):
        cluster.run(uneven, 2, "plain", [None, EXACT, "gtopk:density=0.05"], form)


def conserved(group: dist.ProcessGroup) -> None:
    """Constant pulls, plain SGD: parameters plus what is kept are the mean of everything that any rank put in."""
    for method in (
        "dgc:density=0.02,dense_below=0,values=fp32,factor_masking=true",
        "gtopk:density=0.02",
        "blocksign:dense_below=1",
        "dropping:density=0.02",
    ):
        training = Training(group, Run(method, "plain"))
        start = flat(training.module)
        size = dist.get_world_size(group)
        with Join([training.model]):
            for step in range(2 + 3 * training.rank):
                training.step(step)
        rest = training.wire.detach()
        total = torch.zeros_like(start)
        for rank in range(size):
            for step in range(2 + 3 * rank):
                total += torch.cat([p.reshape(-1) for p in workers.pulls(rank, step).values()]) / size
        kept = torch.cat([rest[name].reshape(-1) for name, _ in training.module.named_parameters()])
        close(flat(training.module) - workers.LR * kept, start - workers.LR * total, method, atol=1e-5)


def test_uneven_inputs_lose_nothing(cluster: Cluster) -> None:
    cluster.run(conserved, 3)


def skipped(group: dist.ProcessGroup) -> bool:
    """A bad step after one rank has run out: the first step of the next epoch must not be dropped there."""
    training = Training(group, Run(None, "plain"))
    training.wire = thinwire.attach(training.model, training.optimizer, "gtopk:density=1.0", on_nonfinite="skip")
    with training.model.join():
        for step in range(2 + training.rank):
            training.optimizer.zero_grad()
            (training.loss(step) * (float("nan") if step == 2 else 1.0)).backward()
            training.optimizer.step()
    before = flat(training.module)
    training.step(9)
    bits = [None] * dist.get_world_size(group)
    dist.all_gather_object(bits, workers.digest(flat(training.module)), group=group)
    assert training.wire.stats.steps_skipped == 1
    training.wire.detach()
    return len(set(bits)) == 1 and not torch.equal(before, flat(training.module))


def test_uneven_inputs_skip_a_bad_step_on_all_ranks(cluster: Cluster) -> None:
    assert cluster.run(skipped, 2) == [True, True]


def refused(group: dist.ProcessGroup) -> list[str]:
    sentences = []
    for method, options in (
        ("dropping:local=sum,sync_every=2", {}),
        ("dropping:local=sum,sync_every=none", {}),
        ("dgc", {"divide_by_initial_world_size": False}),
    ):
        training = Training(group, Run(method, "plain"))
        try:
            with training.model.join(**options):
                training.step(0)
        except ValueError as error:
            sentences.append(str(error))
        training.model._join_config = type(training.model._join_config).construct_disabled_join_config()
        training.step(1)  # outside of a join everything is as before
        training.wire.detach()
    return sentences


def test_join_refuses_what_it_cannot_do_before_anything_hangs(cluster: Cluster) -> None:
    for sentences in cluster.run(refused, 2, timeout_s=40):
        assert len(sentences) == 3
        assert all("own gradient" in sentence for sentence in sentences[:2])
        assert "divide_by_initial_world_size" in sentences[2]
