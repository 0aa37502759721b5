"""The engine without a framework: gradients by name in, the group's mean out, in processes and in threads."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers
from cluster import Cluster
from torch import Tensor
from traffic import sparse_nbytes
from workers import LR, OPTIMIZERS, SHAPES, Dot, Run, digest, flat, noise, own_part, pulls, sentence_of, tensors_of

import thinwire
from thinwire.errors import DetachedError, NonFiniteError
from thinwire.transport import ThreadWorld

STEPS = 8
NUMEL = sum(p.numel() for p in Dot().parameters())
DROPPING = "dropping:density=0.05,values=fp32"

METHODS = [
    ("decay", "dgc:density=0.05"),
    ("groups", "dgc:density=0.05,dense_below=0,values=int8,factor_masking=true"),
    ("heavy", "dgc:density=0.05,clip_norm=3.0,warmup=4"),
    ("plain", "gtopk:density=0.05"),
    ("maximize-nesterov", "gtopk:density=0.05,momentum_correction=true"),
    ("nesterov", "terngrad:dense_below=0"),
    ("nesterov-decay", "blocksign:dense_below=1"),
    ("heavy", "blocksign:dense_below=1,topology=server,residual=bf16"),
    ("plain", "dropping:density=0.05,local=partial,sync_every=3"),
    ("heavy", "signsgd"),
    ("heavy", "dense"),
    ("heavy", "dense:dtype=bf16"),
    ("heavy", "noop"),
    ("adamw", "dropping:density=0.05,local=partial"),
    ("adamw", "terngrad"),
    ("adamw", "blocksign:dense_below=1"),
]
every_method = pytest.mark.parametrize(("optimizer", "spec"), METHODS)

Work = Callable[..., Any]


def in_threads(work: Work, ranks: int, *arguments: Any) -> list[Any]:
    return ThreadWorld(ranks).run(lambda net: work(net, *arguments))


@pytest.fixture(params=["processes", "threads"])
def ranks(request: pytest.FixtureRequest, cluster: Cluster) -> Callable[..., list[Any]]:
    """Calls work(group or net, *arguments) on n ranks and returns their results: ranks(work, n, *arguments)."""
    return cluster.run if request.param == "processes" else in_threads


class Loop:
    """One rank of a training whose loop calls reduce() itself."""

    def __init__(self, group: Any, method: Any, optimizer: str | None = "plain", **options: Any) -> None:
        self.module = Dot()
        self.optimizer = OPTIMIZERS[optimizer](self.module) if optimizer is not None else None
        self.reducer = thinwire.Reducer(self.module.named_parameters(), method, group, self.optimizer, **options)
        self.rank = self.reducer.nets.own.rank

    def step(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """One step of the parameters that these gradients belong to; returns the means."""
        for name, parameter in self.module.named_parameters():
            parameter.grad = gradients.get(name)
        self.reducer.reduce(gradients)
        if self.optimizer is not None:
            self.optimizer.step()
        else:
            with torch.no_grad():
                for name, mean in gradients.items():
                    self.module.get_parameter(name).sub_(mean, alpha=LR)
        return gradients

    def train(self, first: int, last: int) -> Tensor:
        """The parameters after every step."""
        trajectory = []
        for step in range(first, last):
            self.step(pulls(self.rank, step))
            trajectory.append(flat(self.module))
        return torch.stack(trajectory)

    def kept(self, kind: str = "residual") -> dict[str, Tensor]:
        return own_part(self.reducer.state_dict())["aggregator"]["memory"][kind]


def together(vectors: dict[str, Tensor]) -> Tensor:
    return torch.cat([vectors[name].double().reshape(-1) for name in SHAPES])


def mean_pulls(size: int, first: int, last: int) -> Tensor:
    """The mean over the ranks of everything that these steps put in."""
    every = [together(pulls(rank, step)) for rank in range(size) for step in range(first, last)]
    return torch.stack(every).sum(dim=0) / size


# --- the same as under DDP ---------------------------------------------------------------------------


def trained(group: Any, spec: str, optimizer: str, **options: Any) -> dict[str, Any]:
    """What workers.train returns of a run, without DDP."""
    loop = Loop(group, spec, optimizer, **options)
    result: dict[str, Any] = {"trajectory": loop.train(0, STEPS), "stats": loop.reducer.stats}
    result["state"] = digest(*tensors_of(loop.reducer.state_dict()))
    leftover = loop.reducer.detach()
    result["final"] = flat(loop.module)
    rest = [leftover.get(name, torch.zeros_like(p)) for name, p in loop.module.named_parameters()]
    result["leftover"] = torch.cat([tensor.reshape(-1) for tensor in rest])
    return result


def with_and_without_ddp(group: Any, spec: str, optimizer: str, hierarchy: Any) -> tuple[dict[str, Any], ...]:
    (attached,) = workers.train(group, [Run(spec, optimizer, STEPS, hierarchy=hierarchy)])
    return attached, trained(group, spec, optimizer, hierarchy=hierarchy)


def check_same(attached: dict[str, Any], reduced: dict[str, Any]) -> None:
    for what in ("trajectory", "final", "leftover"):
        assert torch.equal(attached[what], reduced[what]), what
    assert attached["state"] == reduced["state"]
    for count in ("steps", "frame_bytes", "dense_bytes", "bytes_sent", "bytes_received", "residual_norm", "density"):
        assert getattr(attached["stats"], count) == getattr(reduced["stats"], count), count


@every_method
def test_reduce_gives_the_bits_of_attach_on_ddp(cluster: Cluster, optimizer: str, spec: str) -> None:
    """One bucket holds the whole model, so that exchanges are the same ones."""
    size = 2 if spec == "dense" else 3  # Gloo adds up three numbers in an order that depends on their places
    for attached, reduced in cluster.run(with_and_without_ddp, size, spec, optimizer, None):
        check_same(attached, reduced)


def test_reduce_gives_the_bits_of_attach_with_a_hierarchy(cluster: Cluster) -> None:
    for optimizer, spec in METHODS[:2]:
        for attached, reduced in cluster.run(with_and_without_ddp, 4, spec, optimizer, 2):
            check_same(attached, reduced)


@every_method
def test_reduce_gives_the_same_bits_in_threads_as_in_processes(cluster: Cluster, optimizer: str, spec: str) -> None:
    size = 2 if spec == "dense" or "sync_every" in spec else 3  # Gloo adds up three numbers in an order of its own
    processes, threads = cluster.run(trained, size, spec, optimizer), in_threads(trained, size, spec, optimizer)
    for process, thread in zip(processes, threads, strict=True):
        assert torch.equal(process["trajectory"], thread["trajectory"]) and process["state"] == thread["state"]
        assert process["stats"].bytes_sent == thread["stats"].bytes_sent
        workers.close(process["leftover"], thread["leftover"])


# --- what comes back ---------------------------------------------------------------------------------


def one_mean(group: Any, spec: str) -> tuple[dict[str, Tensor], float]:
    loop = Loop(group, spec, None)
    return loop.step(pulls(loop.rank, 0)), loop.reducer.stats.residual_norm


EXACT = ["dgc:density=1.0,values=fp32", "gtopk:density=1.0", "dropping:density=1.0,values=fp32", "dense"]


@pytest.mark.parametrize("spec", EXACT)
def test_reduce_with_density_1_is_the_mean(ranks: Work, spec: str) -> None:
    results = ranks(one_mean, 3, spec)
    for means, left in results:
        torch.testing.assert_close(together(means), mean_pulls(3, 0, 1), rtol=1e-5, atol=1e-6)
        assert left == 0 and torch.equal(together(means), together(results[0][0]))


IMAGE, CHANNELS_LAST = (8, 4, 3, 3), torch.channels_last
FORMS: dict[str, tuple[Tensor, Callable[[Tensor], Tensor]]] = {  # a parameter, and another form of its gradient
    "a contiguous gradient of a channels_last image": (noise(IMAGE, 0, 0, "").contiguous(memory_format=CHANNELS_LAST),
                                                       torch.Tensor.contiguous),
    "a channels_last gradient": (noise(IMAGE, 0, 0, ""), lambda g: g.contiguous(memory_format=CHANNELS_LAST)),
    "a contiguous gradient of a transposed matrix": (noise((30, 40), 0, 0, "").t(), torch.Tensor.contiguous),
    "every second column": (noise((40, 30), 0, 0, ""), lambda g: torch.stack([g, g + 7], dim=-1)[..., 0]),
    "bf16": (noise((50, 60), 0, 0, ""), lambda g: g.to(torch.bfloat16)),
    "bf16, channels_last": (noise(IMAGE, 0, 0, ""), lambda g: g.to(torch.bfloat16, memory_format=CHANNELS_LAST)),
    "fp64": (noise((70,), 0, 0, ""), torch.Tensor.double),
    "a gradient of a bf16 parameter": (noise((50, 20), 0, 0, "").bfloat16(), torch.Tensor.float),
    "as the parameter": (noise((20, 20), 0, 0, ""), torch.Tensor.clone),
    "a number": (noise((), 0, 0, ""), torch.Tensor.double),
}  # fmt: skip


def in_other_forms(group: Any, spec: str) -> None:
    """The same numbers as plain float32 gradients and in other forms: the same means, each in its own form."""
    parameters = {name: parameter.clone() for name, (parameter, _) in FORMS.items()}
    straight, turned = (thinwire.Reducer(parameters, spec, group) for _ in range(2))
    for step in range(4):
        given = {
            name: noise(tuple(p.shape), straight.nets.own.rank, step, name).bfloat16().float()
            for name, p in parameters.items()
        }
        plain = {name: torch.empty_like(p, dtype=torch.float32).copy_(given[name]) for name, p in parameters.items()}
        others = {name: form(given[name].clone()) for name, (_, form) in FORMS.items()}
        before = {name: (g.data_ptr(), g.stride(), g.dtype) for name, g in others.items()}
        beside = others["every second column"]._base[..., 1].clone()
        straight.reduce(plain)
        turned.reduce(others)
        for name, gradient in others.items():
            assert (gradient.data_ptr(), gradient.stride(), gradient.dtype) == before[name], name
            assert torch.equal(gradient, plain[name].to(gradient.dtype)), name
        assert torch.equal(others["every second column"]._base[..., 1], beside), "what lies in between stays"
    assert others["a channels_last gradient"].stride() != parameters["a channels_last gradient"].stride()


@pytest.mark.parametrize("spec", ["dgc:density=0.1", "terngrad:dense_below=0", "blocksign:dense_below=1"])
def test_gradients_in_another_order_of_memory_or_type_come_back_in_their_own(ranks: Work, spec: str) -> None:
    ranks(in_other_forms, 2, spec)


def some_of_them(group: Any, spec: str) -> tuple[Tensor, Tensor]:
    """Three steps, the second one of "a" and "c" alone: what was applied and what was left, and what was put in."""
    loop = Loop(group, spec, None)
    applied = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    put_in = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for step, names in enumerate((list(SHAPES), ["c", "a"], list(SHAPES))):
        gradients = {name: pulls(loop.rank, step)[name] for name in names}
        before = loop.kept()
        for name in names:
            put_in[name] += gradients[name]
        for name, mean in loop.step(gradients).items():
            applied[name] += mean
        if step == 1:
            after = loop.kept()
            assert all(torch.equal(before[name], after[name]) for name in SHAPES if name not in names)
            assert not torch.equal(before["c"], after["c"])
    return together(applied) + together(loop.reducer.detach()), together(put_in)


@pytest.mark.parametrize("spec", [DROPPING, "dgc:density=0.05,dense_below=0", "gtopk:density=0.05"])
def test_reduce_of_some_of_the_tensors_leaves_the_others_alone(ranks: Work, spec: str) -> None:
    results = ranks(some_of_them, 3, spec)
    put_in = sum(own for _, own in results) / 3
    for accounted, _ in results:
        torch.testing.assert_close(accounted, put_in, rtol=1e-5, atol=1e-5)


LOSSLESS = [
    DROPPING, "dropping:density=0.05", "dgc:density=0.05,dense_below=0,values=int4", "dgc:density=0.02,residual=bf16",
    "gtopk:density=0.05", "blocksign:dense_below=1", "blocksign:dense_below=1,topology=server",
]  # fmt: skip


@pytest.mark.parametrize("spec", LOSSLESS)
def test_reduce_loses_nothing(ranks: Work, spec: str) -> None:
    """What was applied and what detach() returns are the mean of what all ranks put in."""
    results = ranks(books, 3, spec)
    rounding = 0.05 if "bf16" in spec else 3e-5
    for applied, left in results:
        torch.testing.assert_close(applied + left, mean_pulls(3, 0, STEPS), rtol=1e-5, atol=rounding)
        assert left.abs().max() > 0.1, "nothing was left out: this run shows nothing"
        assert torch.equal(applied, results[0][0]) and torch.equal(left, results[0][1])


def books(group: Any, spec: str) -> tuple[Tensor, Tensor]:
    loop = Loop(group, spec, None)
    applied = sum(together(loop.step(pulls(loop.rank, step))) for step in range(STEPS))
    return applied, together(loop.reducer.detach())


# --- with and without an optimizer -------------------------------------------------------------------


def alone_and_with_sgd(group: Any, name: str) -> tuple[list[Tensor], list[Tensor]]:
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    module = Dot()
    for means, optimizer in zip(found, (None, torch.optim.SGD(module.parameters(), lr=1.0)), strict=True):
        reducer = thinwire.Reducer(module.named_parameters(), name, group, optimizer)
        for step in range(4):
            gradients = pulls(reducer.nets.own.rank, step)
            reducer.reduce(gradients)
            means.append(together(gradients))
        assert reducer.stats.steps == 4
        means.append(together({**pulls(0, 0), **reducer.detach()}))
    return found


@pytest.mark.parametrize("name", [name for name, kind in thinwire.METHODS.items() if kind().outer_rule is None])
def test_reducer_without_an_optimizer_has_a_learning_rate_of_1(ranks: Work, name: str) -> None:
    results = ranks(alone_and_with_sgd, 2, name)
    for alone, with_sgd in results:
        assert all(torch.equal(a, b) for a, b in zip(alone, with_sgd, strict=True))
        assert name == "noop" or all(torch.equal(a, b) for a, b in zip(alone, results[0][0], strict=True))


def test_reducer_takes_momentum_over_and_gives_it_back(ranks: Work) -> None:
    for steps, buffers in ranks(momentum_handed_over, 2):
        assert steps == [3, 3] and buffers


def momentum_handed_over(group: Any) -> tuple[list[int], bool]:
    """Density 1 in the middle of a training: SGD's own trajectory before, with and behind the reducer."""
    loop, reference, found = Loop(group, "dense", "nesterov-decay"), Dot(), []
    sgd = OPTIMIZERS["nesterov-decay"](reference)
    for method in ("dense", workers.EXACT, "dense"):
        loop.reducer.detach()
        loop.reducer = thinwire.Reducer(loop.module.named_parameters(), method, group, loop.optimizer)
        for step in range(3):
            for name, mean in zip(SHAPES, torch.split(mean_pulls(2, step, step + 1).float(), SIZES), strict=True):
                reference.get_parameter(name).grad = mean.view(SHAPES[name])
            sgd.step()
            loop.step(pulls(loop.rank, step))
            workers.close(flat(loop.module), flat(reference), str(method))
        found.append(loop.reducer.stats.steps)
    return found[1:], all("momentum_buffer" in loop.optimizer.state[p] for p in loop.module.parameters())


SIZES = [torch.Size(shape).numel() for shape in SHAPES.values()]


@pytest.mark.parametrize(
    ("optimizer", "spec", "words"),
    [
        (None, "dropping:local=partial", ["every 500 optimizer steps", "give optimizer="]),
        (None, "dropping:local=sum,sync_every=3", ["every 3 optimizer steps", "give optimizer="]),
        ("adamw", "dgc", ["momentum correction needs torch.optim.SGD, the optimizer is AdamW"]),
        ("plain", "dgcc", ["unknown method 'dgcc'", "did you mean 'dgc'"]),
        ("plain", thinwire.DGC, ["is the class DGC", "thinwire.DGC()"]),
        ("plain", 0.01, ["method must be a thinwire method", "not 0.01"]),
        ("plain", None, ["method must be a thinwire method", "not None"]),
        ("plain", "dgc:exclude=head.*", ["'head.*' matches no parameter"]),
    ],
)
def test_reducer_refuses_a_method_that_does_not_fit(
    ranks: Work, optimizer: str | None, spec: Any, words: list[str]
) -> None:
    for sentence in ranks(refusal, 2, spec, optimizer, {}):
        assert all(word in sentence for word in words), sentence


def refusal(group: Any, method: Any, optimizer: str | None, options: dict[str, Any]) -> str:
    return sentence_of(ValueError, lambda: Loop(group, method, optimizer, **options))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"on_nonfinite": "pass"}, ["on_nonfinite", "'pass'"]),
        ({"scaler": 2.0}, ["scaler must be a torch.amp.GradScaler", "float"]),
        ({"guard": "shout"}, ["guard", "'shout'"]),
        ({"guard_every": 0}, ["guard_every", "not 0"]),
        ({"check_replicas_every": -1}, ["check_replicas_every", "not -1"]),
        ({"hierarchy": 3}, ["hierarchy", "3"]),
    ],
)
def test_reducer_refuses_options_that_it_does_not_have(ranks: Work, options: dict[str, Any], words: list[str]) -> None:
    for sentence in ranks(refusal, 2, "dgc", "plain", options):
        assert all(word in sentence for word in words), sentence


def test_reducer_refuses_what_it_would_silently_leave_out() -> None:
    """Threads have no machines, and the parameters' steps are not seen without an optimizer."""
    for sentence in in_threads(refusal, 2, "dgc", "plain", {"hierarchy": 2}):
        assert "hierarchy" in sentence and "process group" in sentence
    for sentence in in_threads(refusal, 2, "dgc", None, {"check_replicas_every": 2}):
        assert "check_replicas_every" in sentence and "give optimizer=" in sentence


def test_reducer_refuses_tensors_and_optimizers_that_it_cannot_use() -> None:
    module = Dot()

    def made(net: Any, tensors: Any, optimizer: Any) -> str:
        return sentence_of(ValueError, lambda: thinwire.Reducer(tensors, "dgc", net, optimizer))

    (said,) = in_threads(made, 1, {"w": torch.zeros(3), "ids": torch.zeros(3, dtype=torch.int64)}, None)
    assert "'ids' is int64" in said
    (said,) = in_threads(made, 1, module.named_parameters(), "sgd")
    assert "torch optimizer, not str" in said
    (said,) = in_threads(made, 1, module.named_parameters(), torch.optim.SGD([module.a], lr=0.1))
    assert "does not own 4 of the model's 5 parameters" in said


def test_reducer_needs_a_process_group() -> None:
    assert not dist.is_initialized()
    said = sentence_of(ValueError, lambda: thinwire.Reducer({"w": torch.zeros(3)}, "dgc"))
    assert "process group" in said and "init_process_group" in said and "torchrun" in said


def unlike(group: Any) -> str:
    method = "dgc" if dist.get_rank(group) else "gtopk"
    return sentence_of(ValueError, lambda: Loop(group, method))


def test_ranks_must_make_equal_reducers(cluster: Cluster) -> None:
    for sentence in cluster.run(unlike, 2):
        assert "method" in sentence and "rank 1" in sentence


# --- gradients that it cannot take -------------------------------------------------------------------

BAD = {
    "unknown name": ({"z": torch.zeros(3)}, ["'z'", "none of the reducer's tensors"]),
    "wrong shape": ({"b": torch.zeros(51)}, ["(51,)", "'b'", "(50,)"]),
    "turned shape": ({"a": torch.zeros(30, 40)}, ["(30, 40)", "'a'", "(40, 30)"]),
    "no tensor": ({"b": None}, ["NoneType", "'b'"]),
    "integers": ({"b": torch.zeros(50, dtype=torch.int64)}, ["'b'", "real numbers"]),
    "complex numbers": ({"b": torch.zeros(50, dtype=torch.complex64)}, ["'b'", "real numbers"]),
    "sparse": ({"b": torch.zeros(50).to_sparse()}, ["'b'", "dense"]),
    "shared memory": ({"b": torch.zeros(1).expand(50)}, ["'b'", "share memory", "clone()"]),
    "nothing": ({}, ["no gradients"]),
}


def refused(net: Any, bad: dict[str, Any]) -> str:
    """Nothing has happened: the next step is that of a reducer that was never asked."""
    loop, other = Loop(net, DROPPING), Loop(net, DROPPING)
    loop.step(pulls(loop.rank, 0))
    other.step(pulls(loop.rank, 0))
    sentence = sentence_of(ValueError, lambda: loop.reducer.reduce({**pulls(loop.rank, 1), **bad} if bad else bad))
    assert torch.equal(loop.train(1, 4), other.train(1, 4)) and loop.reducer.stats.steps == 4
    return sentence


def switch_refused(net: Any, method: Any) -> str:
    loop, other = Loop(net, DROPPING, None), Loop(net, DROPPING, None)
    sentence = sentence_of(ValueError, lambda: loop.reducer.switch(method))
    assert torch.equal(loop.train(0, 2), other.train(0, 2))
    return sentence


def test_switch_refuses_what_a_new_reducer_refuses() -> None:
    for method, words in (
        ("dropping:local=partial,sync_every=3", "give optimizer="),
        (thinwire.DGC, "is the class DGC"),
    ):
        for sentence in in_threads(switch_refused, 2, method):
            assert words in sentence
    for sentence in in_threads(switch_refused, 2, 3):
        assert "not 3" in sentence


@pytest.mark.parametrize("case", BAD)
def test_reduce_refuses_gradients_in_one_sentence_and_goes_on(case: str) -> None:
    bad, words = BAD[case]
    for sentence in in_threads(refused, 2, bad):
        assert all(word in sentence for word in words), sentence


# --- checkpoints -------------------------------------------------------------------------------------


def cut_and_whole(group: Any, spec: str, optimizer: str) -> None:
    """Saved after half of the steps and loaded into new objects: not a bit is another."""
    whole, first = Loop(group, spec, optimizer), Loop(group, spec, optimizer)
    reference = whole.train(0, STEPS)
    first.train(0, STEPS // 2)
    second = Loop(group, spec, optimizer)
    for part in ("module", "optimizer", "reducer"):
        getattr(second, part).load_state_dict(workers.through_a_file(getattr(first, part).state_dict()))
    assert torch.equal(second.train(STEPS // 2, STEPS), reference[STEPS // 2 :])
    assert second.reducer.stats.steps == second.reducer.stats.steps_before == STEPS // 2
    assert digest(*tensors_of(second.reducer.state_dict())) == digest(*tensors_of(whole.reducer.state_dict()))
    left, other = whole.reducer.detach(), second.reducer.detach()
    assert all(torch.equal(left[name], other[name]) for name in left) and left.keys() == other.keys()


@every_method
def test_reducer_resumes_bit_exact(ranks: Work, optimizer: str, spec: str) -> None:
    ranks(cut_and_whole, 2, spec, optimizer)


def saved(group: Any, spec: str) -> tuple[dict[str, Any], Tensor]:
    loop = Loop(group, spec, None)
    loop.train(0, STEPS)
    return workers.through_a_file(loop.reducer.state_dict()), together(loop.reducer.detach())


def loaded(group: Any, spec: str, states: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    """Four more steps with another number of ranks: what they apply, and what is left then."""
    loop = Loop(group, spec, None)
    said = sentence_of(ValueError, lambda: loop.reducer.load_state_dict(states[0]))
    assert f"world_size {len(states)}" in said
    loop.reducer.load_state_dict(states)
    applied = sum(together(loop.step(pulls(loop.rank, step))) for step in range(STEPS, STEPS + 4))
    assert loop.reducer.stats.steps == 4 and loop.reducer.stats.steps_before == STEPS
    return applied, together(loop.reducer.detach())


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 5), (3, 1)])
@pytest.mark.parametrize("spec", [DROPPING, "gtopk:density=0.05", "blocksign:dense_below=1"])
def test_reducer_goes_on_with_another_number_of_ranks(ranks: Work, spec: str, before: int, after: int) -> None:
    """All that the ranks had kept is kept by those that go on."""
    states, kept = zip(*ranks(saved, before, spec), strict=True)
    assert kept[0].abs().max() > 0.1
    for applied, left in ranks(loaded, after, spec, list(states)):
        wanted = kept[0] + mean_pulls(after, STEPS, STEPS + 4)
        torch.testing.assert_close(applied + left, wanted, rtol=1e-5, atol=3e-5)


# --- another method, parameters that drift, the end --------------------------------------------------

SWITCHES = [
    ("heavy", ["dgc:density=0.05", "terngrad:dense_below=0", "dgc:density=0.02,values=fp32"]),
    ("plain", [DROPPING, "gtopk:density=0.05", "dense:dtype=bf16"]),
    ("nesterov-decay", ["blocksign:dense_below=1", "dgc:density=0.05", "signsgd"]),
    ("adamw", ["dropping:density=0.05,local=partial,sync_every=100", "terngrad", "blocksign:dense_below=1"]),
]


def switched(group: Any, optimizer: str, methods: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    first, *others = methods
    events = {3 * place: ("switch", method) for place, method in enumerate(others, 1)}
    (attached,) = workers.train(group, [Run(first, optimizer, 9, events=events)])
    loop = Loop(group, first, optimizer)
    trajectory = [loop.train(0, 3)]
    for place, method in enumerate(others, 1):
        loop.reducer.switch(method)
        trajectory.append(loop.train(3 * place, 3 * place + 3))
    leftover = together({**pulls(0, 0), **loop.reducer.detach()})
    return attached, {"trajectory": torch.cat(trajectory), "leftover": leftover.float(), "final": flat(loop.module)}


@pytest.mark.parametrize(("optimizer", "methods"), SWITCHES)
def test_switch_gives_the_bits_of_a_wires(cluster: Cluster, optimizer: str, methods: list[str]) -> None:
    for attached, reduced in cluster.run(switched, 3, optimizer, methods):
        for what, vector in reduced.items():
            assert torch.equal(attached[what], vector), what


def switched_without_optimizer(group: Any) -> Tensor:
    loop, applied = Loop(group, DROPPING, None), torch.zeros(NUMEL, dtype=torch.float64)
    for place, method in enumerate(["gtopk:density=0.05", "dgc:density=0.04", None]):
        applied += sum(together(loop.step(pulls(loop.rank, step))) for step in range(3 * place, 3 * place + 3))
        if method is not None:
            loop.reducer.switch(method)
    said = sentence_of(ValueError, lambda: loop.reducer.switch("dgcc"))
    assert "did you mean 'dgc'" in said and str(loop.reducer.method) == "dgc:density=0.04"
    return applied + together(loop.reducer.detach())


def test_switch_without_an_optimizer_loses_nothing(ranks: Work) -> None:
    for accounted in ranks(switched_without_optimizer, 3):
        torch.testing.assert_close(accounted, mean_pulls(3, 0, 9), rtol=1e-5, atol=3e-5)


def drifted(group: Any) -> tuple[Tensor, Tensor]:
    loop = Loop(group, "dropping:density=0.05,local=partial,sync_every=100")
    loop.train(0, 3)
    own = flat(loop.module)
    assert loop.reducer.drifted
    with loop.reducer.averaged():
        inside = flat(loop.module)
        assert not loop.reducer.drifted
    assert torch.equal(flat(loop.module), own) and loop.reducer.drifted
    return own, inside


def test_averaged_shows_the_mean_of_parameters_that_drift(ranks: Work) -> None:
    results = ranks(drifted, 3)
    mean = torch.stack([own for own, _ in results]).double().mean(dim=0).float()
    assert not torch.equal(results[0][0], results[1][0])
    for _, inside in results:
        assert torch.equal(inside, results[0][1])
        workers.close(inside, mean)


def never_drifted(group: Any) -> None:
    loop = Loop(group, DROPPING)
    loop.train(0, 3)
    before, sent = flat(loop.module), loop.reducer.stats.bytes_overhead
    with loop.reducer.averaged():
        assert torch.equal(flat(loop.module), before)
    assert loop.reducer.stats.bytes_overhead == sent


def test_averaged_moves_nothing_where_nothing_drifts(ranks: Work) -> None:
    ranks(never_drifted, 2)


def detached(group: Any) -> Tensor:
    loop = Loop(group, DROPPING)
    loop.train(0, STEPS)
    leftover = loop.reducer.detach()
    assert {name: tensor.shape for name, tensor in leftover.items()} == {n: torch.Size(s) for n, s in SHAPES.items()}
    assert not loop.reducer.attached and "detached" in repr(loop.reducer) and loop.reducer.detach() == {}
    for call in (lambda: loop.reducer.reduce(pulls(0, 0)), loop.reducer.state_dict, lambda: loop.reducer.switch("dgc")):
        assert "detached" in sentence_of(DetachedError, call)
    before = flat(loop.module)
    for name, parameter in loop.module.named_parameters():
        parameter.grad = leftover[name]
    loop.optimizer.step()  # nothing of it is the reducer's any more
    workers.close(flat(loop.module), before - LR * together(leftover).float())
    return flat(loop.module)


def test_detach_hands_back_what_was_not_sent(ranks: Work) -> None:
    """With it the parameters are where SGD is."""
    for final in ranks(detached, 3):
        workers.close(final, flat(Dot()) - LR * mean_pulls(3, 0, STEPS).float(), atol=1e-5)


# --- watching ----------------------------------------------------------------------------------------


def counted(group: Any) -> None:
    """What stats say of a run is what the format's formula says of its frames."""
    loop = Loop(group, "dropping:density=0.05,values=fp32,scope=model")
    assert loop.reducer.stats.steps == loop.reducer.stats.frame_bytes == 0 and loop.reducer.stats.ratio is None
    loop.train(0, 5)
    stats, size = loop.reducer.stats, loop.reducer.nets.own.size
    frame = sparse_nbytes("fp32", "rice", NUMEL, round(0.05 * NUMEL), 0)
    assert (stats.steps, stats.steps_before, stats.steps_skipped, stats.world_size) == (5, 0, 0, size)
    assert stats.dense_bytes == 5 * 4 * NUMEL and stats.frame_bytes == 5 * frame
    assert stats.bytes_sent == stats.bytes_received == (size - 1) * 5 * frame and stats.bytes_inside == 0
    assert stats.density == 0.05 and stats.residual_norm == pytest.approx(float(together(loop.kept()).norm()))
    assert stats.seconds_communicating > 0 and stats.seconds_compressing > 0 and stats.seconds_compensating > 0
    assert str(stats).startswith("5 steps: sent") and torch.tensor(loop.reducer.snapshot(False).residual_norm).isnan()
    assert f"rank {loop.rank} of {size}, 5 steps" in repr(loop.reducer)


def test_stats_count_what_was_exchanged(ranks: Work) -> None:
    ranks(counted, 3)


def skipped(group: Any, spec: str, optimizer: str | None) -> None:
    """A step with a nan on one rank is no step at all."""
    loop, other = (Loop(group, spec, optimizer, on_nonfinite="skip") for _ in range(2))
    for one in (loop, other):
        one.train(0, 2)
    state, parameters = digest(*tensors_of(loop.reducer.state_dict())), flat(loop.module)
    bad = pulls(loop.rank, 2)
    if loop.rank == 1:
        bad["b"][7] = float("nan")
    if optimizer is not None:
        loop.step(bad)
    else:
        loop.reducer.reduce(bad)  # it is the caller's to leave this step out
    assert all(bool(gradient.isinf().all()) for gradient in bad.values()), "all ranks see that the step is none"
    assert torch.equal(flat(loop.module), parameters)
    assert digest(*tensors_of(loop.reducer.state_dict())) == state
    assert torch.equal(loop.train(2, 5), other.train(2, 5))
    assert (loop.reducer.stats.steps, loop.reducer.stats.steps_skipped) == (5, 1)


@pytest.mark.parametrize("optimizer", [None, "nesterov-decay", "adamw"])
@pytest.mark.parametrize("spec", ["gtopk:density=0.05", "blocksign:dense_below=1", "dense"])
def test_step_with_a_nonfinite_gradient_is_passed_over_on_request(
    ranks: Work, spec: str, optimizer: str | None
) -> None:
    ranks(skipped, 3, spec, optimizer)


def raised(group: Any) -> str:
    loop = Loop(group, DROPPING)
    loop.train(0, 2)
    bad = pulls(loop.rank, 2)
    if loop.rank == 1:
        bad["b"][7] = float("inf")
    said = []
    for gradients in (bad, pulls(loop.rank, 3)):  # the second time because nothing goes on behind the first
        with pytest.raises(NonFiniteError) as caught:
            loop.reducer.reduce(gradients)
        said.append(str(caught.value))
    assert said[0] == said[1] and "\n" not in said[0]
    assert all(bool(tensor.isfinite().all()) for tensor in loop.reducer.detach().values())
    return said[0]


def test_nonfinite_gradient_ends_all_ranks_with_one_sentence(ranks: Work) -> None:
    sentences = ranks(raised, 3)
    assert "of 'b' on this rank" in sentences[1] and 'on_nonfinite="skip"' in sentences[1]
    assert all("on another rank (rank 1)" in sentences[rank] for rank in (0, 2))


class Scaler:
    def get_scale(self) -> float:
        return 1024.0


def scaled(group: Any) -> None:
    """What enters the memory has no scale, and what comes back has."""
    loop, other = Loop(group, DROPPING, None, scaler=Scaler()), Loop(group, DROPPING, None)
    for step in range(3):
        gradients = {name: 1024 * gradient for name, gradient in pulls(loop.rank, step).items()}
        loop.reducer.reduce(gradients)
        assert torch.equal(together(gradients), 1024 * together(other.step(pulls(loop.rank, step))))
    assert digest(*tensors_of(loop.reducer.state_dict())) == digest(*tensors_of(other.reducer.state_dict()))


def test_scaled_gradients_stay_scaled(ranks: Work) -> None:
    ranks(scaled, 2)


def lost(group: Any, victim: int) -> dict[str, Any]:
    """An error of a rank's own in the middle of step 2: what this rank raises."""
    brief = dist.new_group(list(range(dist.get_world_size())), timeout=timedelta(seconds=6))
    loop = Loop(brief, DROPPING)
    loop.train(0, 2)

    def fails(*_: Any, **__: Any) -> None:
        raise OSError("for this test")

    if loop.rank == victim:
        loop.reducer.exchange = fails  # type: ignore[method-assign]
    with pytest.raises((OSError, thinwire.ExchangeError)) as caught:
        loop.step(pulls(loop.rank, 2))
    with pytest.raises(caught.type):
        loop.step(pulls(loop.rank, 3))  # it cannot go on
    assert loop.reducer.detach() == {}
    return {"type": caught.type.__name__, "sentence": str(caught.value), **vars(caught.value)}


def test_rank_that_fails_is_named_to_the_others(cluster: Cluster) -> None:
    results = cluster.run(lost, 5, 3)
    assert results[3]["type"] == "OSError" and results[3]["sentence"] == "for this test"
    for told in results[:3] + results[4:]:
        assert told["type"] == "ExchangeError" and told["peers"] == (3,) and told["step"] == 2
        assert "rank 3 had failed at step 2 with OSError: for this test" in told["sentence"]


def running_away(group: Any, guard: str, optimizer: str | None) -> tuple[list[str], int, float | None]:
    """Gradients that grow by half at every step from the tenth on."""
    loop = Loop(group, DROPPING, optimizer, guard=guard, guard_every=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(24):
            loop.step({name: g * 1.5 ** max(0, step - 10) for name, g in pulls(loop.rank, step).items()})
    stats = loop.reducer.stats
    assert stats.residual_to_gradient is not None and stats.staleness is not None and stats.compression_error < 1
    return [str(one.message) for one in caught if "thinwire" in str(one.message)], stats.runaways, stats.density


@pytest.mark.parametrize("optimizer", ["plain", None])
def test_guard_warns_once_and_raises_the_density(cluster: Cluster, optimizer: str | None) -> None:
    (first, runaways, density), (second, others, same) = cluster.run(running_away, 2, "warn", optimizer)
    assert len(first) == 1 and "runs away at step" in first[0] and not second, (first, second)
    assert runaways == others >= 1 and density == same == 0.05
    (first, runaways, density), (_, others, same) = cluster.run(running_away, 2, "densify", optimizer)
    assert "the density is raised from 0.05 to 0.2" in first[0]
    assert runaways == others >= 1 and density == same > 0.05


def flipped(group: Any) -> tuple[int, str]:
    loop = Loop(group, DROPPING, check_replicas_every=2)
    for step in range(6):
        if step == 2 and loop.rank == 1:
            with torch.no_grad():
                loop.module.c[3, 4] += 1e-3
        try:
            loop.step(pulls(loop.rank, step))
        except thinwire.ReplicaError as error:
            return step, str(error)
    return -1, ""


def test_replicas_that_differ_are_found_and_named(ranks: Work) -> None:
    for step, sentence in ranks(flipped, 3):
        assert step == 3 and "after optimizer step 4 in 1 of 5 parameters" in sentence
        assert "'c' (rank 1 against ranks 0, 2)" in sentence
