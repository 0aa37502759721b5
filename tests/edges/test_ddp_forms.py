"""DistributedDataParallel in its forms: buckets, accumulation, dtypes, subgroups, several models, failing passes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers
from cluster import Cluster
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP
from workers import DGC, EXACT, LR, SHAPES, Dot, Run, Training, close, digest, flat, noise, pulls

import thinwire

ONE_A_BUCKET = {"bucket_cap_mb": 1e-5}


def check_same_bits(cluster: Cluster, N: int, runs: list[Run], forms: list[dict]) -> None:
    """Each run gives the same parameters whatever the form of DDP."""
    shaped = [replace(run, ddp=form) for run in runs for form in [{}, *forms]]
    for results in cluster.run(workers.train, N, shaped):
        for place, run in enumerate(runs):
            plain, *others = results[place * (len(forms) + 1) : (place + 1) * (len(forms) + 1)]
            for form, other in zip(forms, others, strict=True):
                assert torch.equal(plain["trajectory"], other["trajectory"]), f"{run.method} with {form}"


@pytest.mark.parametrize("N", [2, 5])
def test_one_bucket_per_parameter_gives_the_same_bits_as_one_bucket(cluster: Cluster, N: int) -> None:
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


def accumulate(group: dist.ProcessGroup) -> None:
    for method in (DGC, thinwire.GTopK(density=0.02), thinwire.Dense(), EXACT, thinwire.BlockSign(dense_below=1)):
        whole, parted = Training(group, Run(method, "heavy")), Training(group, Run(method, "heavy"))
        for step in range(4):
            both = {name: g for name, g in pulls(whole.rank, step).items()}
            whole.optimizer.zero_grad()
            whole.model(both).backward()
            whole.optimizer.step()
            parted.optimizer.zero_grad()
            before = parted.wire.stats
            with parted.model.no_sync():
                for _ in range(3):
                    parted.model({name: g / 4 for name, g in both.items()}).backward()
            assert parted.wire.stats.frame_bytes == before.frame_bytes
            assert parted.wire.stats.steps == before.steps == step
            parted.model({name: g / 4 for name, g in both.items()}).backward()
            parted.optimizer.step()
        close(flat(parted.module), flat(whole.module), str(method), atol=1e-5)
        a, b = whole.wire.stats, parted.wire.stats
        assert (a.steps, a.frame_bytes, a.dense_bytes) == (b.steps, b.frame_bytes, b.dense_bytes)
        whole.wire.detach()
        parted.wire.detach()


def test_no_sync_compresses_only_on_the_synchronising_step_and_equals_one_big_batch(cluster: Cluster) -> None:
    cluster.run(accumulate, 3)


def mixed_dtypes(group: dist.ProcessGroup) -> None:
    kinds = {"a": torch.bfloat16, "c": torch.float64, "d": torch.float16}
    for dtypes in (dict.fromkeys(SHAPES, torch.bfloat16), kinds):
        finals = []
        for method in (
            None,
            EXACT,
            thinwire.GTopK(density=1.0),
            thinwire.Dense(),
            DGC,
            thinwire.BlockSign(dense_below=1),
        ):
            module = Dot()
            for name, dtype in dtypes.items():
                setattr(module, name, torch.nn.Parameter(getattr(module, name).detach().to(dtype)))
            model = DDP(module, process_group=group, bucket_cap_mb=0.005)
            optimizer = torch.optim.SGD(module.parameters(), lr=LR, momentum=0.9, weight_decay=0.01)
            wire = thinwire.attach(model, optimizer, method) if method is not None else None
            for step in range(4):
                optimizer.zero_grad()
                model(pulls(dist.get_rank(group), step)).backward()
                optimizer.step()
            finals.append(flat(module))
            bits = [None] * dist.get_world_size(group)
            dist.all_gather_object(bits, digest(*module.parameters()), group=group)
            assert len(set(bits)) == 1, f"{method}: replicas differ"
            if wire is not None:
                wire.detach()
                assert all(optimizer.state[p]["momentum_buffer"].dtype == p.dtype for p in module.parameters())
        reference, *exact = finals[:4]
        for other in exact:
            close(other, reference, f"{dtypes}", atol=0.05)


def test_bf16_and_mixed_dtypes_follow_plain_ddp_at_density_one(cluster: Cluster) -> None:
    cluster.run(mixed_dtypes, 3)


def batchnorm_and_user_collectives(group: dist.ProcessGroup) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    snapshots = []
    for method in (None, EXACT, thinwire.GTopK(density=1.0)):
        module = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
        with torch.no_grad():
            for name, p in module.named_parameters():
                p.copy_(noise(tuple(p.shape), 5, 5, name))
        model = DDP(module, process_group=group, bucket_cap_mb=1e-5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        wire = thinwire.attach(model, optimizer, method) if method is not None else None
        for step in range(6):
            optimizer.zero_grad()
            model(noise((8, 6), rank, step, "x")).square().mean().backward()
            optimizer.step()
            model.eval()
            with torch.no_grad():
                score = model(noise((4, 6), rank, step, "test")).sum()
            model.train()
            dist.all_reduce(score)  # on the world, from the main thread
            everybody = [None] * size
            dist.all_gather_object(everybody, float(score))
            assert len(set(everybody)) == 1
            assert wire is None or wire.stats.steps == step + 1
        snapshots.append(torch.cat([flat(module), module[1].running_mean, module[1].running_var]))
        if wire is not None:
            wire.detach()
    for other in snapshots[1:]:
        close(other, snapshots[0], atol=1e-5)


def test_batchnorm_and_user_collectives_between_the_steps_follow_plain_ddp(cluster: Cluster) -> None:
    cluster.run(batchnorm_and_user_collectives, 5)


def checkpointed(group: dist.ProcessGroup, reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.tanh(checkpoint(self.first, x, use_reentrant=reentrant)))

    finals = []
    for method in (None, EXACT, thinwire.GTopK(density=1.0)):
        torch.manual_seed(1)
        module = Net()
        model = DDP(module, process_group=group, bucket_cap_mb=1e-5, static_graph=reentrant)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
        wire = thinwire.attach(model, optimizer, method) if method is not None else None
        for step in range(4):
            optimizer.zero_grad()
            x = noise((4, 6), dist.get_rank(group), step, "x").requires_grad_(reentrant)
            model(x).square().mean().backward()
            optimizer.step()
        finals.append(flat(module))
        if wire is not None:
            wire.detach()
    for other in finals[1:]:
        close(other, finals[0])


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_follows_plain_ddp(cluster: Cluster, reentrant: bool) -> None:
    cluster.run(checkpointed, 2, reentrant)


class _Fuse(torch.autograd.Function):
    """Identity whose backward pass fails when it is told to."""

    blown = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if _Fuse.blown:
            raise ArithmeticError("the user's backward")
        return grad


def failing_passes(group: dist.ProcessGroup) -> None:
    """On all ranks alike: an error before the first gradient, and one in the middle of the buckets."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)

        def forward(self, x: Tensor, where: str) -> Tensor:
            if where == "forward":
                raise ArithmeticError("the user's forward")
            hidden = torch.tanh(self.first(x))
            hidden = _Fuse.apply(hidden) if where == "middle" else hidden
            out = self.second(hidden)
            return _Fuse.apply(out) if where == "top" else out

    outcomes = []
    for method in (None, EXACT, thinwire.GTopK(density=1.0), thinwire.BlockSign(dense_below=1)):
        torch.manual_seed(1)
        module = Net()
        model = DDP(module, process_group=group, bucket_cap_mb=1e-5)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        wire = thinwire.attach(model, optimizer, method) if method is not None else None
        outcome: list[str] = []
        for step, where in enumerate(["", "", "forward", "", "top", "", "middle", ""]):
            optimizer.zero_grad()
            _Fuse.blown = bool(where)
            try:
                model(noise((4, 6), dist.get_rank(group), step, "x"), where).square().mean().backward()
                optimizer.step()
                outcome.append("fine")
            except (ArithmeticError, RuntimeError) as error:
                outcome.append(str(error).split("\n")[0].split(".")[0][:60])
        outcomes.append((outcome, flat(module)))
        if wire is not None:
            wire.detach()
    _Fuse.blown = False
    for outcome, final in outcomes[1:]:
        assert outcome == outcomes[0][0], f"{outcome} instead of plain DDP's {outcomes[0][0]}"
        assert outcome[:6] == ["fine", "fine", "the user's forward", "fine", "the user's backward", "fine"]
        assert final.isfinite().all()
    for _, final in outcomes[1:3]:
        close(final, outcomes[0][1])


def test_error_in_forward_or_backward_is_followed_by_a_normal_step(cluster: Cluster) -> None:
    cluster.run(failing_passes, 2)


def two_models(group: dist.ProcessGroup) -> None:
    """Interleaved steps of two models give what each gives alone."""
    runs = [Run(DGC, "heavy", task="net"), Run(thinwire.GTopK(density=0.02), "adam")]
    alone = []
    for run in runs:
        training = Training(group, run)
        for step in range(5):
            training.step(step)
        alone.append(flat(training.module))
        training.wire.detach()
    trainings = [Training(group, run) for run in runs]
    for step in range(5):
        for training in trainings:
            training.optimizer.zero_grad()
        losses = [training.loss(step) for training in trainings]
        torch.autograd.backward(losses)  # both backward passes at once, buckets mixed
        for training in trainings:
            training.optimizer.step()
    for training, expected in zip(trainings, alone, strict=True):
        assert torch.equal(flat(training.module), expected)
        training.wire.detach()


def test_two_attached_models_in_one_process_do_not_disturb_each_other(cluster: Cluster) -> None:
    cluster.run(two_models, 3)


@pytest.mark.parametrize("n", [2, 3])
def test_model_on_a_subgroup_whose_ranks_are_not_the_worlds_has_the_same_bits(cluster: Cluster, n: int) -> None:
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
