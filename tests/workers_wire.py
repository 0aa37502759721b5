"""The life of a wire, run by the processes of the cluster: each function asserts on every rank."""

from __future__ import annotations

import copy
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from workers import DGC, SHAPES, Run, Training, close, digest, flat, noise, own_part, sentence_of, tensors_of

import thinwire


def wrong_states(group: dist.ProcessGroup) -> None:
    rank = dist.get_rank(group)
    training = Training(group, Run(thinwire.BlockSign(dense_below=1), "heavy"))
    for step in range(3):
        training.step(step)
    wire = training.wire
    good = wire.state_dict()

    def changed(**changes: Any) -> dict[str, Any]:
        return {**copy.deepcopy(good), **changes}

    def without(key: str) -> dict[str, Any]:
        return {k: v for k, v in good.items() if k != key}

    def inside(room: str, kind: str, **vectors: Any) -> dict[str, Any]:
        state = copy.deepcopy(good)
        own_part(state)["aggregator"][room][kind].update(vectors)
        return state

    def parted(key: str, *value: Any) -> dict[str, Any]:
        state = copy.deepcopy(good)
        part = own_part(state)
        del part[key]
        if value:
            part[key] = value[0]
        return state

    other = Training(group, Run(thinwire.DGC(density=0.02, values="fp32", factor_masking=True), "heavy"))
    other.step(0)
    neighbour = [None] * dist.get_world_size(group)
    dist.all_gather_object(neighbour, good, group=group)
    served = next((name for name, _ in own_part(good)["aggregator"]["collective"]["residual"].items()), "a")
    cases = {
        "method": other.wire.state_dict(),
        "rank": neighbour[(rank + 1) % len(neighbour)],
        "world_size": changed(world_size=7),
        "format": changed(format=99),
        "state_dict": {},
        "'step'": without("step"),
        "'pending'": parted("pending"),
        "'aggregator'": parted("aggregator"),
        "'nowhere'": inside("memory", "residual", nowhere=torch.zeros(3)),
        "'a'": inside("memory", "velocity", a=torch.zeros(3)),
        "'b'": parted("pending", (("b", torch.zeros(3)),)),
        f"'{served}'": inside("collective", "residual", **{served: torch.zeros(99_999)}),
    }
    gone = copy.deepcopy(good)
    del own_part(gone)["aggregator"]["collective"]
    cases["'collective'"] = gone
    cases["state"] = None
    for word, state in cases.items():
        text = sentence_of(ValueError, lambda state=state: wire.load_state_dict(state))
        assert word.strip("'") in text, (word, text)
        assert digest(*tensors_of(wire.state_dict())) == digest(*tensors_of(good)), f"{word}: something was loaded"
        assert wire.state_dict()["step"] == 3
    wire.load_state_dict(good)
    training.step(3)
    assert wire.stats.steps == 4
    # A hierarchy keeps residuals elsewhere: its state is not a flat wire's.
    flat_state = other.wire.state_dict()
    grouped = Training(
        group, Run(thinwire.DGC(density=0.02, values="fp32", factor_masking=True), "heavy", hierarchy=[[0], [1, 2]])
    )
    assert "hierarchy" in sentence_of(ValueError, lambda: grouped.wire.load_state_dict(flat_state))
    for wire in (training.wire, other.wire, grouped.wire):
        wire.detach()


def counted_bytes(group: dist.ProcessGroup) -> None:
    """Model a: 1200, b: 50, c: 4200, d: 15, e: 1 elements; one bucket, or one a parameter."""
    from thinwire.codecs import FloatsCodec, LevelsCodec, SignsCodec, SparseCodec, TernaryCodec

    N, rank, steps = dist.get_world_size(group), dist.get_rank(group), 3
    last = N - 1
    numels = {name: noise(shape, 0, 0, "").numel() for name, shape in SHAPES.items()}
    whole = sum(numels.values())

    def served(r: int) -> list[int]:
        """Elements of each tensor that rank r serves: small ones whole by turns, c cut into slices."""
        parts = [numels[name] if place % N == r else 0 for place, name in enumerate(SHAPES)]
        parts[2] = 4200 * (r + 1) // N - 4200 * r // N
        return [part for part in parts if part]

    def sharded(up: Callable[[list[int]], int], down: Callable[[list[int]], int]) -> int:
        pushed = sum(up(served(r)) for r in range(N) if r != rank)
        return pushed + max(down(served(r)) for r in range(N))

    def k(density: float, *sizes: int) -> int:
        return sum(max(1, round(density * size)) for size in sizes)

    signs, ternary, levels, floats = SignsCodec(), TernaryCodec(), LevelsCodec(), FloatsCodec()
    share = -(-whole // N)
    dgc = SparseCodec("int8", "delta16").nbytes(5400, k(0.01, 1200, 4200), 66)
    paper: dict[str, Any] = {"scope": "tensor", "values": "fp32", "factor_masking": True}
    expected: dict[Any, int] = {
        thinwire.DGC(density=0.01, **paper): SparseCodec().nbytes(5400, k(0.01, 1200, 4200), 66),
        thinwire.DGC(density=0.01, scope="tensor", indices="delta16"): dgc,
        thinwire.DGC(density=0.01, dense_below=0, **paper): SparseCodec().nbytes(whole, k(0.01, *numels.values()), 0),
        thinwire.GradientDropping(density=0.01): SparseCodec("int8").nbytes(whole, 55, 0),
        thinwire.BlockSign(dense_below=0): sharded(
            lambda parts: signs.nbytes(sum(parts), len(parts), 0), lambda parts: signs.nbytes(sum(parts), len(parts), 0)
        ),
        thinwire.SignSGD(): sharded(lambda parts: signs.nbytes(sum(parts), 0, 0), lambda p: signs.nbytes(sum(p), 0, 0)),
        thinwire.TernGrad(dense_below=0): 4 * 5
        + sharded(lambda parts: ternary.nbytes(sum(parts), 0, 0), lambda p: levels.nbytes(sum(p), N, 0)),
        thinwire.TernGrad(share_scaler=False, dense_below=0): sharded(
            lambda parts: ternary.nbytes(sum(parts), len(parts), 0), lambda p: floats.nbytes(sum(p), 0)
        ),
        thinwire.Dense(): 4 * whole,
        thinwire.Dense(dtype="bf16"): 2 * share * last + 2 * share,
        thinwire.Noop(): 0,
    }
    frame = SparseCodec().nbytes(whole, 55, 0)
    if N == 2:
        expected[thinwire.GTopK(density=0.01)] = frame
    else:  # rank 2 goes through rank 0, which also sends back one bit an entry; ranks 0 and 1 swap
        expected[thinwire.GTopK(density=0.01)] = [frame + frame + signs.nbytes(55, 0, 0), frame, frame][rank]
    for method, nbytes in expected.items():
        training = Training(group, Run(method, "tiny"))
        for step in range(steps):
            training.step(step)
        stats = training.wire.stats
        assert stats.frame_bytes == steps * nbytes, f"{method}: {stats.frame_bytes / steps} bytes a step, not {nbytes}"
        assert stats.dense_bytes == steps * 4 * whole and stats.steps == steps and stats.world_size == N
        assert stats.ratio == (stats.dense_bytes / stats.frame_bytes if nbytes else None)
        totals = torch.tensor([stats.bytes_sent, stats.bytes_received])
        dist.all_reduce(totals, group=group)
        assert totals[0] == totals[1], f"{method}: what is sent is received by somebody"
        training.wire.detach()


def readable_stats(group: dist.ProcessGroup) -> None:
    training = Training(group, Run(thinwire.DGC(density=0.02, values="fp32", factor_masking=True), "heavy"))
    empty = training.wire.stats
    assert empty.ratio is None and empty.steps == 0 and empty.residual_norm == 0 and "0 steps" in str(empty)
    for step in range(4):
        training.step(step)
    first = training.wire.stats
    text = str(first)
    for word in (
        "4 steps",
        "kB",
        ", ratio ",
        "link ratio ",
        "density 0.02",
        "s compressing",
        "s communicating",
        "residual norm",
    ):
        assert word in text, text
    assert first.ratio > 10 and first.link_ratio > 1 and first.residual_norm > 1
    for seconds in (first.seconds_compensating, first.seconds_compressing, first.seconds_communicating):
        assert 0 < seconds < 60
    training.wire.switch(thinwire.BlockSign(dense_below=1))
    training.step(4)
    second = training.wire.stats
    assert second.steps == 5 and second.frame_bytes > first.frame_bytes
    assert second.seconds_compressing >= first.seconds_compressing
    assert second.seconds_compensating >= first.seconds_compensating
    training.wire.detach()
    after = training.wire.stats
    assert (after.steps, after.dense_bytes) == (second.steps, second.dense_bytes)


def leaves(group: dist.ProcessGroup) -> None:
    N = dist.get_world_size(group)
    training = Training(
        group, Run(thinwire.DGC(density=0.02, dense_below=0, values="fp32", factor_masking=True), "heavy")
    )
    for step in range(3):
        training.step(step)
    saved = own_part(training.wire.state_dict())["aggregator"]["memory"]
    everybody = [None] * N
    dist.all_gather_object(everybody, saved, group=group)
    rest = training.wire.detach()
    for name, parameter in training.module.named_parameters():
        velocity = sum(memory["velocity"][name] for memory in everybody) / N
        residual = sum(memory["residual"][name] for memory in everybody) / N
        close(training.optimizer.state[parameter]["momentum_buffer"], velocity.view_as(parameter), name)
        close(rest[name], residual.view_as(parameter), name)
        assert rest[name].shape == parameter.shape
    assert training.wire.detach() == {}


def evaluate(training: Training) -> None:
    training.model.eval()
    with torch.no_grad():
        training.loss(0)
    training.model.train()


def averages_for_a_block(group: dist.ProcessGroup) -> None:
    training = Training(group, Run(thinwire.GradientDropping(density=0.1, local="partial", sync_every=500), "adam"))
    for step in range(3):
        training.step(step)
    wire, own = training.wire, flat(training.module)
    everybody = [torch.zeros_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everybody, own, group=group)
    assert not torch.equal(everybody[0], everybody[1]), "local gradients let ranks drift apart"
    sent = wire.stats.bytes_sent
    with pytest.warns(RuntimeWarning, match=r"wire\.averaged\(\)") as told:
        evaluate(training)
    assert Path(told[0].filename).parent == Path(__file__).parent, "a line of the caller's, and none of torch's"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        evaluate(training)  # said once
        with wire.averaged():
            evaluate(training)
    with wire.averaged():
        close(flat(training.module), torch.stack(everybody).mean(0), "the mean of all ranks")
        shared = digest(flat(training.module))
    assert torch.equal(flat(training.module), own) and wire.stats.bytes_sent == sent
    digests = [None] * len(everybody)
    dist.all_gather_object(digests, shared, group=group)
    assert len(set(digests)) == 1
    try:
        with wire.averaged():
            raise KeyError("an evaluation that fails")
    except KeyError:
        assert torch.equal(flat(training.module), own)
    wire.switch("dense")
    own, overhead = flat(training.module), wire.stats.bytes_aside
    with wire.averaged():
        assert torch.equal(flat(training.module), own)
    assert wire.stats.bytes_aside == overhead, "ranks that are equal need no exchange"
    wire.detach()
    assert "detached" in sentence_of(thinwire.DetachedError, wire.averaged().__enter__)


def refused_switches(group: dist.ProcessGroup) -> None:
    rank = dist.get_rank(group)
    training = Training(group, Run(DGC, "heavy"))
    training.step(0)
    wire = training.wire
    before = digest(*tensors_of(wire.state_dict()))
    refused = {
        "unknown method": "dcg:density=0.1",
        "matches no parameter": thinwire.DGC(exclude=("nope",)),
        "not 5": 5,
        "ranks differ": thinwire.DGC(density=0.1 + rank / 10),
        "density": "dgc:density=2" if rank else "dgc",
    }
    for word, method in refused.items():
        assert word in sentence_of(ValueError, lambda method=method: wire.switch(method)), word
        assert wire.method is DGC and digest(*tensors_of(wire.state_dict())) == before
    wire.switch("blocksign:dense_below=1,topology=server")
    training.step(1)
    wire.detach()
    adam = Training(group, Run(thinwire.TernGrad(dense_below=0), "adam"))
    text = sentence_of(ValueError, lambda: adam.wire.switch(thinwire.DGC()))
    assert "momentum_correction=False" in text and "Adam" in text
    adam.step(0)
    adam.wire.detach()


def after_detach(group: dist.ProcessGroup) -> None:
    training = Training(group, Run(DGC, "heavy"))
    training.step(0)
    wire = training.wire
    state = wire.state_dict()
    wire.detach()
    assert wire.stats.steps == 1 and "1 steps" in str(wire.stats)
    for action in (lambda: wire.switch(thinwire.Dense()), lambda: wire.load_state_dict(state), wire.state_dict):
        assert "detached" in sentence_of(thinwire.DetachedError, action)


def attached_again_and_again(group: dist.ProcessGroup, hierarchy: Any) -> int:
    """Threads that a process has more after the last of many attach and detach than after the second."""
    rank = dist.get_rank(group)
    training = Training(group, Run(None, "heavy", hierarchy=hierarchy))
    known = 0
    for step in range(8):
        training.happen("attach", DGC if step % 2 else thinwire.GTopK(density=0.02))
        training.step(step)
        time.sleep(0.02 * ((rank + step) % 3))  # ranks leave at different times
        training.wire.detach()
        if step == 1:
            known = len(os.listdir("/proc/self/task"))
    return len(os.listdir("/proc/self/task")) - known


def crossing_wires(group: dist.ProcessGroup) -> None:
    """First and second attach, first leaves, third attaches: all on one subgroup, and the second one goes on."""
    runs = [
        Run(DGC, "heavy", task="net"),
        Run(thinwire.BlockSign(dense_below=1), "nesterov"),
        Run("gtopk:density=0.02", "adam"),
    ]
    first, second = Training(group, runs[0]), Training(group, runs[1])
    for step in range(3):
        first.step(step)
        second.step(step)
        first.happen("detach")
        second.step(step + 10)
        third = Training(group, runs[2])
        third.step(step)
        second.step(step + 20)
        first.happen("attach", DGC)
        third.wire.detach()
    bits = [None] * dist.get_world_size(group)
    dist.all_gather_object(bits, digest(flat(first.module), flat(second.module)), group=group)
    assert len(set(bits)) == 1
    first.wire.detach()
    second.wire.detach()
