"""Local steps: every rank trains alone, and the ranks exchange how far they went."""

from __future__ import annotations

import itertools
import logging
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from bowls import (
    INNER,
    NUMEL,
    OPTIMIZERS,
    SPARSE,
    SPLIT,
    Bowl,
    Loop,
    Watched,
    begin,
    everybody,
    flat,
    gradient,
    is_equal,
    plain_sgd,
    residual,
)
from cluster import Cluster
from command import command, run_of
from heard import Heard
from oracles import local_steps as oracle
from rateless import Rateless
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from workers import digest, sentence_of

import thinwire
from thinwire.errors import NonFiniteError

# ------------------------------------------------------------------------------------------- what is computed


def int8(a: np.ndarray) -> np.ndarray:
    """The largest quarter, in steps of a 127th of the largest of all (they are fewer than a chunk)."""
    v = oracle.largest(0.25)(a)
    scale = np.abs(v).max() / 127
    return np.round(v / scale) * scale if scale else v


def of_each(a: np.ndarray) -> np.ndarray:
    """The largest quarter of each tensor, which here are shorter than a chunk."""
    return np.concatenate([oracle.largest(0.25)(part) for part in (a[:SPLIT], a[SPLIT:])])


CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("sgd", "local:every=3", {"every": 3}),
    ("adamw", f"local:every=2,method={SPARSE}", {"every": 2, "code": oracle.largest(0.25)}),
    ("two", f"local:every=3,method={SPARSE},error_decay=0.9", {"every": 3, "code": oracle.largest(0.25), "beta": 0.9}),
    ("heavy", "local:every=2,method=(dropping:density=0.25)", {"every": 2, "code": int8}),
    ("heavy", "sparseloco:every=2,density=0.25,values=fp32", {"every": 2, "code": of_each, "beta": 0.95}),
    ("adamw", "diloco:every=3", {"every": 3, "outer_lr": 0.7, "mu": 0.9}),
    (
        "sgd",
        f"local:every=2,method={SPARSE},outer_lr=0.5,outer_momentum=0.8,nesterov=false",
        {"every": 2, "code": oracle.largest(0.25), "outer_lr": 0.5, "mu": 0.8, "nesterov": False},
    ),
    ("sgd", "local:every=1,method=(gtopk:density=1.0),outer_lr=0.5", {"every": 1, "outer_lr": 0.5}),
    ("adamw", "local:every=3,start=2", {"every": lambda n: 1 if n < 2 else 3}),
]
STEPS = 7


def follow(group: Any) -> None:
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    for optimizer, method, terms in CASES:
        loop = Loop(group, optimizer, method)
        found = loop.train(0, STEPS)
        said = oracle.local_steps(begin(), gradient, INNER[optimizer], ranks=n, steps=STEPS, **terms)
        for step, mine in enumerate(found):
            expected = torch.from_numpy(said["x"][step][rank]).float()
            torch.testing.assert_close(mine, expected, rtol=2e-5, atol=1e-5, msg=f"{method} {optimizer} step {step}")
            if said["ends"][step]:
                assert len(set(everybody(group, digest(mine)))) == 1, (method, step)
        stats = loop.wire.stats
        assert stats.steps == STEPS and stats.rounds == sum(said["ends"])
        assert stats.dense_bytes == 4 * NUMEL * STEPS
        loop.wire.detach()
        assert is_equal(group, loop.bowl), method


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_ranks_follow_the_oracle(cluster: Cluster, n: int) -> None:
    """With SGD, AdamW, both at once; dense, sparse and in 8 bits; with every outer step."""
    cluster.run(follow, n)


def growing(group: Any) -> None:
    """Every step first, then 2, then more as the learning rate falls; a resumed run goes on in the same rounds."""
    rates = [0.4, 0.4, 0.4, 0.4, 0.4, 0.2, 0.2, 0.2, 0.2, 0.2, 0.1, 0.1, 0.1]
    lengths = [1, 1, 1, 2, 2, 4, 4, 4, 4, 4, 16, 16, 16]  # of a round that would end behind this step

    def run(loop: Loop, first: int, last: int) -> list[int]:
        rounds = []
        for step in range(first, last):
            loop.optimizers[0].param_groups[0]["lr"] = rates[step]
            loop.step(step)
            rounds.append(loop.wire.stats.rounds or 0)
        return rounds

    loop = Loop(group, "sgd", "local:every=2,start=1 epoch,qsr=0.4", steps_per_epoch=3)
    assert "start=3," in str(loop.wire.method)
    found = run(loop, 0, 7)
    kept, weights = loop.wire.state_dict(), loop.bowl.state_dict()
    other = Loop(group, "sgd", "local:every=2,start=3,qsr=0.4")
    other.bowl.load_state_dict(weights)
    other.wire.load_state_dict(kept)
    rest = run(loop, 7, len(rates))
    assert run(other, 7, len(rates)) == rest and torch.equal(flat(loop.bowl), flat(other.bowl))
    expected, in_round, rounds = [], 0, 0
    for length in lengths:
        in_round += 1
        if in_round >= length:
            in_round, rounds = 0, rounds + 1
        expected.append(rounds)
    assert found + rest == expected and expected[-1] == 5
    loop.optimizers[0].param_groups[0]["lr"] = 0.0  # nothing moves, so nobody needs to meet
    loop.step(13)
    assert loop.wire.stats.rounds == 5
    for one in (loop, other):
        one.wire.detach()


def test_rounds_grow_while_the_learning_rate_falls(cluster: Cluster) -> None:
    cluster.run(growing, 2)


def too_far(group: Any) -> None:
    """Rounds of 8 steps become shorter while ranks go too far, and longer again; a resumed run goes on alike."""
    heard, logger = Heard(), logging.getLogger("thinwire")
    logger.addHandler(heard)
    loop = Loop(group, "sgd", "local:every=8,most_apart=0.05")
    lengths, last, resumed = [], 0, None
    for step in range(40):
        loop.optimizers[0].param_groups[0]["lr"] = 0.2 if step < 20 else 1e-4
        loop.step(step)
        if resumed is not None:
            resumed.optimizers[0].param_groups[0]["lr"] = 0.2 if step < 20 else 1e-4
            resumed.step(step)
            assert torch.equal(flat(loop.bowl), flat(resumed.bowl))
        if loop.wire.stats.rounds != len(lengths):
            lengths.append(step + 1 - last)
            last = step + 1
        if step == 13:
            resumed = Loop(group, "sgd", "local:every=8,most_apart=0.05")
            resumed.bowl.load_state_dict(loop.bowl.state_dict())
            resumed.wire.load_state_dict(loop.wire.state_dict())
    logger.removeHandler(heard)
    assert len(set(everybody(group, tuple(lengths)))) == 1
    assert lengths[0] == 8 and min(lengths) < 8, lengths
    shortest = lengths.index(min(lengths))
    assert all(two in (one, one // 2) for one, two in itertools.pairwise(lengths[: shortest + 1])), lengths
    assert lengths[-1] > min(lengths) and lengths[shortest:] == sorted(lengths[shortest:]), lengths
    said = {line for line in heard.sentences if "most_apart is 0.05" in line}  # both loops say the same
    assert len(said) == (sum(two < one for one, two in itertools.pairwise(lengths)) if loop.rank == 0 else 0)
    for one in (loop, resumed):
        assert one is not None
        one.wire.detach()


def test_rounds_become_shorter_while_ranks_go_too_far(cluster: Cluster) -> None:
    cluster.run(too_far, 2)


def no_rates(group: Any) -> None:
    bowl = Bowl()
    optimizer = Rateless(bowl.parameters(), 0.1)
    wire = thinwire.attach(bowl, optimizer, "local:every=4,most_apart=0.001", group=group)

    def rounds_after(first: int, last: int) -> int | None:
        for step in range(first, last):
            optimizer.zero_grad()
            bowl(dist.get_rank(group), step).backward()
            optimizer.step()
        return wire.stats.rounds

    assert rounds_after(0, 4) == 1
    assert rounds_after(4, 6) == 2, "ranks went too far, so a round is half as long"
    wire.switch("local:every=4")
    assert rounds_after(6, 9) == 2 and rounds_after(9, 10) == 3, "as long as the new rule says"
    wire.detach()


def test_rounds_need_no_learning_rate_and_are_as_long_as_the_new_rule_says(cluster: Cluster) -> None:
    cluster.run(no_rates, 2)


def equalities(group: Any) -> None:
    # One step per round, plain SGD and nothing compressed: DDP.
    loop, bowl = Loop(group, "sgd", "local:every=1"), Bowl()
    plain, its = DDP(bowl, process_group=group), plain_sgd(bowl)
    for step in range(4):
        loop.step(step)
        its.zero_grad()
        plain(loop.rank, step).backward()
        its.step()
        torch.testing.assert_close(flat(loop.bowl), flat(bowl), rtol=1e-5, atol=1e-6)
    loop.wire.detach()
    # Density 1 in fp32 leaves no error, whatever becomes of it: the mean of the parameters.
    runs = {}
    for method in ("local:every=2", "local:every=2,method=(dropping:density=1.0,values=fp32),error_decay=0.5"):
        loop = Loop(group, "adamw", method)
        runs[method] = torch.stack(loop.train(0, 6))
        loop.wire.detach()
    torch.testing.assert_close(*runs.values(), rtol=1e-5, atol=1e-6)
    # In DDP, whose gradients stay where they are: the same bits as with the bare module.
    for method in (f"local:every=3,method={SPARSE}", "sparseloco:every=2,density=0.2"):
        alone, wrapped = Loop(group, "heavy", method), Loop(group, "heavy", method, ddp=True)
        for one, other in zip(alone.train(0, 6), wrapped.train(0, 6), strict=True):
            assert torch.equal(one, other)
        assert len(set(everybody(group, digest(wrapped.bowl.w.grad)))) == 3, "a rank's own gradient"
        alone.wire.detach()
        wrapped.wire.detach()


def test_special_cases_are_ddp_the_mean_and_the_bare_module(cluster: Cluster) -> None:
    cluster.run(equalities, 3)


def outer_step(group: Any) -> None:
    loop = Loop(group, "adamw", f"local:every=2,method={SPARSE},outer_lr=0.7,outer_momentum=0.9")
    watched, theta = Watched(loop.wire), nn.Parameter(flat(loop.bowl))
    outer = torch.optim.SGD([theta], lr=0.7, momentum=0.9, nesterov=True)
    for round_ in range(4):
        loop.train(2 * round_, 2 * round_ + 2)
        theta.grad = watched.means[-1]
        outer.step()
        assert torch.equal(flat(loop.bowl), theta.detach()), round_
    # Nothing is lost: what was sent and what waits is what was put in.
    put_in = torch.stack(everybody(group, torch.stack(watched.given).double().sum(0))).sum(0)
    waits = torch.stack(everybody(group, residual(loop.wire).double())).sum(0)
    sent = torch.stack(watched.means).double().sum(0) * 3
    torch.testing.assert_close(sent + waits, put_in, rtol=1e-5, atol=1e-5)
    assert waits.abs().max() > 0.01
    rest = torch.cat([one.reshape(-1) for one in loop.wire.detach().values()])
    torch.testing.assert_close(rest.double(), waits / 3, rtol=1e-5, atol=1e-6)


def test_the_outer_step_is_sgds_and_nothing_is_lost(cluster: Cluster) -> None:
    cluster.run(outer_step, 3)


def longer(group: Any) -> None:
    loop, bowl = Loop(group, "adamw", "local:every=100"), Bowl()
    its, net = OPTIMIZERS["adamw"](bowl), loop.wire.reducer.nets.own
    moved = net.traffic.sent, net.traffic.overhead
    for step in range(5):
        loop.step(step)
        its.zero_grad()
        bowl(loop.rank, step).backward()
        its.step()
        assert torch.equal(flat(loop.bowl), flat(bowl))
    assert (net.traffic.sent, net.traffic.overhead) == moved, "nothing travels between rounds"
    assert loop.wire.stats.rounds == 0 and loop.wire.stats.bytes_sent == 0
    mean = torch.stack(everybody(group, flat(bowl))).mean(0)
    before = flat(loop.bowl)
    with loop.wire.averaged():
        torch.testing.assert_close(flat(loop.bowl), mean, rtol=1e-6, atol=1e-6)
        assert is_equal(group, loop.bowl)
        text = sentence_of(ValueError, lambda: loop.step(5))
        assert "inside averaged()" in text
    assert torch.equal(flat(loop.bowl), before)
    loop.wire.detach()
    torch.testing.assert_close(flat(loop.bowl), mean, rtol=1e-5, atol=1e-6)
    assert is_equal(group, loop.bowl)


def test_a_round_longer_than_the_run_is_training_alone_until_detach(cluster: Cluster) -> None:
    cluster.run(longer, 3)


def steps_of_all_kinds(group: Any) -> None:
    # Two backward passes are one step; a step of several optimizers is over when the last has made it, or when the next
    # pass begins.
    loop = Loop(group, "two", "local:every=2", check_replicas_every=1)
    for step in range(3):
        for optimizer in loop.optimizers:
            optimizer.zero_grad()
        loop.model(loop.rank, step).backward()
        loop.model(loop.rank, step + 10).backward()
        loop.optimizers[0].step()
        assert loop.wire.stats.steps == step
        loop.optimizers[1].step()
        assert loop.wire.stats.steps == step + 1 and is_equal(group, loop.bowl) == (step == 1)
    loop.model(loop.rank, 3).backward()
    loop.optimizers[1].step()
    assert loop.wire.stats.steps == 3
    loop.model(loop.rank, 4)
    assert loop.wire.stats.steps == 4 and loop.wire.stats.rounds == 2 and is_equal(group, loop.bowl)
    with loop.wire.averaged():  # nothing to show
        assert not loop.wire.reducer.shows_mean
    loop.wire.detach()


def test_a_step_is_what_all_optimizers_make_of_one_or_several_passes(cluster: Cluster) -> None:
    cluster.run(steps_of_all_kinds, 2)


def scaled(group: Any) -> None:
    """Rank 0's gradients overflow once, so it is a step behind."""
    loop, scaler = Loop(group, "heavy", "local:every=3"), torch.amp.GradScaler("cpu", init_scale=4.0)
    (optimizer,) = loop.optimizers
    for step in range(8):
        optimizer.zero_grad()
        loss = loop.model(loop.rank, step)
        if step == 1 and loop.rank == 0:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    stats = loop.wire.stats
    assert (stats.steps, stats.rounds) == ((7, 2) if loop.rank == 0 else (8, 2))
    with loop.wire.averaged():
        assert is_equal(group, loop.bowl)
    if loop.rank:  # the others reach their third round one step before rank 0, which wants to end
        loop.step(8)
    loop.wire.detach()
    assert is_equal(group, loop.bowl)


def test_steps_that_a_scaler_passes_over_do_not_count_and_ranks_wait(cluster: Cluster) -> None:
    cluster.run(scaled, 3)


def batch_norm(group: Any) -> None:
    rank = dist.get_rank(group)
    torch.manual_seed(rank)  # replicas are made equal
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    model = DDP(net, process_group=group)
    wire = thinwire.attach(model, torch.optim.SGD(net.parameters(), lr=0.1), "local:every=3")
    assert not model.broadcast_buffers
    norm, alone = net[1], nn.BatchNorm1d(6)
    optimizer = wire.edge._view.optimizers[0]  # type: ignore[attr-defined]
    for step in range(3):
        inputs = torch.randn(8, 4) + rank
        with torch.no_grad():
            alone(net[0](inputs))  # what this rank's own statistics become
        model(inputs).square().mean().backward()
        if step < 2:
            assert torch.equal(norm.running_var, alone.running_var)
        optimizer.step()
    means = torch.stack(everybody(group, alone.running_mean))
    variances = torch.stack(everybody(group, alone.running_var))
    torch.testing.assert_close(norm.running_mean, means.mean(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(norm.running_var, variances.mean(0) + means.var(0, unbiased=False), rtol=1e-5, atol=1e-6)
    assert len(set(everybody(group, digest(norm.running_mean, norm.running_var)))) == 1
    assert int(norm.num_batches_tracked) == 3
    model(torch.randn(8, 4) + rank).sum().backward()
    optimizer.step()
    before = norm.running_mean.clone()
    with wire.averaged():
        assert len(set(everybody(group, digest(norm.running_mean, norm.running_var)))) == 1
    assert torch.equal(norm.running_mean, before)
    wire.detach()
    assert model.broadcast_buffers
    assert len(set(everybody(group, digest(norm.running_mean, norm.running_var, flat(net))))) == 1


def test_running_statistics_are_those_of_all_ranks_inputs(cluster: Cluster) -> None:
    cluster.run(batch_norm, 3)


def half(group: Any) -> None:
    """Parameters of two bytes and of eight beside a hierarchy of machines."""
    for dtype in (torch.bfloat16, torch.float64):
        bowl = Bowl().to(dtype)
        optimizer = torch.optim.SGD(bowl.parameters(), lr=0.1)
        machines = [[0, 1], [2, 3]]
        method = thinwire.LocalSteps(every=2, method="dropping:density=0.5,residual=bf16", outer_momentum=0.5)
        wire = thinwire.attach(bowl, optimizer, method, group=group, hierarchy=machines)
        start = bowl(dist.get_rank(group), 0).item()
        for step in range(6):
            optimizer.zero_grad()
            bowl(dist.get_rank(group), step).backward()
            optimizer.step()
        assert len(set(everybody(group, bowl.w.detach().float().sum().item()))) == 1
        assert bowl(dist.get_rank(group), 0).item() < start and wire.stats.bytes_inside > 0
        wire.detach()


def test_other_types_and_a_hierarchy(cluster: Cluster) -> None:
    cluster.run(half, 4)


# ------------------------------------------------------------------------------------------- changes and mistakes


def switched(group: Any) -> None:
    loop = Loop(group, "adamw", f"local:every=4,method={SPARSE}")
    watched = Watched(loop.wire)
    loop.train(0, 6)
    text = sentence_of(ValueError, lambda: loop.wire.switch("dgc:momentum_correction=false"))
    assert "exchanges gradients, and here they stay on their ranks; call wire.detach()" in text
    assert loop.wire.reducer.rounds is not None and loop.wire.reducer.rounds.in_round == 2
    loop.wire.switch("local:every=2,method=(dgc:momentum_correction=false,density=0.5,dense_below=0,values=fp32)")
    assert is_equal(group, loop.bowl) and loop.wire.stats.rounds == 2
    loop.train(6, 8)
    assert loop.wire.stats.rounds == 3 and is_equal(group, loop.bowl)
    put_in = torch.stack(everybody(group, torch.stack(watched.given).double().sum(0))).sum(0)
    sent = torch.stack(watched.means).double().sum(0) * 2
    rest = torch.cat([one.reshape(-1) for one in loop.wire.detach().values()]) * 2
    torch.testing.assert_close(sent + rest, put_in, rtol=1e-5, atol=1e-5)
    # And with methods of single steps, the one behind the other.
    model = DDP(loop.bowl, process_group=group)
    wire = thinwire.attach(model, loop.optimizers[0], "terngrad")
    text = sentence_of(ValueError, lambda: wire.switch("local"))
    assert "lets ranks take optimizer steps alone, and here every gradient is exchanged" in text
    wire.detach()
    wire = thinwire.attach(model, loop.optimizers[0], "local:every=2")
    wire.detach()
    wire = thinwire.attach(model, loop.optimizers[0], "dense")
    wire.detach()


def test_another_rule_follows_and_nothing_is_lost(cluster: Cluster) -> None:
    cluster.run(switched, 2)


def not_finite(group: Any) -> None:
    for method in ("local:every=2", f"local:every=2,method={SPARSE}"):
        loop = Loop(group, "sgd", method)
        loop.train(0, 3)
        theta = loop.wire.edge._outer.theta["w"].clone()  # type: ignore[attr-defined]
        if loop.rank == 1:
            loop.bowl.w.data[0, 0] = float("nan")
        text = sentence_of(NonFiniteError, partial(loop.step, 3))
        assert text.startswith("the parameters of rank 1 hold an inf, a nan or a number beyond 1.8e19 after optimizer")
        assert torch.equal(theta, loop.wire.edge._outer.theta["w"])  # type: ignore[attr-defined]
        loop.wire.detach()
        assert torch.equal(loop.bowl.w, theta) and is_equal(group, loop.bowl)
    loop = Loop(group, "sgd", "local:every=2", on_nonfinite="skip")
    loop.train(0, 3)
    if loop.rank == 1:
        loop.bowl.v.data[:] = float("inf")
    loop.step(3)
    assert loop.wire.stats.steps_skipped == 1 and loop.wire.stats.rounds == 1 and is_equal(group, loop.bowl)
    loop.train(4, 6)
    assert loop.wire.stats.rounds == 2 and is_equal(group, loop.bowl) and flat(loop.bowl).isfinite().all()
    loop.wire.detach()


def test_parameters_that_are_not_finite_stop_all_ranks_or_take_them_back(cluster: Cluster) -> None:
    cluster.run(not_finite, 2)


def lied_to(group: Any) -> None:
    """A frame that says nothing known is refused."""
    for row in ([9.0, 1, 1, 1, 0], [float("nan"), 1, 1, 1, 0], [0, 1.5, 1, 1, 0], [0, -1, 1, 1, 0]):
        loop = Loop(group, "sgd", "local:every=1")
        net = loop.wire.reducer.nets.own
        frame = torch.tensor(row, dtype=torch.float64).view(torch.uint8)
        net.all_gather = lambda mine, frame=frame: [frame]  # type: ignore[method-assign]
        text = sentence_of(thinwire.FrameError, partial(loop.step, 0))
        assert text.startswith("bad frame from rank 0: it does not say what the rank wants")
        loop.wire.abandon()


def test_a_frame_that_says_nothing_known_is_refused(cluster: Cluster) -> None:
    cluster.run(lied_to, 1)


def mistakes(group: Any) -> None:
    bowl = Bowl()
    before, its = flat(bowl), plain_sgd(bowl)

    def refused(words: str, model: Any = bowl, optimizer: Any = its, method: Any = "local", **options: Any) -> None:
        options |= {} if isinstance(model, DDP) else {"group": group}
        text = sentence_of(ValueError, lambda: thinwire.attach(model, optimizer, method, **options))
        assert words in text and "\n" not in text, text

    rank = dist.get_rank(group)
    refused("attach needs a torch optimizer, not NoneType", optimizer=None)
    refused("the optimizer does not own 1 of the model's 2 parameters", optimizer=torch.optim.SGD([bowl.w], lr=0.1))
    refused("guard watches the gradients that are exchanged", guard="warn")
    refused('on_nonfinite must be "raise" or "skip"', on_nonfinite="stop")
    refused("ranks differ in method", method=f"local:every={2 + rank}")
    refused("ranks differ in the optimizer's options", optimizer=torch.optim.SGD(bowl.parameters(), lr=0.1 + rank))
    refused("group= is for bare modules with local steps", method="dgc")
    refused("find_unused_parameters=True makes DDP send", DDP(bowl, process_group=group, find_unused_parameters=True))
    text = sentence_of(ValueError, lambda: thinwire.attach(bowl, its, "dense"))
    assert "not Bowl; wrap it: DDP(model), or take local steps: thinwire.LocalSteps()" in text
    text = sentence_of(ValueError, lambda: thinwire.Reducer(bowl.named_parameters(), "sparseloco", group, its))
    assert "give it to thinwire.attach with a bare module or a DistributedDataParallel model" in text
    assert torch.equal(flat(bowl), before) and not its._optimizer_step_post_hooks

    wire = thinwire.attach(bowl, its, "local", group=group)
    refused("this model is attached already")
    text = sentence_of(ValueError, (lambda: wire.switch("local:every=2")) if rank else wire.detach)
    assert "ranks do different things, detach() on rank 0 and switch() on rank 1; call the same on all ranks" in text
    wire.detach()


def test_mistakes_are_one_sentence_on_all_ranks_and_change_nothing(cluster: Cluster) -> None:
    cluster.run(mistakes, 2)


def test_thinwire_train_takes_local_steps(tmp_path: Path) -> None:
    spec = "local:every=5,method=(dropping:density=0.1)"
    given = ("thinwire", "train", "--recipe", "digits", "--workers", "2", "--epochs", "2", "--method", spec)
    done = command(*given, "--out", str(tmp_path / "run"), timeout=300)
    assert done.returncode == 0, done.stderr
    found = run_of(tmp_path / "run", spec)
    assert found["ratio"] > 50 and found["metric"] > 60 and found["steps"] % 5
    done = command(*given, "--in-process", "--out", str(tmp_path / "threads"), timeout=300)
    assert done.returncode == 0, done.stderr
    threads = run_of(tmp_path / "threads", spec)
    assert [threads[name] for name in ("metric", "ratio", "steps")] == [
        found[name] for name in ("metric", "ratio", "steps")
    ]


def warned(group: Any) -> None:
    loop = Loop(group, "sgd", "local:every=3")
    lines: list[str] = []
    loop.wire.log_every(2, lines.append)
    loop.train(0, 4)
    if loop.rank == 0:
        assert [line.partition(":")[0] for line in lines] == ["step 2", "step 4"]
        assert "nothing sent" in lines[0] and "instead of" in lines[1]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        loop.bowl.eval()
        with torch.no_grad():
            loop.model(loop.rank, 9)
    assert any("evaluate" in str(one.message) for one in told)
    stats = loop.wire.stats
    assert stats.round_distance is not None and 0 < stats.round_distance < 2
    loop.wire.detach()
    loop.bowl.train()
    loop.step(5)  # the module is a plain one again


def test_what_a_loop_is_told(cluster: Cluster) -> None:
    cluster.run(warned, 2)
