"""Several backward passes before one optimizer step: plain DDP at density 1, one exchange of the sum at any.

``summed`` trains twice: once with every step's gradients in several backward passes, and once with their sum in one.
"""

from __future__ import annotations

import logging
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cluster import Cluster
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP
from two_types import TwoTypes
from workers import LR, Dot, Run, Training, close, digest, flat, noise, pulls, tensors_of

import thinwire

FORMS: list[dict[str, Any]] = [
    {},
    {"bucket_cap_mb": 1e-5},
    {"gradient_as_bucket_view": True},
    {"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-5},
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"static_graph": True, "gradient_as_bucket_view": True},
]
EXACT = "density=1.0,dense_below=0,values=fp32"
METHODS = [
    "dgc",
    "dgc:density=0.05,dense_below=0,values=fp32,factor_masking=true",
    "dgc:density=0.05,dense_below=0,scope=model,lr_rescaling=true",
    "dgc:density=0.05,dense_below=0,values=fp32,direct_decay=false,clip_norm=1.0",
    "dgc:density=0.05,dense_below=0,warmup=4,values=fp32",
    "dgc:density=0.05,dense_below=0,residual=bf16,values=fp32",
    "gtopk:density=0.05",
    "gtopk:density=0.05,values=fp16,warmup=4,direct_decay=true",
    "blocksign:dense_below=1",
    "blocksign:dense_below=1,two_way=false,clip_norm=1.0",
    "dropping:density=0.05,values=fp32",
    "dropping:density=0.05,momentum_correction=true,residual=bf16",
    "dropping:density=0.05,values=fp32,local=partial,sync_every=2",
    "dropping:density=0.05,values=fp32,local=error,sync_every=3",
    "terngrad:dense_below=0",
    "terngrad:dense_below=0,scaler=model",
    "signsgd",
    "dense",
    "noop",
    "perlayer:[ab]=dense,c=(blocksign:dense_below=1),*=(dgc:density=0.05,dense_below=0)",
]  # fmt: skip
OWN_MOMENTUM = [
    "dgc:density=0.05,dense_below=0,momentum_correction=false,values=fp32",
    "gtopk:density=0.05",
    "blocksign:dense_below=1",
    "dropping:density=0.05",
    "terngrad:dense_below=0",
    "signsgd",
    "dense",
]
PASSES = (2, 3, 1, 2, 1, 3)


def parts_of(rank: int, step: int, passes: int) -> list[dict[str, Tensor]]:
    return [pulls(rank, 10 * step + number) for number in range(passes)]


def in_passes(training: Training, step: int, passes: int, set_to_none: bool = True) -> None:
    training.optimizer.zero_grad(set_to_none=set_to_none)
    for part in parts_of(training.rank, step, passes):
        training.model(part).backward()
    training.optimizer.step()


def at_once(training: Training, step: int, passes: int) -> None:
    training.optimizer.zero_grad()
    parts = parts_of(training.rank, step, passes)
    training.model({name: sum(part[name] for part in parts) for name in parts[0]}).backward()
    training.optimizer.step()


def check_equal_ranks(group: dist.ProcessGroup, training: Training, what: str) -> None:
    bits = [None] * dist.get_world_size(group)
    dist.all_gather_object(bits, digest(flat(training.module)), group=group)
    assert len(set(bits)) == 1, f"{what}: replicas differ"


def end(training: Training) -> Tensor:
    if training.wire is not None:
        training.wire.detach()
    return flat(training.module)


def summed(group: dist.ProcessGroup, runs: list[Run], set_to_none: bool = True) -> None:
    for run in runs:
        parted, whole = Training(group, run), Training(group, run)
        for step, passes in enumerate(PASSES):
            in_passes(parted, step, passes, set_to_none)
            at_once(whole, step, passes)
            close(flat(parted.module), flat(whole.module), f"{run}, step {step}", atol=2e-5)
            assert parted.wire.stats.steps == whole.wire.stats.steps == step + 1
            assert parted.wire.stats.density == whole.wire.stats.density
        if not parted.wire.method.replicas_drift:
            check_equal_ranks(group, parted, str(run))
        close(end(parted), end(whole), str(run), atol=2e-5)


@pytest.mark.parametrize("optimizer", ["plain", "heavy", "nesterov-decay", "groups"])
@pytest.mark.parametrize("method", METHODS)
def test_passes_are_one_exchange_of_their_sum(cluster: Cluster, method: str, optimizer: str) -> None:
    cluster.run(summed, 3, [Run(method, optimizer)])


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_passes_are_one_exchange_of_their_sum_with_an_optimizer_that_keeps_its_momentum(
    cluster: Cluster, optimizer: str
) -> None:
    cluster.run(summed, 2, [Run(method, optimizer) for method in OWN_MOMENTUM])


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_ddp(cluster: Cluster, form: dict[str, Any]) -> None:
    methods = ["dgc:density=0.05,dense_below=0", "gtopk:density=0.05", "blocksign:dense_below=1", "terngrad", "dense"]
    cluster.run(summed, 2, [Run(method, "nesterov-decay", ddp=form) for method in methods])
    cluster.run(summed, 2, [Run(method, "decay", ddp=form) for method in methods], False)


def test_hierarchy(cluster: Cluster) -> None:
    methods = ["dgc:density=0.05,dense_below=0", "gtopk:density=0.05", "blocksign:dense_below=1"]
    for machines in ([[0, 1], [2, 3]], [[0, 1, 2, 3]]):
        cluster.run(summed, 4, [Run(method, "decay", hierarchy=machines) for method in methods])


def like_plain_ddp(group: dist.ProcessGroup, runs: list[Run], passes: list[int], loop: str) -> None:
    """At density 1 the parameters are plain DDP's at every step."""
    for run in runs:
        plain, wired = Training(group, Run(None, run.optimizer, ddp=run.ddp)), Training(group, run)
        for step, count in enumerate(passes):
            for training in (plain, wired):
                LOOPS[loop](training, step, count)
            close(flat(wired.module), flat(plain.module), f"{run}, {loop}, step {step}", atol=2e-5)
        check_equal_ranks(group, wired, str(run))
        end(wired)


def with_no_sync(training: Training, step: int, passes: int) -> None:
    """Passes that are exchanged, and between them such that are not, which are this rank's alone until the next one."""
    training.optimizer.zero_grad(set_to_none=step % 2 == 0)
    for number, part in enumerate(parts_of(training.rank, step, 2 * passes)):
        if number % 2 == step % 2 and number < 2 * passes - 1:
            with training.model.no_sync():
                training.model(part).backward()
        else:
            training.model(part).backward()
    training.optimizer.step()


def cleared_between(training: Training, step: int, passes: int) -> None:
    """A gradient that was thrown away, by all parameters or some of them, has no effect."""
    training.optimizer.zero_grad()
    for number, part in enumerate(parts_of(training.rank, step, passes)):
        training.model(part).backward()
        if number < passes - 1:
            for place, parameter in enumerate(training.module.parameters()):
                if place % 2 or step % 3 == 0:
                    parameter.grad = None
                elif step % 3 == 1 and training.run.ddp.get("gradient_as_bucket_view") is None:
                    parameter.grad.zero_()
    training.optimizer.step()


def cleared_after_forward(training: Training, step: int, passes: int) -> None:
    for number, part in enumerate(parts_of(training.rank, step, passes)):
        loss = training.model(part)
        if not number:
            training.optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss.backward()
    training.optimizer.step()


def skipped_steps(training: Training, step: int, passes: int) -> None:
    """A step in which the optimizer does nothing, as when a loop finds its loss too large."""
    training.optimizer.zero_grad(set_to_none=step % 2 == 0)
    for part in parts_of(training.rank, step, passes):
        training.model(part).backward()
    if step % 3 != 1:
        training.optimizer.step()


def retained(training: Training, step: int, passes: int) -> None:
    """A second pass through one graph is not exchanged, by plain DDP neither, until another pass is."""
    training.optimizer.zero_grad()
    first, second = parts_of(training.rank, step, 2)
    loss = training.model(first)
    for _ in range(passes):
        loss.backward(retain_graph=True)
    training.model(second).backward()
    training.optimizer.step()


def own_term(training: Training, step: int, passes: int) -> None:
    """A penalty that does not go through the model's forward, before and between exchanges."""
    training.optimizer.zero_grad()
    for number, part in enumerate(parts_of(training.rank, step, passes)):
        if number == step % 2:
            sum(0.01 * p.square().sum() for p in training.module.parameters()).backward()
        training.model(part).backward()
    training.optimizer.step()


def sharpness_aware(training: Training, step: int, passes: int) -> None:
    """SAM: the gradient that counts is taken where the first one leads."""
    training.optimizer.zero_grad(set_to_none=step % 2 == 0)
    for part in parts_of(training.rank, 2 * step, passes):
        training.model(part).backward()
    before = [p.detach().clone() for p in training.module.parameters()]
    with torch.no_grad():
        for number, p in enumerate(training.module.parameters()):
            p.add_(0.05 * noise(tuple(p.shape), 0, step, f"towards/{number}"))
    training.optimizer.zero_grad(set_to_none=step % 2 == 0)
    for part in parts_of(training.rank, 2 * step + 1, passes):
        training.model(part).backward()
    with torch.no_grad():
        for p, kept in zip(training.module.parameters(), before, strict=True):
            p.copy_(kept)
    training.optimizer.step()


def closure(training: Training, step: int, passes: int) -> None:
    def evaluate() -> float:
        training.optimizer.zero_grad()
        for part in parts_of(training.rank, step, passes):
            training.model(part).backward()
        return 0.0

    training.optimizer.step(evaluate)


LOOPS = {
    one.__name__: one
    for one in (
        in_passes, with_no_sync, cleared_between, cleared_after_forward, skipped_steps, retained, own_term,
        sharpness_aware, closure,
    )
}  # fmt: skip

EXACT_RUNS = [
    Run(method, optimizer)
    for method, optimizer in (
        (f"dgc:{EXACT}", "nesterov-decay"),
        (f"dgc:{EXACT},direct_decay=false", "groups"),
        (f"dgc:{EXACT},lr_rescaling=true,scope=model", "decay"),
        (f"gtopk:{EXACT}", "heavy"),
        (f"gtopk:{EXACT},direct_decay=true", "maximize-nesterov"),
        (f"gtopk:{EXACT}", "adamw"),
        (f"dropping:{EXACT}", "decay"),
        ("dense", "nesterov-decay"),
        (f"perlayer:[ad]=dense,*=(dgc:{EXACT})", "nesterov-decay"),
    )
]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("views", [False, True])
def test_loops_follow_plain_ddp_at_density_one(cluster: Cluster, loop: str, views: bool) -> None:
    form = {"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-5} if views else {}
    runs = [Run(run.method, run.optimizer, ddp=form) for run in EXACT_RUNS]
    cluster.run(like_plain_ddp, 2, runs, [2, 1, 3, 2, 1, 1, 2], loop)


@pytest.mark.parametrize(
    "form", [{"find_unused_parameters": True}, {"find_unused_parameters": True, "bucket_cap_mb": 1e-5}]
)
def test_loops_follow_plain_ddp_where_unused_parameters_are_looked_for(cluster: Cluster, form: dict[str, Any]) -> None:
    for loop in ("in_passes", "with_no_sync", "cleared_between", "sharpness_aware"):
        runs = [Run(run.method, run.optimizer, ddp=form) for run in EXACT_RUNS[:4]]
        cluster.run(like_plain_ddp, 2, runs, [2, 1, 3, 2], loop)


def test_a_second_pass_that_comes_late_follows_plain_ddp(cluster: Cluster) -> None:
    """Behind many steps of one pass nothing was copied, and the further gradient is exchanged beside the first."""
    cluster.run(like_plain_ddp, 2, EXACT_RUNS, [1] * 6 + [2, 1, 3, 2], "in_passes")


def leave_no_trace(group: dist.ProcessGroup, runs: list[Run]) -> None:
    """Passes whose gradients are thrown away before the optimizer's step: the bits are those without them."""
    for run in runs:
        training, reference = Training(group, run), Training(group, run)
        for step in range(6):
            for number in range(step % 3):
                training.optimizer.zero_grad()
                training.model(pulls(training.rank, 100 + 10 * step + number)).backward()
            for one in (training, reference):
                one.optimizer.zero_grad(set_to_none=step % 2 == 0)
                one.model(pulls(one.rank, step)).backward()
                one.optimizer.step()
            assert torch.equal(flat(training.module), flat(reference.module)), f"{run}, step {step}"
        state, expected = training.wire.state_dict(), reference.wire.state_dict()
        assert digest(*tensors_of(state)) == digest(*tensors_of(expected)) and state["step"] == expected["step"]
        end(training)
        end(reference)


@pytest.mark.parametrize("form", [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 1e-5}])
def test_gradients_that_are_thrown_away_leave_no_trace(cluster: Cluster, form: dict[str, Any]) -> None:
    cluster.run(leave_no_trace, 3, [Run(method, "nesterov-decay", ddp=form) for method in METHODS], timeout_s=200)


class Net(torch.nn.Module):
    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(*pair) for pair in pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Adversaries:
    """A discriminator and a generator, both DDP models, trained in turns as in PyTorch's DCGAN tutorial."""

    def __init__(self, group: dist.ProcessGroup, method: str | None, judge_method: str | None = None) -> None:
        torch.manual_seed(2)
        self.group = group
        self.judge, self.maker = (
            DDP(Net(*sizes), process_group=group, bucket_cap_mb=1e-4) for sizes in ((6, 30, 1), (4, 20, 6))
        )
        self.judge_steps, self.maker_steps = (
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
            for model in (self.judge, self.maker)
        )
        if method is not None:
            thinwire.attach(self.maker, self.maker_steps, method)
        if judge_method is not None:
            thinwire.attach(self.judge, self.judge_steps, judge_method)

    def step(self, step: int, through: torch.nn.Module) -> None:
        """``through`` which form of the discriminator the generator gets its gradient."""
        rank = dist.get_rank(self.group)
        self.judge_steps.zero_grad(set_to_none=step % 2 == 0)
        (self.judge(noise((8, 6), rank, step, "real")) - 0.9).square().mean().backward()
        made = self.maker(noise((8, 4), rank, step, "z"))
        (self.judge(made.detach()) + 0.9).square().mean().backward()
        self.judge_steps.step()
        self.maker_steps.zero_grad()
        (through(made) - 0.9).square().mean().backward()
        self.maker_steps.step()

    def both(self) -> Tensor:
        return torch.cat([flat(self.judge.module), flat(self.maker.module)])


def adversarial(group: dist.ProcessGroup) -> None:
    plain = Adversaries(group, None)
    for step in range(6):
        plain.step(step, plain.judge)
    for method in (f"dgc:{EXACT}", f"gtopk:{EXACT}", "dense"):
        wired = Adversaries(group, method, method)
        for step in range(6):
            wired.step(step, wired.judge)
        close(wired.both(), plain.both(), method, atol=1e-5)


def adversarial_at_low_density(group: dist.ProcessGroup) -> None:
    """The discriminator does not notice that the generator's loss went through it."""
    for method in ("dgc:density=0.1,dense_below=0,factor_masking=true", "gtopk:density=0.1", "blocksign:dense_below=1"):
        through, beside = (Adversaries(group, None, method) for _ in range(2))
        for step in range(6):
            through.step(step, through.judge)
            beside.step(step, beside.judge.module)
        assert torch.equal(through.both(), beside.both()), method


def test_two_models_that_train_each_other(cluster: Cluster) -> None:
    cluster.run(adversarial, 2)
    cluster.run(adversarial_at_low_density, 2)


class Sharp(torch.optim.Optimizer):
    """SAM as an optimizer around another one, whose own step() is never called."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups[0]["params"], {"lr": LR})
        self.base = base

    def first(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.data.add_(p.grad, alpha=0.01)
            self.state[p]["away"] = 0.01 * p.grad
        self.zero_grad()

    def second(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.data.sub_(self.state[p]["away"])
        self.base.step()
        self.zero_grad()


def wrapped(group: dist.ProcessGroup) -> None:
    """The optimizer inside of the attached one steps: nothing of what is kept back may be lost."""
    for method in ("gtopk:density=0.05", "dropping:density=0.05,values=fp32"):
        module = Dot()
        model = DDP(module, process_group=group)
        optimizer = Sharp(torch.optim.SGD(module.parameters(), lr=LR))
        wire = thinwire.attach(model, optimizer, method)
        start, total = flat(module), torch.zeros(flat(module).numel())
        for step in range(5):
            model(pulls(dist.get_rank(group), 100 + step)).backward()
            optimizer.first()
            model(pulls(dist.get_rank(group), step)).backward()
            optimizer.second()
            everybody = [pulls(rank, step) for rank in range(dist.get_world_size(group))]
            total += sum(torch.cat([g.reshape(-1) for g in one.values()]) for one in everybody) / len(everybody)
        assert wire.stats.steps == 5
        rest = wire.detach()
        kept = torch.cat([rest[name].reshape(-1) for name, _ in module.named_parameters()])
        close(flat(module) - LR * kept, start - LR * total, method, atol=1e-5)


def test_an_optimizer_inside_of_the_attached_one(cluster: Cluster) -> None:
    cluster.run(wrapped, 2)


def conserving(group: dist.ProcessGroup, passes: list[int], factor: float) -> None:
    """What was applied and what is kept is what all ranks put in; the loop scales .grad between passes."""
    methods = ["dgc:density=0.02,dense_below=0,values=fp32", "gtopk:density=0.02", "blocksign:dense_below=1"]
    for method in [*methods, "dropping:density=0.02", "dgc:density=0.02,dense_below=0,momentum_correction=false"]:
        training = Training(group, Run(method, "plain"))
        start, total = flat(training.module), torch.zeros(flat(training.module).numel())
        for step, count in enumerate(passes):
            training.optimizer.zero_grad()
            taken = torch.zeros_like(total)  # what the loop itself took out of .grad
            for number in range(count):
                training.model(pulls(training.rank, 10 * step + number)).backward()
                if factor != 1.0 and number == 0:
                    for p in training.module.parameters():
                        p.grad.mul_(factor)
                    grads = torch.cat([p.grad.reshape(-1) for p in training.module.parameters()])
                    taken = grads / factor - grads
                for rank in range(dist.get_world_size(group)):
                    pull = torch.cat([g.reshape(-1) for g in pulls(rank, 10 * step + number).values()])
                    total += pull / dist.get_world_size(group)
            total -= taken
            training.optimizer.step()
        check_equal_ranks(group, training, method)
        rest = training.wire.detach()
        kept = torch.cat([rest[name].reshape(-1) for name, _ in training.module.named_parameters()])
        close(flat(training.module) - LR * kept, start - LR * total, f"{method} {passes} {factor}", atol=2e-5)


@pytest.mark.parametrize("factor", [1.0, 0.5])
@pytest.mark.parametrize("passes", [[2, 3, 1, 2], [1, 1, 1, 1, 1, 2, 1, 3, 2]])
def test_nothing_is_lost(cluster: Cluster, passes: list[int], factor: float) -> None:
    cluster.run(conserving, 3, passes, factor)


def scaled(group: dist.ProcessGroup, runs: list[Run]) -> None:
    """Two losses under a scaler, some of whose steps overflow in their first or in their second pass."""
    for run in runs:
        finals = []
        for wired in (False, True):
            training = Training(group, Run(None, run.optimizer, ddp=run.ddp))
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
            if wired:
                training.wire = thinwire.attach(training.model, training.optimizer, run.method, scaler=scaler)
            for step in range(8):
                training.optimizer.zero_grad(set_to_none=step % 2 == 0)
                for number, part in enumerate(parts_of(training.rank, step, 2)):
                    loss = scaler.scale(training.model(part))
                    overflows = step in (2, 5) and number == step % 2 and training.rank == 0
                    (loss * float("inf") if overflows else loss).backward()
                scaler.step(training.optimizer)
                scaler.update()
            finals.append(flat(training.module))
            if training.wire is not None:
                assert training.wire.stats.steps == 6
                check_equal_ranks(group, training, str(run))
                training.wire.detach()
        close(finals[1], finals[0], str(run), atol=2e-5)


def test_a_scaler_with_two_losses(cluster: Cluster) -> None:
    cluster.run(scaled, 2, EXACT_RUNS[:6])
    cluster.run(
        scaled, 2, [Run(run.method, run.optimizer, ddp={"gradient_as_bucket_view": True}) for run in EXACT_RUNS[:4]]
    )


def passed_over(group: dist.ProcessGroup) -> None:
    """on_nonfinite="skip": a step one of whose passes is bad is passed over as a whole."""
    for method in METHODS[:9]:
        training, reference = Training(group, Run(method, "decay")), Training(group, Run(method, "decay"))
        for one in (training, reference):
            one.wire.detach()
            one.wire = thinwire.attach(one.model, one.optimizer, method, on_nonfinite="skip")
        for step in range(7):
            bad = {2: 0, 4: 1}.get(step)
            training.optimizer.zero_grad()
            for number, part in enumerate(parts_of(training.rank, step, 2)):
                loss = training.model(part)
                (loss * float("nan") if number == bad and training.rank == 1 else loss).backward()
            training.optimizer.step()
            if bad is None:
                in_passes(reference, step, 2)
        assert torch.equal(flat(training.module), flat(reference.module)), method
        end(training)
        end(reference)


def test_a_step_with_a_bad_pass_is_passed_over(cluster: Cluster) -> None:
    cluster.run(passed_over, 2)


def resumed(group: dist.ProcessGroup) -> None:
    """A wire that was saved, loaded or switched between two steps goes on as if nothing had been."""
    for method in METHODS[:9]:
        run = Run(method, "nesterov-decay")
        straight, broken = Training(group, run), Training(group, run)
        for step, passes in enumerate(PASSES):
            if step == 3:
                broken.reload()
            for one in (straight, broken):
                in_passes(one, step, passes)
        assert torch.equal(flat(straight.module), flat(broken.module)), method
        straight.wire.switch("dense")
        straight.wire.switch(f"dgc:{EXACT}")
        in_passes(straight, 9, 2)
        assert flat(straight.module).isfinite().all()
        end(straight)
        end(broken)


def test_a_run_that_is_resumed(cluster: Cluster) -> None:
    cluster.run(resumed, 2)


def uneven(group: dist.ProcessGroup) -> None:
    """Ranks that run out of inputs answer every pass of the others. (Plain DDP averages what lies in .grad with their
    zeros again, so it is compared with its sum in one pass.)"""
    finals = []
    for method in (None, f"dgc:{EXACT},momentum_correction=false", "dense", "dgc:warmup=6", "terngrad"):
        training = Training(group, Run(method, "plain"))
        with training.model.join():
            for step in range(3 + 2 * training.rank):
                (at_once if method is None else in_passes)(training, step, 2)
        check_equal_ranks(group, training, str(method))
        finals.append(end(training))
    for final in finals[1:3]:
        close(final, finals[0], atol=1e-5)


def test_uneven_inputs(cluster: Cluster) -> None:
    cluster.run(uneven, 3)


def guarded(group: dist.ProcessGroup) -> list[float]:
    """The measurements of a step with several passes are those of its sum."""
    found = []
    for train in (in_passes, at_once):
        training = Training(group, Run(None, "decay"))
        training.wire = thinwire.attach(training.model, training.optimizer, METHODS[1], guard="warn", guard_every=1)
        train(training, 0, 2)
        train(training, 1, 3)
        stats = training.wire.stats
        found += [stats.residual_to_gradient, stats.compression_error]
        training.wire.detach()
    return found


def test_a_guard_measures_the_sum(cluster: Cluster) -> None:
    for a, b, c, d in cluster.run(guarded, 2):
        assert (a, b) == pytest.approx((c, d), rel=1e-4)


def searched(group: dist.ProcessGroup) -> None:
    """LBFGS evaluates its closure many times per step."""
    finals = []
    for method in (None, f"gtopk:{EXACT}", "dense"):
        torch.manual_seed(4)
        model = DDP(Net(6, 10, 3), process_group=group)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
        wire = thinwire.attach(model, optimizer, method) if method is not None else None

        def evaluate(model: DDP = model, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = (model(noise((8, 6), dist.get_rank(group), 0, "x")) - 0.5).square().mean()
            loss.backward()
            return loss

        for _ in range(5):
            optimizer.step(evaluate)
        finals.append(flat(model.module))
        if wire is not None:
            assert wire.stats.steps == 5
            wire.detach()
    for final in finals[1:]:
        close(final, finals[0], atol=1e-4)


def test_an_optimizer_that_evaluates_its_closure_many_times(cluster: Cluster) -> None:
    cluster.run(searched, 2)


class Heads(torch.nn.Module):
    """One trunk, channels_last, with two heads of which a forward pass uses the named ones."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = torch.nn.Conv2d(3, 16, 3).to(memory_format=torch.channels_last)
        self.heads = torch.nn.ModuleDict({name: torch.nn.Linear(16, 3) for name in "ab"})

    def forward(self, x: Tensor, names: str) -> Tensor:
        hidden = torch.tanh(self.trunk(x.to(memory_format=torch.channels_last))).mean((2, 3))
        return sum(self.heads[name](hidden).square().mean() for name in names)


def two_heads(group: dist.ProcessGroup, views: bool) -> None:
    """A pass for each head, as for two tasks: what a pass does not use keeps what the other one left in .grad."""
    finals: dict[str, list[Tensor]] = {}
    for method in (None, f"dgc:{EXACT}", f"gtopk:{EXACT}", "dense", "dgc:density=0.1", "blocksign:dense_below=1"):
        torch.manual_seed(5)
        form = {"find_unused_parameters": True, "gradient_as_bucket_view": views, "bucket_cap_mb": 1e-3}
        model = DDP(Heads(), process_group=group, **form)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        wire = thinwire.attach(model, optimizer, method) if method is not None else None
        for step in range(5):
            optimizer.zero_grad()
            for names in ("a", "b", "ab")[: 1 + (step + 1) % 3]:
                model(noise((4, 3, 8, 8), dist.get_rank(group), step, names), names).backward()
            optimizer.step()
            finals.setdefault(str(method), []).append(flat(model.module))
        bits = [None] * dist.get_world_size(group)
        dist.all_gather_object(bits, digest(flat(model.module)), group=group)
        assert len(set(bits)) == 1, method
        if wire is not None:
            wire.detach()
    for method in (f"dgc:{EXACT}", f"gtopk:{EXACT}", "dense"):
        close(torch.stack(finals[method]), torch.stack(finals["None"]), method, atol=2e-5)


@pytest.mark.parametrize("views", [False, True])
def test_passes_that_use_different_parameters(cluster: Cluster, views: bool) -> None:
    cluster.run(two_heads, 2, views)


def losses_of(group: dist.ProcessGroup, method: str | None) -> float:
    """The last of sixty steps with two losses each, a learning rate that dense training takes easily."""
    torch.manual_seed(6)
    model = DDP(Net(8, 64, 64, 4), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    wire = thinwire.attach(model, optimizer, method) if method is not None else None
    x, y = (noise(shape, dist.get_rank(group), 0, "xy") for shape in ((32, 8), (32, 4)))
    for _ in range(60):
        optimizer.zero_grad()
        for half in (slice(0, 16), slice(16, 32)):
            loss = (model(x[half]) - torch.tanh(y[half])).square().mean()
            loss.backward()
        optimizer.step()
    if wire is not None:
        wire.detach()
    return float(loss.detach())


def test_two_losses_learn_as_with_plain_ddp(cluster: Cluster) -> None:
    first, plain = cluster.run(losses_of, 2, "noop")[0], cluster.run(losses_of, 2, None)[0]
    assert plain < 0.5 and first < 0.5
    for method in ("dgc", "dgc:density=0.05,dense_below=0", "gtopk", "blocksign", "dropping"):
        assert cluster.run(losses_of, 2, method)[0] < 1.5 * plain, method


def copied(group: dist.ProcessGroup) -> None:
    """A loop of one pass per step is not copied for once that is clear, and one with several always is."""
    training = Training(group, Run("dgc", "decay"))
    for step, (passes, kept) in enumerate([(1, True)] * 3 + [(1, False)] * 2 + [(2, False), (1, True), (1, True)]):
        training.optimizer.zero_grad()
        for part in parts_of(training.rank, step, passes):
            training.model(part).backward()
        shares = training.wire.edge._open._shares
        assert len(shares) == 5 and all((share.before is not None) == kept for share in shares.values()), step
        training.optimizer.step()
        assert not shares
    training.wire.detach()


def test_copies_are_made_only_where_a_step_may_have_several_passes(cluster: Cluster) -> None:
    cluster.run(copied, 2)


def logged(group: dist.ProcessGroup, late: bool) -> list[str]:
    training = Training(group, Run("dgc", "decay"))
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("thinwire").addHandler(handler)
    for step in range(5 if late else 0):
        in_passes(training, step, 1)
    for step in range(3 if late else 101):
        training.optimizer.zero_grad()
        training.model(pulls(training.rank, step)).backward()
    logging.getLogger("thinwire").removeHandler(handler)
    training.wire.detach()
    return found


def test_what_cannot_be_taken_back_is_said_once(cluster: Cluster) -> None:
    for late, words in ((True, "stays"), (False, "100 backward passes without optimizer.step()")):
        first, second = cluster.run(logged, 2, late)
        assert len(first) == 1 and words in first[0] and not second


def two_types(group: dist.ProcessGroup, form: dict[str, Any]) -> None:
    """float32 beside bfloat16, whose .grad rounds what a pass adds to it, with plain DDP as well."""
    finals = []
    for method in (None, f"dgc:{EXACT}", f"gtopk:{EXACT}", "dense"):
        torch.manual_seed(3)
        model = DDP(TwoTypes(), process_group=group, **form)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        wire = thinwire.attach(model, optimizer, method) if method is not None else None
        for step in range(5):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            for number in range(2):
                model(noise((8, 6), dist.get_rank(group), step, f"x{number}")).square().mean().backward()
            optimizer.step()
        finals.append(flat(model.module))
        if wire is not None:
            wire.detach()
    for final in finals[1:]:
        close(final, finals[0], str(form), atol=0.03)


@pytest.mark.parametrize("form", [{}, {"static_graph": True, "gradient_as_bucket_view": True}])
def test_two_types(cluster: Cluster, form: dict[str, Any]) -> None:
    cluster.run(two_types, 2, form)
