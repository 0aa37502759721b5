"""Several optimizers that own a model together, and optimizers in wrappers: plain DDP at density 1, and what counts."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cluster import Cluster
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from workers import close, digest, flat, sentence_of, tensors_of, through_a_file

import thinwire

EXACT = "density=1.0,dense_below=0,values=fp32"
SPARSE = "density=0.1,dense_below=0"
SPLIT = f"perlayer:fc.*=(dgc:{EXACT}),*=dense"
Loop = Callable[["Pair", int], None]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.fc = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh()), nn.Linear(9, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.body(x))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.02, nesterov=True)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def fc_and_body(net: Net) -> list[torch.optim.Optimizer]:
    return [sgd(net.fc.parameters()), adamw(net.body.parameters())]


def two_of_sgd(net: Net) -> list[torch.optim.Optimizer]:
    return [sgd(net.fc.parameters()), torch.optim.SGD(net.body.parameters(), lr=0.02, momentum=0.5)]


def muon_and_adamw(net: Net) -> list[torch.optim.Optimizer]:
    matrices = [p for p in net.parameters() if p.ndim == 2]
    return [torch.optim.Muon(matrices, lr=0.01), adamw([p for p in net.parameters() if p.ndim != 2])]


class Pair:
    """One rank's training with several optimizers."""

    def __init__(
        self, group: dist.ProcessGroup, make: Callable[[Net], list[Any]], method: Any = None, **options: Any
    ) -> None:
        torch.manual_seed(1)
        self.group, self.make, self.options = group, make, options
        self.rank, self.net = dist.get_rank(group), Net()
        self.optimizers = make(self.net)
        self.model = DDP(self.net, process_group=group)
        self.wire: Any = None
        if method is not None:
            self.wire = thinwire.attach(self.model, self.optimizers, method, **options)

    def loss(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * seed + self.rank)
        x = torch.randn(8, 6, generator=generator)
        return nn.functional.cross_entropy(self.model(x), torch.randint(0, 5, (8,), generator=generator))

    def zero(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def end(self) -> Tensor:
        if self.wire is not None:
            self.wire.detach()
        return flat(self.net)


def together(pair: Pair, step: int) -> None:
    pair.zero()
    pair.loss(step).backward()
    for optimizer in pair.optimizers:
        optimizer.step()


def in_turns(pair: Pair, step: int) -> None:
    """A backward pass before each optimizer's step, as generative networks that share a model do."""
    for place, optimizer in enumerate(pair.optimizers):
        pair.zero()
        pair.loss(10 * step + place).backward()
        optimizer.step()


def accumulating_in_turns(pair: Pair, step: int) -> None:
    """Each clears its own gradients alone, so the other's add up."""
    for place, optimizer in enumerate(pair.optimizers):
        optimizer.zero_grad()
        pair.loss(10 * step + place).backward()
        optimizer.step()


def one_rarely(pair: Pair, step: int) -> None:
    pair.zero()
    pair.loss(step).backward()
    pair.optimizers[0].step()
    if step % 3 == 2:
        pair.optimizers[1].step()


def closures(pair: Pair, step: int) -> None:
    for place, optimizer in enumerate(pair.optimizers):

        def closure(place: int = place) -> Tensor:
            pair.zero()
            loss = pair.loss(10 * step + place)
            loss.backward()
            return loss

        optimizer.step(closure)


LOOPS: list[Loop] = [together, in_turns, accumulating_in_turns, one_rarely, closures]


def as_plain(group: dist.ProcessGroup, make: Any, methods: list[str], loop: Loop, steps: int = 8) -> None:
    finals = []
    for method in (None, *methods):
        pair = Pair(group, make, method)
        for step in range(steps):
            loop(pair, step)
        finals.append(pair.end())
    for method, other in zip(methods, finals[1:], strict=True):
        close(other, finals[0], f"{method}, {loop.__name__}")


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_two_optimizers_follow_plain_ddp_at_density_one(cluster: Cluster, ranks: int, loop: Loop) -> None:
    """Momentum of SGD is taken over for its own parameters, AdamW's stays."""
    methods = [SPLIT, "dense", f"dgc:{EXACT},momentum_correction=false", f"gtopk:{EXACT},warmup=3"]
    cluster.run(as_plain, ranks, fc_and_body, methods[: 4 if ranks == 2 else 2], loop)


@pytest.mark.parametrize("loop", [together, in_turns])
def test_two_of_sgd_follow_plain_ddp_with_the_momentum_of_each(cluster: Cluster, loop: Loop) -> None:
    cluster.run(as_plain, 2, two_of_sgd, [f"dgc:{EXACT}", SPLIT, f"gtopk:{EXACT}"], loop)


def test_muon_beside_adamw_follows_plain_ddp(cluster: Cluster) -> None:
    cluster.run(as_plain, 2, muon_and_adamw, [f"dropping:{EXACT}", "dense"], together)


# ------------------------------------------------------------------------------------------------------ what counts


def counted(group: dist.ProcessGroup, loop: Loop, per_iteration: float) -> None:
    lines: list[str] = []
    options = {"check_replicas_every": 1}
    pair = Pair(group, fc_and_body, f"dgc:{SPARSE},momentum_correction=false,warmup=8", **options)
    pair.wire.log_every(2, lines.append)
    for step in range(6):
        loop(pair, step)
    state = pair.wire.state_dict()
    assert state["optimizer_steps"] == 6 * per_iteration == pair.wire.stats.steps == state["step"]
    assert len(lines) == (3 * per_iteration if pair.rank == 0 else 0), lines
    assert [line.partition(":")[0] for line in lines] == [f"step {2 * n + 2}" for n in range(len(lines))]
    pair.end()


@pytest.mark.parametrize(("loop", "steps"), [(together, 1), (in_turns, 2), (closures, 2), (one_rarely, 1)])
def test_steps_between_two_backward_passes_are_one(cluster: Cluster, loop: Loop, steps: int) -> None:
    cluster.run(counted, 2, loop, steps)


def averaging(group: dist.ProcessGroup, loop: Loop, make: Any) -> None:
    """At every averaging the ranks are equal; between two they are not, and nothing is left out."""
    pair = Pair(group, make, f"dropping:{SPARSE},local=partial,sync_every=4", check_replicas_every=1)
    equal = []
    for step in range(12):
        loop(pair, step)
        bits: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(bits, digest(flat(pair.net)), group=group)
        due = pair.wire.state_dict()["optimizer_steps"] % 4 == 0
        assert (len(set(bits)) == 1) == due != pair.wire.reducer.drifted, (step, due)
        equal.append(due)
    assert sum(equal) >= 2
    with pair.wire.averaged():
        bits = [None] * dist.get_world_size(group)
        dist.all_gather_object(bits, digest(flat(pair.net)), group=group)
        assert len(set(bits)) == 1
    pair.wire.switch("dense")
    loop(pair, 99)
    pair.end()


@pytest.mark.parametrize("loop", [together, in_turns, one_rarely])
def test_ranks_with_local_gradients_are_equal_behind_every_averaging(cluster: Cluster, loop: Loop) -> None:
    cluster.run(averaging, 3, loop, fc_and_body)


def skipping(group: dist.ProcessGroup, scaled: bool) -> None:
    """A step with an infinity changes nothing of either optimizer, and does not count."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1000) if scaled else None
    options: dict[str, Any] = {"scaler": scaler} if scaled else {"on_nonfinite": "skip"}
    pair, plain = Pair(group, fc_and_body, SPLIT, **options), Pair(group, fc_and_body)
    good = 0
    for step in range(8):
        bad = step in (2, 5)
        pair.zero()
        loss = pair.loss(step) * (float("inf") if bad and pair.rank == 1 else 1.0)
        before = flat(pair.net)
        (scaler.scale(loss) if scaler is not None else loss).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # to unscale one optimizer's gradients is not to clip them
            for optimizer in pair.optimizers:
                if scaler is not None:
                    scaler.unscale_(optimizer)
                    parameters = [parameter for one in optimizer.param_groups for parameter in one["params"]]
                    nn.utils.clip_grad_norm_(parameters, float("inf"))  # to know the norm
                    scaler.step(optimizer)
                else:
                    optimizer.step()
        if scaler is not None:
            scaler.update()
        assert torch.equal(flat(pair.net), before) == bad, step
        if not bad:
            together(plain, step)
            good += 1
        state = pair.wire.state_dict()
        assert state["step"] == state["optimizer_steps"] == good
    assert pair.wire.stats.steps_skipped == 2
    close(pair.end(), plain.end(), "scaled" if scaled else "skipped")


@pytest.mark.parametrize("scaled", [False, True])
def test_a_step_that_is_passed_over_is_so_for_every_optimizer(cluster: Cluster, scaled: bool) -> None:
    cluster.run(skipping, 2, scaled)


def traceless(group: dist.ProcessGroup, method: str) -> None:
    """Beside two reducers, each of which sees the gradients of its own optimizer's passes alone."""
    pair, other = Pair(group, two_of_sgd, method), Pair(group, two_of_sgd)
    parts = [other.net.fc, other.net.body]
    reducers = [
        thinwire.Reducer(part.named_parameters(), method, group, optimizer)
        for part, optimizer in zip(parts, other.optimizers, strict=True)
    ]
    other.model = other.net  # type: ignore[assignment]  # without DDP
    for step in range(8):
        in_turns(pair, step)
        for place, (part, reducer) in enumerate(zip(parts, reducers, strict=True)):
            other.zero()
            other.loss(10 * step + place).backward()
            reducer.reduce({name: parameter.grad for name, parameter in part.named_parameters()})
            other.optimizers[place].step()
        close(flat(pair.net), flat(other.net), f"{method}, step {step}")
    for kind in ("residual", "velocity"):
        kept = pair.wire.reducer.running.kept(kind)
        before = pair.wire.reducer.unused()  # of body the last pass counts, of fc the one before
        assert {name.partition(".")[0] for name in before} <= {"fc"}
        for name, vector in reducers[1].running.kept(kind).items():
            close(kept[f"body.{name}"], vector, f"{method}, {kind} of {name}")
    rest, alone = pair.wire.detach(), [reducer.detach() for reducer in reducers]
    for prefix, own in (("fc", alone[0]), ("body", alone[1])):
        for name, vector in own.items():
            close(rest[f"{prefix}.{name}"], vector, f"{method}, left of {prefix}.{name}")


@pytest.mark.parametrize("method", [
    "dropping:density=0.1,scope=tensor,values=fp32", "dgc:density=0.1,dense_below=0,scope=tensor,values=fp32",
    "dgc:density=0.1,dense_below=0,scope=tensor,values=fp32,direct_decay=false,factor_masking=true",
])  # fmt: skip
def test_gradients_of_the_other_optimizers_pass_leave_no_trace(cluster: Cluster, method: str) -> None:
    cluster.run(traceless, 2, method)


def unknown_scaler(group: dist.ProcessGroup) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    pair = Pair(group, fc_and_body, SPLIT)
    pair.optimizers[0].step()
    scaler.scale(pair.loss(0)).backward()
    before = flat(pair.net)
    assert "GradScaler that thinwire does not know" in sentence_of(ValueError, lambda: scaler.step(pair.optimizers[1]))
    assert torch.equal(flat(pair.net), before)
    pair.wire.abandon()


def test_a_scaler_that_attach_does_not_know_is_refused_at_every_optimizer(cluster: Cluster) -> None:
    cluster.run(unknown_scaler, 2)


def quiet(group: dist.ProcessGroup, loop: Loop) -> None:
    """None of the warnings about loops is for these."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pair = Pair(group, two_of_sgd, f"dgc:{SPARSE},clip_norm=1.0")
        for step in range(8):
            loop(pair, step)
        other = torch.optim.SGD(pair.net.parameters(), lr=0.0)
        pair.loss(9).backward()
        try:
            other.step()
        except RuntimeWarning as warning:
            assert "another optimizer steps" in str(warning)
        else:
            assert pair.rank != 0
    pair.end()


@pytest.mark.parametrize("loop", [together, in_turns])
def test_another_optimizer_is_told_and_the_attached_ones_are_not(cluster: Cluster, loop: Loop) -> None:
    cluster.run(quiet, 2, loop)


def automatic(group: dist.ProcessGroup, loop: Loop) -> str:
    pair = Pair(group, fc_and_body, "auto")
    for step in range(10):
        loop(pair, step)
    chosen = str(pair.wire.method)
    assert sentence_of(ValueError, lambda: pair.wire.switch("dgc"))
    pair.end()
    return chosen


@pytest.mark.parametrize("loop", [together, in_turns])
def test_auto_watches_several_optimizers(cluster: Cluster, loop: Loop) -> None:
    first, second = cluster.run(automatic, 2, loop)
    assert first == second


# -------------------------------------------------------------------------------------- checkpoints, switch, detach


def resumed(group: dist.ProcessGroup, make: Any, method: str, loop: Loop) -> None:
    straight, parted = Pair(group, make, method), Pair(group, make, method)
    for step in range(9):
        loop(straight, step)
    for step in range(5):
        loop(parted, step)
    saved = through_a_file(
        {
            "model": parted.net.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in parted.optimizers],
            "wire": parted.wire.state_dict(),
        }
    )
    parted.wire.detach()
    fresh = Pair(group, make)
    for optimizer, state in zip(fresh.optimizers, saved["optimizers"], strict=True):
        optimizer.load_state_dict(state)
    fresh.net.load_state_dict(saved["model"])
    fresh.wire = thinwire.attach(fresh.model, fresh.optimizers, method)
    fresh.wire.load_state_dict(saved["wire"])
    for step in range(5, 9):
        loop(fresh, step)
    assert torch.equal(flat(fresh.net), flat(straight.net)), f"{method}, {loop.__name__}"
    states = [digest(*tensors_of(one.wire.state_dict())) for one in (fresh, straight)]
    assert states[0] == states[1], f"{method}, {loop.__name__}"
    for one in (fresh, straight):
        one.end()


RESUMED = [
    (fc_and_body, "perlayer:fc.*=(dgc:density=0.1,dense_below=0),*=(dropping:density=0.1)"),
    (fc_and_body, f"dropping:{SPARSE},local=partial,sync_every=4"),
    (two_of_sgd, "dgc:density=0.1,dense_below=0,warmup=6"),
]


@pytest.mark.parametrize("loop", [together, in_turns, one_rarely])
@pytest.mark.parametrize(("make", "method"), RESUMED)
def test_two_optimizers_resume_bit_exact(cluster: Cluster, make: Any, method: str, loop: Loop) -> None:
    cluster.run(resumed, 2, make, method, loop)


def switched(group: dist.ProcessGroup) -> None:
    """Momentum goes to the method and back to the optimizer that it is of: the trajectory is plain DDP's."""
    plain, pair = Pair(group, fc_and_body), Pair(group, fc_and_body, "dense")
    methods = {3: SPLIT, 6: f"dgc:{EXACT},momentum_correction=false", 8: f"perlayer:fc.weight=(dgc:{EXACT}),*=dense"}
    for step in range(12):
        if step in methods:
            pair.wire.switch(methods[step])
            taken = {3: 2, 6: 0, 8: 1}[step]
            buffers = ["momentum_buffer" in state for state in pair.optimizers[0].state.values()]
            assert buffers.count(False) == taken, (step, buffers)
        together(plain, step)
        together(pair, step)
    pair.wire.detach()
    assert all("momentum_buffer" in state for state in pair.optimizers[0].state.values())
    close(flat(pair.net), flat(plain.net))
    for one, other in zip(pair.optimizers[0].state.values(), plain.optimizers[0].state.values(), strict=True):
        close(one["momentum_buffer"], other["momentum_buffer"])
    said = sentence_of(ValueError, lambda: thinwire.attach(pair.model, pair.optimizers, "dgc"))
    assert "'body.0.weight' is AdamW" in said and "thinwire.PerLayer" in said


def test_momentum_goes_to_the_method_and_back_to_the_optimizer_that_it_is_of(cluster: Cluster) -> None:
    cluster.run(switched, 2)


def mean_alone(group: dist.ProcessGroup) -> None:
    """A Reducer in a loop of its own."""
    pair, plain = Pair(group, fc_and_body), Pair(group, fc_and_body)
    net = copy.deepcopy(pair.net)
    optimizers = fc_and_body(net)
    reducer = thinwire.Reducer(net.named_parameters(), SPLIT, group, optimizers)
    for step in range(6):
        together(plain, step)
        pair.model = net  # without DDP
        for parameter in net.parameters():
            parameter.grad = None
        pair.loss(step).backward()
        reducer.reduce({name: p.grad for name, p in net.named_parameters()})
        for optimizer in optimizers:
            optimizer.step()
        assert reducer.progress.optimizer_steps == step + 1
    reducer.detach()
    close(flat(net), plain.end())


def test_a_reducer_takes_several_optimizers(cluster: Cluster) -> None:
    cluster.run(mean_alone, 2)


# ---------------------------------------------------------------------------------------------------------- refused


def refused(group: dist.ProcessGroup) -> None:
    net = Net()
    model = DDP(net, process_group=group)
    whole, part = sgd(net.parameters()), adamw(net.body.parameters())
    cases: list[tuple[Any, str]] = [
        ([whole, part], "parameter 'body.0.weight' is in two of the optimizers, SGD and AdamW; leave it to one"),
        ([part], "the optimizer does not own 2 of the model's 6 parameters, the first is 'fc.weight'"),
        ([part, sgd([net.fc.bias])], "the 2 optimizers do not own 1 of the model's 6 parameters"),
        ([whole, whole], "has one of them twice"),
        ([], "the list of optimizers is empty"),
        ([whole, None], "must be a torch optimizer, not a list with a NoneType; give"),
        ({"a": whole}, "must be a torch optimizer, not dict; give"),
        ("sgd", "must be a torch optimizer, not str; give"),
    ]
    for optimizers, expected in cases:
        said = sentence_of(ValueError, lambda optimizers=optimizers: thinwire.attach(model, optimizers, "dense"))
        assert expected in said, said
    zero = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, process_group=group, lr=0.01)
    said = sentence_of(ValueError, lambda: thinwire.attach(model, zero, "dropping:local=partial"))
    assert "take a method without local gradients" in said
    one_bad = [whole, part] if dist.get_rank(group) == 0 else whole  # all ranks refuse together
    assert "is in two of the optimizers" in sentence_of(ValueError, lambda: thinwire.attach(model, one_bad, "dense"))
    thinwire.attach(model, whole, "dgc").detach()  # nothing was changed


def test_lists_of_optimizers_that_do_not_fit_are_refused_in_one_sentence(cluster: Cluster) -> None:
    cluster.run(refused, 2)


# ---------------------------------------------------------------------------------------------------------- wrapped


class Delegating(torch.optim.Optimizer):
    """As Accelerate's: an optimizer by its class, which never ran Optimizer's constructor."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)
    defaults = property(lambda self: self.optimizer.defaults)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


class Holding:
    """As others': no optimizer by its class."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


def delegating(net: Net) -> list[Any]:
    return [Delegating(sgd(net.parameters()))]


def held_twice(net: Net) -> list[Any]:
    return [Holding(Delegating(sgd(net.fc.parameters()))), Holding(adamw(net.body.parameters()))]


@pytest.mark.parametrize(("make", "method"), [(delegating, f"dgc:{EXACT}"), (held_twice, SPLIT)])
def test_a_wrapper_that_holds_an_optimizer_is_seen_through(cluster: Cluster, make: Any, method: str) -> None:
    cluster.run(as_plain, 2, make, [method, "dense"], together)


def sharded(group: dist.ProcessGroup) -> None:
    def zero(net: Net) -> list[Any]:
        return [ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, process_group=group, lr=0.01)]

    as_plain(group, zero, [f"dropping:{EXACT}", "dense", f"dgc:{EXACT},momentum_correction=false"], together)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        pair = Pair(group, zero, f"dropping:{SPARSE}", check_replicas_every=1)
        for step in range(5):
            together(pair, step)
        assert pair.wire.state_dict()["optimizer_steps"] == 5
    pair.wire.switch("terngrad:dense_below=0")
    together(pair, 6)
    said = sentence_of(ValueError, lambda: pair.wire.switch("dgc"))
    assert "needs torch.optim.SGD, the optimizer is ZeroRedundancyOptimizer" in said
    pair.end()


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_zero_redundancy_optimizer_follows_plain_ddp(cluster: Cluster, ranks: int) -> None:
    cluster.run(sharded, ranks)


def free_of_schedules(group: dist.ProcessGroup, kind: str) -> None:
    import schedulefree

    def make(net: Net) -> list[Any]:
        return [getattr(schedulefree, kind)(net.parameters(), lr=0.05, weight_decay=0.01, warmup_steps=2)]

    @contextmanager
    def evaluated(pair: Pair) -> Iterator[Tensor]:
        pair.optimizers[0].eval()
        yield flat(pair.net)
        pair.optimizers[0].train()

    rows = []
    for method in (None, f"dropping:{EXACT}", "dense"):
        pair = Pair(group, make)
        pair.optimizers[0].train()
        if method is not None:
            pair.wire = thinwire.attach(pair.model, pair.optimizers[0], method, check_replicas_every=1)
        seen = []
        for step in range(8):
            together(pair, step)
            if step % 3 == 2:
                with evaluated(pair) as weights:
                    seen.append(weights)
        seen.append(pair.end())
        rows.append(torch.stack(seen))
    for other in rows[1:]:
        close(other, rows[0], kind)
    pair = Pair(group, make)
    pair.optimizers[0].train()
    pair.wire = thinwire.attach(pair.model, pair.optimizers, f"dropping:{SPARSE},local=partial,sync_every=3")
    for step in range(6):
        together(pair, step)
    with evaluated(pair) as weights:  # both sets of weights were averaged
        bits: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(bits, digest(weights), group=group)
        assert len(set(bits)) == 1
    pair.end()


@pytest.mark.parametrize("kind", ["AdamWScheduleFree", "SGDScheduleFree"])
def test_a_schedule_free_optimizer_follows_plain_ddp(cluster: Cluster, kind: str) -> None:
    pytest.importorskip("schedulefree", reason="schedulefree is not installed, so its optimizers cannot be tried")
    cluster.run(free_of_schedules, 2, kind)
