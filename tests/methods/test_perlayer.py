"""A method for each parameter: each does what it does alone, and the optimizer keeps what no method takes."""

from __future__ import annotations

import copy
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster import Cluster
from command import command, run_of
from torch import Tensor
from workers import (
    LR,
    OPTIMIZERS,
    SHAPES,
    Dot,
    Run,
    Training,
    close,
    flat,
    own_part,
    pulls,
    sentence_of,
    tensors_of,
    through_a_file,
    train,
)

import thinwire
from thinwire import DGC, Dense, GradientDropping, PerLayer
from thinwire.advisor.advice import advise_offline
from thinwire.advisor.cost import ExchangeCost, Workload, predict
from thinwire.advisor.link import Link
from thinwire.advisor.microbench import DryNet
from thinwire.transport import ThreadWorld

SMALL = "density=0.05,dense_below=0"
EXACT = "density=1.0,dense_below=0,values=fp32"
ALL = sorted({
    *(name for name, kind in thinwire.METHODS.items() if kind().outer_rule is None),
    f"dgc:{SMALL}", f"dgc:{SMALL},residual=bf16,scope=model", f"gtopk:{SMALL}",
    "terngrad:dense_below=0", "blocksign:dense_below=1", f"dropping:{SMALL},local=partial,sync_every=2",
    "dense:dtype=bf16",
} - {"perlayer"})  # fmt: skip
NOT_SGD = [spec for spec in ALL if not thinwire.parse_method(spec).takes_momentum(False)]
MIXED = f"perlayer:[ab]=dense,*=(dgc:{SMALL})"


# --- as the methods that it is made of ---------------------------------------------------------------


def same_alone_and_in_a_mixture(group: Any, runs: list[Run]) -> None:
    os.environ["THINWIRE_MERGE"] = "none"  # measured times would decide how many frames there are
    try:
        for run in runs:
            alone, other = train(group, [run, replace(run, method=PerLayer({"*": run.method}))])
            for what in ("trajectory", "final", "leftover"):
                assert torch.equal(alone[what], other[what]), f"{run}: {what}"
            assert alone["state"] == other["state"], run
            for count in ("frame_bytes", "bytes_sent", "bytes_overhead", "dense_bytes", "residual_norm", "density"):
                assert getattr(alone["stats"], count) == getattr(other["stats"], count), (run, count)
    finally:
        del os.environ["THINWIRE_MERGE"]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_one_method_for_all_is_that_method_bit_for_bit(cluster: Cluster, size: int) -> None:
    options = {"steps": 4, "ddp": {"bucket_cap_mb": 1e-3}}
    runs = [Run(spec, "nesterov-decay", **options) for spec in ALL]
    runs += [Run(spec, "adamw", **options) for spec in NOT_SGD]
    cluster.run(same_alone_and_in_a_mixture, size, runs)


def test_one_method_for_all_is_that_method_whatever_happens(cluster: Cluster) -> None:
    events = {2: ("reload",), 3: ("switch", "dense"), 4: ("switch", f"dgc:{SMALL}")}
    specs = [f"dgc:{SMALL}", "blocksign:dense_below=1", f"gtopk:{SMALL}", "signsgd", "dense:dtype=bf16"]
    for machines in (None, [[0, 1], [2]], [[0, 1, 2]]):
        cluster.run(
            same_alone_and_in_a_mixture, 3,
            [Run(spec, "groups", 6, events=events, hierarchy=machines) for spec in specs],
        )  # fmt: skip


HALVES = [
    ("dense", f"dgc:{SMALL}"),
    (f"dgc:{SMALL},values=fp32", "dense:dtype=bf16"),
    (f"dgc:{SMALL},momentum_correction=false", f"gtopk:{SMALL},clip_norm=1.0"),
    ("terngrad:dense_below=0", "blocksign:dense_below=1"),
    ("signsgd", f"dropping:{SMALL},local=partial,sync_every=2"),
    (f"dropping:{SMALL},scope=tensor,warmup=4", "noop"),
]


def trained(group: Any, optimizer: str, pairs: list[tuple[str, str]], apart: bool) -> list[tuple[Tensor, Tensor]]:
    """Trajectory and leftover of a model whose parameters a and b have the first method, the others the second one."""
    found = []
    for first, second in pairs:
        module, halves = Dot(), [("a", "b"), ("c", "d", "e")]
        methods: list[Any] = [first, second] if apart else [PerLayer({"[ab]": first, "*": second})]
        parts = halves if apart else [halves[0] + halves[1]]
        optimizers, reducers = [], []
        for names, method in zip(parts, methods, strict=True):
            own = Dot({name: SHAPES[name] for name in names})
            own.load_state_dict({name: module.get_parameter(name) for name in names})
            optimizers.append(OPTIMIZERS[optimizer](own))
            reducers.append(thinwire.Reducer(own.named_parameters(), method, group, optimizers[-1]))
        steps = []
        for step in range(5):
            for reducer, its in zip(reducers, optimizers, strict=True):
                own_pulls = pulls(reducer.nets.own.rank, step)
                for name, parameter in reducer.parameters.items():
                    parameter.grad = own_pulls[name]
                reducer.reduce({name: parameter.grad for name, parameter in reducer.parameters.items()})
                its.step()
            steps += [p.detach().flatten().clone() for reducer in reducers for p in reducer.parameters.values()]
        left = {name: rest for reducer in reducers for name, rest in reducer.detach().items()}
        found.append((torch.cat(steps), torch.cat([left[name].flatten() for name in SHAPES])))
    return found


def same_as_on_the_halves(group: Any, optimizer: str, pairs: list[tuple[str, str]]) -> None:
    together, apart = (trained(group, optimizer, pairs, apart) for apart in (False, True))
    for pair, (steps, left), (others, others_left) in zip(pairs, together, apart, strict=True):
        assert torch.equal(steps, others), pair
        close(left, others_left, str(pair))  # Gloo adds three numbers up in an order that depends on their places


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_mixture_is_each_method_on_its_own_parameters(cluster: Cluster, size: int) -> None:
    cluster.run(same_as_on_the_halves, size, "nesterov-decay", HALVES)
    cluster.run(same_as_on_the_halves, size, "adamw", [pair for pair in HALVES[3:] if "dgc:" not in pair[0]])
    ThreadWorld(size).run(lambda net: same_as_on_the_halves(net, "decay", HALVES))


def test_buckets_decide_nothing(cluster: Cluster) -> None:
    specs = [MIXED, f"perlayer:a=(dgc:{SMALL},values=fp32),*=terngrad", f"perlayer:a=dense,*=(gtopk:{SMALL})"]
    forms: list[dict[str, Any]] = [{}, {"bucket_cap_mb": 1e-5}, {"gradient_as_bucket_view": True}]
    runs = [Run(spec, "decay", 6, ddp=form) for spec in specs for form in forms]
    for results in cluster.run(train, 2, runs):
        for first in range(0, len(results), len(forms)):
            for other in results[first + 1 : first + len(forms)]:
                assert torch.equal(other["trajectory"], results[first]["trajectory"])


# --- momentum and weight decay ------------------------------------------------------------------------

EXACT_MIXTURES = [
    f"perlayer:[ac]=dense,*=(dgc:{EXACT})",
    f"perlayer:a=(gtopk:{EXACT}),b=dense,c=(dgc:{EXACT},direct_decay=false),*=(dropping:{EXACT})",
    f"perlayer:c=(dgc:{EXACT},momentum_correction=false),*=(dgc:{EXACT})",
]


@pytest.mark.parametrize("optimizer", ["heavy", "nesterov-decay", "maximize-nesterov", "groups"])
def test_mixtures_at_density_one_are_plain_sgd(cluster: Cluster, optimizer: str) -> None:
    """Some parameters of a group have their momentum in front of the compression, the others in the optimizer."""
    machines = [[0, 1], [2]]
    runs = [Run(spec, optimizer, 8, onecycle=True) for spec in [None, *EXACT_MIXTURES]]
    runs += [Run(spec, optimizer, 8, onecycle=True, hierarchy=machines) for spec in EXACT_MIXTURES]
    events = {2: ("switch", f"dgc:{EXACT}"), 4: ("switch", EXACT_MIXTURES[0]), 5: ("switch", EXACT_MIXTURES[1]),
              6: [("detach",), ("attach", EXACT_MIXTURES[2])], 7: ("reload",)}  # fmt: skip
    runs.append(Run("dense", optimizer, 8, onecycle=False, events=events))
    runs.append(Run(None, optimizer, 8))
    for plain, *others, switching, steady in cluster.run(train, 3, runs):
        for run, other in zip(runs[1:], others, strict=False):
            close(other["trajectory"], plain["trajectory"], str(run), atol=2e-5)
        close(switching["trajectory"], steady["trajectory"], "switching", atol=2e-5)


class Fails(torch.optim.SGD):
    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise RuntimeError("no step")
        self.momenta = [(group["momentum"], group["weight_decay"], len(group["params"])) for group in self.param_groups]
        return super().step(closure)


def groups_in_a_step(net: Any) -> None:
    """While step() runs groups are split; the user sees them whole, also in a state that is saved after a failure."""
    module = Dot()
    optimizer = Fails(module.parameters(), lr=LR, momentum=0.9, weight_decay=0.01)
    method = PerLayer({"a": DGC(), "b": "signsgd", "*": Dense()})
    reducer = thinwire.Reducer(module.named_parameters(), method, net, optimizer)
    (group,), before = optimizer.param_groups, copy.copy(optimizer.param_groups[0])
    for optimizer.fails in (False, True, False):
        gradients = pulls(net.rank, 0)
        reducer.reduce(gradients)
        for name, parameter in module.named_parameters():
            parameter.grad = gradients[name]
        if optimizer.fails:
            with pytest.raises(RuntimeError, match="no step"):
                optimizer.step()
            (saved,) = optimizer.state_dict()["param_groups"]
            assert (saved["momentum"], saved["weight_decay"], len(saved["params"])) == (0.9, 0.01, 5)
        else:
            optimizer.step()
            assert sorted(optimizer.momenta) == [(0.0, 0.0, 1), (0.0, 0.01, 1), (0.9, 0.01, 3)]
        assert optimizer.param_groups[0] is group and len(optimizer.param_groups) == 1
        assert {key: value for key, value in group.items() if key != "params"} == {
            key: value for key, value in before.items() if key != "params"
        }
        assert all(p is q for p, q in zip(group["params"], before["params"], strict=True))
    assert set(own_part(reducer.state_dict())["aggregator"]["memory"]["velocity"]) == {"a", "b"}
    reducer.detach()
    assert all("momentum_buffer" in optimizer.state[p] for p in module.parameters())


def test_groups_are_split_only_while_step_runs() -> None:
    ThreadWorld(2).run(groups_in_a_step)


# --- what is kept ------------------------------------------------------------------------------------

KEEPING = [
    ("groups", MIXED),
    ("heavy", f"perlayer:a=(blocksign:dense_below=1),c=(dgc:{SMALL},residual=bf16,lr_rescaling=true),*=dense"),
    ("adamw", f"perlayer:a=(blocksign:dense_below=1),c=(dropping:{SMALL}),*=terngrad"),
]


def test_a_resumed_mixture_makes_the_same_bits(cluster: Cluster) -> None:
    runs = [Run(spec, optimizer, 6) for optimizer, spec in KEEPING]
    cut = [Run(spec, optimizer, 6, events={3: ("reload",)}) for optimizer, spec in KEEPING]
    for results in cluster.run(train, 2, runs + cut):
        for run, whole, resumed in zip(runs, results, results[len(runs) :], strict=False):
            assert torch.equal(whole["trajectory"], resumed["trajectory"]), run
            assert whole["state"] == resumed["state"], run


def test_nothing_is_lost_on_the_way_from_one_mixture_to_another(cluster: Cluster) -> None:
    """Constant pulls: the parameters, without what waits at the end, are SGD's own."""
    sparse, other = f"perlayer:[ad]=dense,*=(dgc:{SMALL})", f"perlayer:c=(dgc:{SMALL}),*=(gtopk:{SMALL})"
    ways = [[sparse, "dense"], ["blocksign:dense_below=1", sparse, other], [f"dgc:{SMALL}", sparse, f"gtopk:{SMALL}"]]
    ways += [[f"perlayer:a=(dropping:{SMALL}),*=(dgc:{SMALL})", other]]
    for optimizer, machines in (("heavy", None), ("plain", None), ("heavy", [[0, 1], [2]])):
        runs = [Run(None, optimizer, 20)]
        for first, *then in ways:
            events = {4 * place: ("switch", spec) for place, spec in enumerate(then, 1)}
            runs.append(Run(first, optimizer, 20, events=events, hierarchy=machines))
        for reference, *others in cluster.run(train, 3, runs):
            for run, found in zip(runs[1:], others, strict=True):
                if optimizer == "heavy" and "dropping" in str(run.method):
                    continue  # what waited without momentum gets it later, and needs longer than this training
                close(found["final"] - LR * found["leftover"], reference["final"], str(run), atol=1e-3)


def refused_states(net: Any) -> None:
    module = Dot()
    reducer = thinwire.Reducer(module.named_parameters(), MIXED, net)
    reducer.reduce(pulls(net.rank, 0))
    before = through_a_file(reducer.state_dict())
    for other in ("dgc", f"perlayer:[ab]=dense,*=(dgc:{SMALL},values=fp32)"):
        state = thinwire.Reducer(Dot().named_parameters(), other, net).state_dict()
        text = sentence_of(ValueError, lambda state=state: reducer.load_state_dict(state))
        assert "the state belongs to method" in text
        assert ("values=fp32" in text) == other.startswith("perlayer")
    assert all(map(torch.equal, tensors_of(before), tensors_of(reducer.state_dict())))


def test_a_state_of_another_mixture_is_refused() -> None:
    ThreadWorld(2).run(refused_states)


# --- watched, interrupted ----------------------------------------------------------------------------


def watched(group: Any) -> None:
    training = Training(group, Run(None, "heavy"))
    wire = thinwire.attach(training.model, training.optimizer, MIXED, guard="densify", guard_every=1)
    for step in range(3):
        training.step(step)
    stats = wire.stats
    assert stats.density == 0.05 and 0 < stats.compression_error < 1 and stats.residual_norm > 0
    assert stats.seconds_compressing > 0 and stats.ratio > 1
    wire.detach()


def unused(group: Any) -> None:
    """A bucket whose parameters all have one method, parameters that no rank uses, and ones that some do not use."""
    form = {"find_unused_parameters": True, "bucket_cap_mb": 1e-5}
    trainings = [
        Training(group, Run(spec, "decay", ddp=form)) for spec in (None, f"perlayer:[ab]=dense,*=(dgc:{EXACT})")
    ]
    for step in range(5):
        for training in trainings:
            training.optimizer.zero_grad()
            given = pulls(training.rank, step)
            del given["d" if step % 2 else "e"]
            if training.rank == step % 3:
                del given["a"], given["c"]
            training.model(given).backward()
            training.optimizer.step()
        close(flat(trainings[1].module), flat(trainings[0].module), f"step {step}")
    trainings[1].wire.detach()


def test_mixtures_are_watched_and_may_have_unused_parameters(cluster: Cluster) -> None:
    cluster.run(watched, 2)
    cluster.run(unused, 2)


# --- as a string, in the command, and what is refused --------------------------------------------------


@pytest.mark.parametrize("spec", [
    "perlayer", "perlayer:*=dense", "perlayer:embed*=(dense:dtype=bf16),*=dgc",
    "perlayer:a.?=(dgc:values=fp32,exclude=x+y),[bc]*=(gtopk:density=0.5),*=noop",
])  # fmt: skip
def test_strings_are_read_back(spec: str) -> None:
    method = thinwire.parse_method(spec)
    assert str(method) == spec and thinwire.parse_method(str(method)) == method
    assert thinwire.parse_method(method.in_full) == method and hash(method) == hash(thinwire.parse_method(spec))


def test_objects_strings_and_mappings_say_the_same() -> None:
    method = PerLayer({"embed*": "dense:dtype=bf16", "*": DGC()})
    assert method == thinwire.parse_method(" PerLayer: embed* = dense:dtype=bf16, *=(dgc) ")
    assert method == PerLayer([("embed*", Dense(dtype="bf16")), ("*", "dgc")]) == PerLayer(methods=method.methods)
    assert method != PerLayer({"*": DGC(), "embed*": "dense:dtype=bf16"}), "the first match counts"


@pytest.mark.parametrize(("methods", "words"), [
    ({}, "at least one pattern"),
    ({"*": 3}, "'*' must have a method or its string form, not 3"),
    ({"*": DGC}, "the class DGC; make one of it: DGC()"),
    ({"*": "dcg"}, "did you mean 'dgc'"),
    ({"*": "dgc:densty=0.1"}, "no option 'densty'"),
    ({"*": PerLayer({"*": "dense"})}, "put all patterns into one"),
    ({"*": "perlayer"}, "put all patterns into one"),
    ({"a,b": "dense"}, "without any of , = ( )"),
    ({3: "dense"}, "not 3"),
    ({"": "dense"}, "not ''"),
    ({"a": GradientDropping(local="sum"), "*": "noop"}, "every 500 steps and noop never; give one sync_every"),
], ids=str)  # fmt: skip
def test_what_cannot_be_a_mixture_is_refused_when_it_is_made(methods: Any, words: str) -> None:
    assert words in sentence_of(ValueError, lambda: PerLayer(methods))


@pytest.mark.parametrize(("text", "words"), [
    ("*", "'*' is not of the form pattern=method"),
    ("*=dgc,*=dense", "the pattern '*' is given twice"),
    ("*=dgc:density=0.1,values=fp32", "'values': unknown method 'fp32'"),
    ("*=dgc:density=0.1,values=fp32", "a method's options stand in brackets"),
])  # fmt: skip
def test_strings_that_are_none_are_refused(text: str, words: str) -> None:
    assert words in sentence_of(ValueError, lambda: thinwire.parse_method(f"perlayer:{text}"))


MISTAKES = [
    ({"embed*": "dense", "*": "dgc"}, "perlayer: 'embed*' matches no parameter; there are for example"),
    ({"a": "dense", "[bc]": "dgc"}, "no pattern matches the parameter 'd'; end with '*' for all others"),
    ({"*": "dense", "a": "dgc"}, "all that 'a' matches is matched by '*' before it; put 'a' first"),
    ({"a": DGC(exclude=("c",)), "*": "dense"}, "dgc: exclude pattern 'c' matches no parameter"),
]


def mistakes(group: Any) -> None:
    training = Training(group, Run("dense", "heavy"))
    for step in range(2):
        training.step(step)
    for methods, words in MISTAKES:
        text = sentence_of(ValueError, lambda methods=methods: training.wire.switch(PerLayer(methods)))
        assert words in text
        other = Training(group, Run(None, "heavy"))
        attaching = lambda methods=methods, on=other: thinwire.attach(on.model, on.optimizer, PerLayer(methods))  # noqa: E731
        assert words in sentence_of(ValueError, attaching)
        assert str(training.wire.method) == "dense"
        other.happen("attach", PerLayer({"[a-d]": "dgc", "e": "dense", "*": "dgc"}))  # of all others there may be none
        other.happen("detach")
    adam = Training(group, Run(None, "adamw"))
    text = sentence_of(
        ValueError, lambda: thinwire.attach(adam.model, adam.optimizer, PerLayer({"a": "dense", "*": "dgc"}))
    )
    assert "dgc: momentum correction needs torch.optim.SGD, the optimizer is AdamW; with that take" in text, text
    training.wire.detach()


def test_patterns_that_do_not_fit_the_model_are_told_and_change_nothing(cluster: Cluster) -> None:
    cluster.run(mistakes, 2)


def test_something_else_than_a_mapping_is_told() -> None:
    assert "perlayer takes methods by pattern" in sentence_of(TypeError, lambda: PerLayer("dgc"))


def test_a_prediction_adds_the_methods_up() -> None:
    work, link = Workload.of_size(8_000_000, 0.05), Link(1e-4, 8e-9)
    cost, hosts = ExchangeCost(0.02, 0.0005), 4
    dense, sparse = (predict(thinwire.parse_method(spec), work, link, cost, hosts) for spec in ("dense", "dgc"))
    mixed = predict(PerLayer({"tensor[0-3]": "dense", "*": "dgc"}), work, link, cost, hosts)
    assert predict(PerLayer({"*": "dgc"}), work, link, cost, hosts).nbytes == sparse.nbytes
    assert sparse.nbytes < mixed.nbytes < dense.nbytes


def test_advice_for_other_machines_knows_a_mixture_by_the_names_of_the_model() -> None:
    work = Workload.of_size(200_000, 0.05, tensor=50_000)
    found = advise_offline(work, hosts=4, rate_bits=1e8, methods=["perlayer:tensor0=dense,*=dgc"])
    dense, mixed = (found.step_s(spec) for spec in ("dense", "perlayer:tensor0=dense,*=dgc"))
    assert 0 < mixed < dense
    text = sentence_of(
        ValueError, lambda: advise_offline(work, hosts=4, rate_bits=1e8, methods=["perlayer:fc*=dense,*=dgc"])
    )
    assert "'fc*' matches no parameter" in text


def test_thinwire_advise_says_in_one_line_that_a_pattern_does_not_fit() -> None:
    given = ("--params", "100000", "--compute-ms", "10", "--hosts", "4", "--rate", "1gbit")
    done = command("thinwire", "advise", *given, "--methods", "perlayer:fc*=dense,*=dgc")
    assert done.returncode != 0 and not done.stdout
    assert done.stderr.startswith("thinwire: perlayer: 'fc*' matches no parameter; there are for example tensor0")
    assert "Traceback" not in done.stderr


def test_thinwire_train_takes_a_mixture(tmp_path: Path) -> None:
    spec = "perlayer:0.*=(dense:dtype=bf16),*=(dgc:density=0.05,dense_below=0)"
    folder = tmp_path / "run"
    done = command(
        "thinwire", "train", "--workers", "2", "--epochs", "1", "--in-process", "--method", spec,
        "--compare", spec.replace("0.05", "0.5"), "--out", str(folder),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not done.stderr and re.search(r"perlayer:0\.\*=\(dense:dtype=bf16\)", done.stdout)
    sent = [run_of(folder, one)["bytes_sent"] for one in (spec, spec.replace("0.05", "0.5"))]
    assert 0 < sent[0] < sent[1]


def test_members_are_asked_for_their_own_optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mixture's each for itself; another method that has members for all of them."""
    asked: list[tuple[str, bool]] = []
    of_gtopk, of_dense = thinwire.GTopK.aggregator, thinwire.Dense.aggregator
    monkeypatch.setattr(
        thinwire.GTopK, "aggregator", lambda self, net, sgd: asked.append(("gtopk", sgd)) or of_gtopk(self, net, sgd)
    )
    monkeypatch.setattr(
        thinwire.Dense, "aggregator", lambda self, net, sgd: asked.append(("dense", sgd)) or of_dense(self, net, sgd)
    )
    names = ["a.weight", "b.weight", "b.bias"]
    mixed = thinwire.PerLayer({"a*": "gtopk", "*": "dense"})
    for sgd, expected in ((names, [True, True]), (["a.weight"], [True, False]), (["b.bias"], [False, False])):
        asked.clear()
        mixed.assembled(DryNet(1), mixed.of_sgd(names, sgd))
        assert asked == [("gtopk", expected[0]), ("dense", expected[1])], sgd

    class Around(thinwire.Method):
        inner = thinwire.GTopK()
        members = (inner,)

        def member_of(self, name: str) -> thinwire.Method:
            return self.inner

        def aggregator(self, net: Any, optimizer_is_sgd: bool) -> Any:
            return optimizer_is_sgd

    around = Around()
    assert around.assembled(DryNet(1), around.of_sgd(names, names)) is True
    assert around.assembled(DryNet(1), around.of_sgd(names, names[1:])) is False
