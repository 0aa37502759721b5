"""DistributedDataParallel in all its forms: buckets, accumulation, unused and frozen parameters, dtypes, optimizers."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers
import workers_ddp
from cluster import Cluster
from torch.nn.parallel import DistributedDataParallel as DDP
from workers import LR, Run, Training, close, flat, noise

import thinwire

ONE_A_BUCKET = {"bucket_cap_mb": 1e-5}
DGC = thinwire.DGC(density=0.05, dense_below=0, values="fp32", factor_masking=True)


def check_same_bits(cluster: Cluster, N: int, runs: list[Run], forms: list[dict]) -> None:
    """Each run gives the same parameters whatever the form of DDP."""
    shaped = [replace(run, ddp=form) for run in runs for form in [{}, *forms]]
    for results in cluster.run(workers.train, N, shaped):
        for place, run in enumerate(runs):
            plain, *others = results[place * (len(forms) + 1) : (place + 1) * (len(forms) + 1)]
            for form, other in zip(forms, others, strict=True):
                assert torch.equal(plain["trajectory"], other["trajectory"]), f"{run.method} with {form}"


@pytest.mark.parametrize("N", [2, 5])
def test_one_bucket_a_parameter_gives_the_same_bits_as_one_bucket(cluster: Cluster, N: int) -> None:
    """Buckets are rebuilt after the first step in both cases."""
    methods = [
        DGC,
        thinwire.DGC(density=0.05, values="fp32", factor_masking=True),
        thinwire.GTopK(density=0.02),
        thinwire.GradientDropping(density=0.02),
    ]
    methods += [thinwire.TernGrad(dense_below=0), thinwire.BlockSign(dense_below=1), thinwire.SignSGD()]
    check_same_bits(cluster, N, [Run(method, "groups", 5) for method in methods], [ONE_A_BUCKET])


def test_static_graph_and_bucket_views_change_nothing(cluster: Cluster) -> None:
    forms = [{"static_graph": True}, {"find_unused_parameters": True}]
    forms += [{"gradient_as_bucket_view": True, **ONE_A_BUCKET}]
    methods = [DGC, thinwire.GTopK(density=0.02), thinwire.BlockSign(dense_below=1), thinwire.Dense(dtype="fp16")]
    check_same_bits(cluster, 3, [Run(method, "heavy", 5, "net") for method in methods], forms)


def test_no_sync_compresses_only_on_the_synchronising_step_and_equals_one_big_batch(cluster: Cluster) -> None:
    cluster.run(workers_ddp.accumulate, 3)


@pytest.mark.parametrize("static_graph", [False, True])
def test_unused_parameters_keep_their_residual_and_their_grad_as_ddp_leaves_it(
    cluster: Cluster, static_graph: bool
) -> None:
    """Unused on one rank: zeros there, as in DDP; on all ranks: .grad stays as it was and nothing is sent."""
    cluster.run(workers_ddp.unused, 3, static_graph)


def test_a_parameter_used_only_under_no_sync_is_sent(cluster: Cluster) -> None:
    cluster.run(workers_ddp.used_under_no_sync, 2)


def test_frozen_parameters_stay_and_the_rest_trains(cluster: Cluster) -> None:
    cluster.run(workers_ddp.frozen, 2)


def test_bf16_and_mixed_dtypes_follow_plain_ddp_at_density_one(cluster: Cluster) -> None:
    cluster.run(workers_ddp.mixed_dtypes, 3)


def test_batchnorm_buffers_and_user_collectives_between_the_steps(cluster: Cluster) -> None:
    cluster.run(workers_ddp.batchnorm_and_user_collectives, 5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_follows_plain_ddp(cluster: Cluster, reentrant: bool) -> None:
    cluster.run(workers_ddp.checkpointed, 2, reentrant)


def test_a_closure_is_a_step_with_the_users_momentum(cluster: Cluster) -> None:
    cluster.run(workers_ddp.closures, 2)


def test_momentum_is_the_users_at_all_times_outside_step(cluster: Cluster) -> None:
    """OneCycleLR cycles it; optimizer.state_dict() too; and the trajectory is plain SGD's at density 1."""
    cluster.run(workers_ddp.cycled_momentum, 2)


def test_a_step_that_raises_half_way_does_not_take_momentum_away(cluster: Cluster) -> None:
    cluster.run(workers_ddp.failing_step, 2)


def test_errors_in_forward_and_backward_are_followed_by_a_normal_step(cluster: Cluster) -> None:
    cluster.run(workers_ddp.failing_passes, 2)


def test_adam_and_adamw_train_with_every_method_that_leaves_momentum_alone(cluster: Cluster) -> None:
    methods = [
        thinwire.TernGrad(dense_below=0),
        thinwire.GradientDropping(density=0.1),
        thinwire.BlockSign(dense_below=1),
        thinwire.SignSGD(),
    ]
    methods += [thinwire.DGC(density=0.1, momentum_correction=False, values="fp32"), thinwire.GTopK(density=0.1)]
    cluster.run(workers_ddp.learns, 3, [(optimizer, method) for method in methods for optimizer in ("adam", "adamw")])


def test_two_attached_models_in_one_process_do_not_disturb_each_other(cluster: Cluster) -> None:
    cluster.run(workers_ddp.two_models, 3)


@pytest.mark.parametrize("n", [2, 3])
def test_a_model_on_a_subgroup_whose_ranks_are_not_the_worlds(cluster: Cluster, n: int) -> None:
    runs = [
        Run(method, "heavy", 4, "net")
        for method in (DGC, thinwire.GTopK(density=0.05), thinwire.BlockSign(dense_below=1))
    ]
    runs += [
        replace(runs[0], hierarchy=[[0], list(range(1, n))]),
        Run(thinwire.TernGrad(dense_below=0), "adam", 4, "net"),
    ]
    first, last = cluster.run(workers.train, n, runs), cluster.run(workers.train, n, runs, last=True)
    for a, b in zip(first, last, strict=True):
        for run, x, y in zip(runs, a, b, strict=True):
            assert torch.equal(x["trajectory"], y["trajectory"]), run


def test_attached_models_are_freed_with_their_last_reference(cluster: Cluster) -> None:
    assert cluster.run(workers_ddp.left_alive, 2) == [[], []]


def compiled(group: dist.ProcessGroup) -> None:
    """DDP around a compiled module; and the DDP model compiled, attached to the compiled one."""
    finals = {}
    for form in ("plain", "inside", "outside, attached to the compiled one"):
        torch._dynamo.reset()
        torch.manual_seed(1)
        module = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
        inner = torch.compile(module, backend="aot_eager") if form == "inside" else module
        ddp = DDP(inner, process_group=group)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=LR, momentum=0.9)
        model = ddp if form in ("plain", "inside") else torch.compile(ddp, backend="aot_eager")
        wire = thinwire.attach(
            model if form.startswith("outside") else ddp,
            optimizer,
            "dgc:density=1,dense_below=0,values=fp32,factor_masking=true",
        )
        for step in range(4):
            optimizer.zero_grad()
            model(noise((4, 6), dist.get_rank(group), step, "x")).square().mean().backward()
            optimizer.step()
        assert wire.stats.steps == 4 and wire.stats.dense_bytes == 4 * 4 * flat(module).numel()
        finals[form] = flat(module)
        wire.detach()
    for form, final in finals.items():
        close(final, finals["plain"], form)


def test_compiled_models_train_as_they_do_uncompiled(cluster: Cluster) -> None:
    cluster.run(compiled, 2)


def inductor(group: dist.ProcessGroup) -> float:
    torch.manual_seed(1)
    ddp = DDP(torch.nn.Linear(8, 4), process_group=group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LR)
    wire, model = (
        thinwire.attach(ddp, optimizer, "dgc:density=0.2,dense_below=0,values=fp32,factor_masking=true"),
        torch.compile(ddp),
    )
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = (model(noise((16, 8), dist.get_rank(group), 0, "x")) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    wire.detach()
    return losses[-1] / losses[0]


@pytest.mark.skipif(sys.platform != "linux", reason="the inductor compiles with g++ here")
def test_a_model_compiled_with_the_inductor_learns(cluster: Cluster) -> None:
    assert max(cluster.run(inductor, 2)) < 0.5


def frozen_and_unfrozen(group: dist.ProcessGroup) -> None:
    """Frozen on the way, with find_unused_parameters: left alone, its residual waits, and it goes on when unfrozen."""
    for method in (
        "dgc:density=1.0,dense_below=0,values=fp32,factor_masking=true",
        "dgc:density=0.02,dense_below=0,values=fp32,factor_masking=true",
        "gtopk:density=0.02",
        "blocksign:dense_below=1",
    ):
        training = Training(group, Run(method, "plain", ddp={"find_unused_parameters": True}))
        module, size = training.module, dist.get_world_size(group)
        start = {name: p.detach().clone() for name, p in module.named_parameters()}
        total = {name: torch.zeros_like(p) for name, p in start.items()}
        for step in range(9):
            frozen = {"a", "d"} if 3 <= step < 6 else set()
            for name, p in module.named_parameters():
                p.requires_grad_(name not in frozen)
            held = {name: module.get_parameter(name).detach().clone() for name in frozen}
            training.step(step)
            for name, before in held.items():
                assert torch.equal(module.get_parameter(name), before), f"{method}: {name} is frozen"
            for rank in range(size):
                for name, pull in workers.pulls(rank, step).items():
                    if name not in frozen:
                        total[name] += pull / size
        rest = training.wire.detach()
        for name, p in module.named_parameters():
            close(p.detach() - LR * rest[name], start[name] - LR * total[name], f"{method} {name}", atol=1e-5)


def thawed(group: dist.ProcessGroup) -> None:
    """Frozen when DDP was made: it takes a new DDP and a new attach, and momentum and leftovers come along."""
    for optimizer, method in (
        ("plain", "dgc:density=0.05,dense_below=0,values=fp32,factor_masking=true"),
        ("heavy", workers.EXACT),
    ):
        finals = []
        for wired in (False, True):
            module = workers.Dot()
            module.a.requires_grad_(False)
            optim = workers.OPTIMIZERS[optimizer](module)
            model = DDP(module, process_group=group)
            wire = thinwire.attach(model, optim, method) if wired else None
            owed: dict[str, torch.Tensor] = {}
            for step in range(8):
                if step == 4:
                    module.a.requires_grad_(True)
                    owed = wire.detach() if wire is not None else {}
                    model = DDP(module, process_group=group)
                    wire = thinwire.attach(model, optim, method) if wired else None
                optim.zero_grad()
                model(workers.pulls(dist.get_rank(group), step)).backward()
                optim.step()
            rest = wire.detach() if wire is not None else {}
            whole = [
                p.detach() - LR * (rest.get(name, 0 * p) + owed.get(name, 0 * p)).detach()
                for name, p in module.named_parameters()
            ]
            finals.append(torch.cat([one.reshape(-1) for one in whole]))
        close(finals[1], finals[0], str(method), atol=1e-5)


def test_parameters_frozen_and_unfrozen_on_the_way(cluster: Cluster) -> None:
    cluster.run(frozen_and_unfrozen, 3)
    cluster.run(thawed, 2)


PAIRED = [
    "dgc:density=0.02", "dgc:density=0.02,momentum_correction=false,residual=bf16,values=fp32", "gtopk:density=0.02",
    "gtopk:density=0.02,momentum_correction=true", "terngrad:dense_below=0", "blocksign:dense_below=1",
    "dropping:density=0.02", "dropping:density=0.02,local=partial,sync_every=3", "signsgd", "dense", "noop",
]  # fmt: skip


def kept_and_moving(wire: Any) -> dict[str, torch.Tensor]:
    """The group's mean of everything that a wire holds back, and of the velocity wherever it is."""
    rest = wire._leftover()
    for name, pending in wire._pending.items():
        rest[name] = rest[name] + pending if name in rest else pending
    if wire.method.takes_momentum(wire._view.is_sgd):
        velocity = wire._mean_velocity()
    else:
        buffers = {name: wire._view.optimizer.state.get(p, {}) for name, p in wire._parameters.items()}
        own = {n: b["momentum_buffer"].reshape(-1) for n, b in buffers.items() if "momentum_buffer" in b}
        velocity = wire._mean_over_ranks(own)
    rest = wire._mean_over_ranks(rest)
    parameters = wire._mean_over_ranks({name: p.detach() for name, p in wire._parameters.items()})
    join = lambda vectors: torch.cat([vectors[name] for name in wire._names])  # noqa: E731
    return {"kept": join(rest), "velocity": join(velocity), "parameters": join(parameters)}


def every_switch(group: dist.ProcessGroup, first: str) -> None:
    """Right at the switch: what was kept is still kept, or was just applied; the velocity goes along."""
    for second in PAIRED:
        training = Training(group, Run(first, "heavy"))
        for step in range(3):
            training.step(step)
        before = kept_and_moving(training.wire)
        training.wire.switch(second)
        after = kept_and_moving(training.wire)
        applied = (before["parameters"] - after["parameters"]) / LR
        rounding = 0.05 if "bf16" in first + second else 1e-4
        close(after["kept"] + applied, before["kept"], f"{first} -> {second}: kept", atol=rounding)
        close(after["velocity"], before["velocity"], f"{first} -> {second}: velocity", atol=rounding)
        training.step(3)
        training.step(4)
        training.wire.detach()
        assert flat(training.module).isfinite().all()


@pytest.mark.parametrize("first", PAIRED)
def test_a_switch_between_any_two_methods_keeps_residuals_and_momentum(cluster: Cluster, first: str) -> None:
    cluster.run(every_switch, 2, first)
