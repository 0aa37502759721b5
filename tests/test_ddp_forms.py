"""DistributedDataParallel in all its forms: buckets, accumulation, unused and frozen parameters, dtypes, optimizers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import workers
from cluster import Cluster
from workers import Run

import thinwire

ONE_A_BUCKET = {"bucket_cap_mb": 1e-5}
DGC = thinwire.DGC(density=0.05, dense_below=0)


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
    methods = [DGC, thinwire.DGC(density=0.05), thinwire.GTopK(density=0.02), thinwire.GradientDropping(density=0.02)]
    methods += [thinwire.TernGrad(), thinwire.BlockSign(), thinwire.SignSGD()]
    check_same_bits(cluster, N, [Run(method, "groups", 5) for method in methods], [ONE_A_BUCKET])


def test_static_graph_and_bucket_views_change_nothing(cluster: Cluster) -> None:
    forms = [{"static_graph": True}, {"find_unused_parameters": True}]
    forms += [{"gradient_as_bucket_view": True, **ONE_A_BUCKET}]
    methods = [DGC, thinwire.GTopK(density=0.02), thinwire.BlockSign(), thinwire.Dense(dtype="fp16")]
    check_same_bits(cluster, 3, [Run(method, "heavy", 5, "net") for method in methods], forms)


def test_no_sync_compresses_only_on_the_synchronising_step_and_equals_one_big_batch(cluster: Cluster) -> None:
    cluster.run(workers.accumulate, 3)


@pytest.mark.parametrize("static_graph", [False, True])
def test_unused_parameters_keep_their_residual_and_their_grad_as_ddp_leaves_it(
    cluster: Cluster, static_graph: bool
) -> None:
    """Unused on one rank: zeros there, as in DDP; on all ranks: .grad stays as it was and nothing is sent."""
    cluster.run(workers.unused, 3, static_graph)


def test_a_parameter_used_only_under_no_sync_is_sent(cluster: Cluster) -> None:
    cluster.run(workers.used_under_no_sync, 2)


def test_frozen_parameters_stay_and_the_rest_trains(cluster: Cluster) -> None:
    cluster.run(workers.frozen, 2)


def test_bf16_and_mixed_dtypes_follow_plain_ddp_at_density_one(cluster: Cluster) -> None:
    cluster.run(workers.mixed_dtypes, 3)


def test_batchnorm_buffers_and_user_collectives_between_the_steps(cluster: Cluster) -> None:
    cluster.run(workers.batchnorm_and_user_collectives, 5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_follows_plain_ddp(cluster: Cluster, reentrant: bool) -> None:
    cluster.run(workers.checkpointed, 2, reentrant)


def test_a_closure_is_a_step_with_the_users_momentum(cluster: Cluster) -> None:
    cluster.run(workers.closures, 2)


def test_momentum_is_the_users_at_all_times_outside_step(cluster: Cluster) -> None:
    """OneCycleLR cycles it; optimizer.state_dict() too; and the trajectory is plain SGD's at density 1."""
    cluster.run(workers.cycled_momentum, 2)


def test_a_step_that_raises_half_way_does_not_take_momentum_away(cluster: Cluster) -> None:
    cluster.run(workers.failing_step, 2)


def test_errors_in_forward_and_backward_are_followed_by_a_normal_step(cluster: Cluster) -> None:
    cluster.run(workers.failing_passes, 2)


def test_adam_and_adamw_train_with_every_method_that_leaves_momentum_alone(cluster: Cluster) -> None:
    methods = [thinwire.TernGrad(), thinwire.GradientDropping(density=0.1), thinwire.BlockSign(), thinwire.SignSGD()]
    methods += [thinwire.DGC(density=0.1, momentum_correction=False), thinwire.GTopK(density=0.1)]
    cluster.run(workers.learns, 3, [(optimizer, method) for method in methods for optimizer in ("adam", "adamw")])


def test_two_attached_models_in_one_process_do_not_disturb_each_other(cluster: Cluster) -> None:
    cluster.run(workers.two_models, 3)


@pytest.mark.parametrize("n", [2, 3])
def test_a_model_on_a_subgroup_whose_ranks_are_not_the_worlds(cluster: Cluster, n: int) -> None:
    runs = [Run(method, "heavy", 4, "net") for method in (DGC, thinwire.GTopK(density=0.05), thinwire.BlockSign())]
    runs += [replace(runs[0], hierarchy=[[0], list(range(1, n))]), Run(thinwire.TernGrad(), "adam", 4, "net")]
    first, last = cluster.run(workers.train, n, runs), cluster.run(workers.train, n, runs, last=True)
    for a, b in zip(first, last, strict=True):
        for run, x, y in zip(runs, a, b, strict=True):
            assert torch.equal(x["trajectory"], y["trajectory"]), run


def test_attached_models_are_freed_with_their_last_reference(cluster: Cluster) -> None:
    assert cluster.run(workers.left_alive, 2) == [[], []]
