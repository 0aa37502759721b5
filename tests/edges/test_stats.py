"""A wire's numbers: bytes are the format's, counters belong together, and the sentence reads well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers
from cluster import Cluster
from workers import SHAPES, Run, Training, noise

import thinwire


def counted_bytes(group: dist.ProcessGroup) -> None:
    """Model a: 1200, b: 50, c: 4200, d: 15, e: 1 elements; one bucket, or one per parameter."""
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
        assert stats.frame_bytes == steps * nbytes, (
            f"{method}: {stats.frame_bytes / steps} bytes per step, not {nbytes}"
        )
        assert stats.dense_bytes == steps * 4 * whole and stats.steps == steps and stats.world_size == N
        assert stats.ratio == (stats.dense_bytes / stats.frame_bytes if nbytes else None)
        totals = torch.tensor([stats.bytes_sent, stats.bytes_received])
        dist.all_reduce(totals, group=group)
        assert totals[0] == totals[1], f"{method}: what is sent is received by somebody"
        training.wire.detach()


def test_stats_count_the_bytes_of_the_format(cluster: Cluster) -> None:
    cluster.run(counted_bytes, 3)
    cluster.run(counted_bytes, 2)


def test_stats_of_one_rank_have_no_bytes_and_no_ratio(cluster: Cluster) -> None:
    methods = [
        thinwire.DGC(),
        thinwire.GTopK(),
        thinwire.BlockSign(dense_below=1),
        thinwire.TernGrad(dense_below=0),
        thinwire.SignSGD(),
    ]
    methods += [thinwire.Dense(dtype=dtype) for dtype in ("fp32", "bf16")]
    (results,) = cluster.run(workers.train, 1, [Run(method, "tiny", 3) for method in methods])
    for method, result in zip(methods, results, strict=True):
        stats = result["stats"]
        assert (stats.frame_bytes, stats.bytes_sent, stats.bytes_received) == (0, 0, 0), method
        assert stats.ratio is None and stats.link_ratio is None and "nothing sent" in str(stats)
        assert stats.steps == 3 and stats.dense_bytes == 3 * 4 * workers.DOT_NUMEL


def readable_stats(group: dist.ProcessGroup) -> None:
    training = Training(group, Run(thinwire.DGC(density=0.02, values="fp32", factor_masking=True), "heavy"))
    empty = training.wire.stats
    assert empty.ratio is None and empty.steps == 0 and empty.residual_norm == 0 and "0 steps" in str(empty)
    for step in range(4):
        training.step(step)
    first = training.wire.stats
    text = str(first)
    sent, instead, less, added = first.bytes_sent / 1e3, first.dense_bytes / 1e3, first.link_ratio, first.added_ms
    assert text == (
        f"4 steps: sent {sent:.3g} kB instead of {instead:.3g} kB ({less:.3g}x less); "
        f"communication added {added:.3g} ms per step"
    )  # of two ranks a ring all-reduce sends each as much as it has
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


def test_stats_read_well_and_go_on_over_a_switch_and_after_detach(cluster: Cluster) -> None:
    cluster.run(readable_stats, 2)


def counted_over_a_resume(group: dist.ProcessGroup) -> None:
    method = "dgc:density=0.02,values=fp32"
    first = Training(group, Run(method, "heavy"))
    for step in range(6):
        first.step(step)
    assert first.wire is not None
    saved, whole = first.wire.state_dict(), first.wire.stats
    second = Training(group, Run(method, "heavy"))
    assert second.wire is not None
    second.wire.load_state_dict(saved)
    for step in range(6, 9):
        second.step(step)
    resumed = second.wire.stats
    assert (resumed.steps, resumed.steps_before) == (3, 6) and str(resumed).startswith("3 steps: sent")
    assert resumed.bytes_sent == whole.bytes_sent / 2 and resumed.dense_bytes == whole.dense_bytes / 2
    second.wire.load_state_dict(saved)  # back to the saved moment: what was sent meanwhile was sent
    second.step(6)
    assert (second.wire.stats.steps, second.wire.stats.dense_bytes) == (4, whole.dense_bytes / 6 * 4)
    assert second.wire.state_dict()["step"] == 7
    first.wire.detach()
    second.wire.detach()


def test_stats_after_a_resume_are_of_its_own_steps(cluster: Cluster) -> None:
    cluster.run(counted_over_a_resume, 2)


def counted_over_changes(group: dist.ProcessGroup) -> None:
    training = Training(group, Run("dgc:density=0.02,values=fp32", "heavy"))
    assert training.wire is not None
    for step in range(51):  # the ranks compare their pace once
        training.step(step)
    wire, before = training.wire, training.wire.stats
    assert (
        0 < before.bytes_overhead < 4 * workers.DOT_NUMEL and before.bytes_sent == before.frame_bytes
    )  # two ranks: a frame each
    wire.switch("terngrad")
    wire.detach()
    after = wire.stats
    counters = ("steps", "frame_bytes", "dense_bytes", "bytes_sent", "bytes_received", "ratio", "link_ratio")
    assert all(getattr(after, name) == getattr(before, name) for name in counters)
    assert after.bytes_overhead > before.bytes_overhead + 4 * workers.DOT_NUMEL
    assert "more for measuring, checking, averaging or changing the method" in str(after)


def test_stats_count_apart_what_switch_and_detach_move(cluster: Cluster) -> None:
    cluster.run(counted_over_changes, 2)


def counted_by_auto(group: dist.ProcessGroup) -> None:
    training = Training(group, Run("auto", "heavy"))
    assert training.wire is not None
    for step in range(8):
        training.step(step)
    stats = training.wire.stats
    dense = 4 * workers.DOT_NUMEL * 7  # of two ranks a ring all-reduce sends each as much as it has
    assert dense <= stats.bytes_sent <= dense + 4 * workers.DOT_NUMEL and stats.steps == 8, stats
    assert stats.bytes_overhead > 1e6 and "more for measuring" in str(stats)
    training.wire.detach()


def test_stats_count_apart_what_auto_measures(cluster: Cluster) -> None:
    cluster.run(counted_by_auto, 2)


def told_and_logged(group: dist.ProcessGroup) -> dict[str, Any]:
    rank = dist.get_rank(group)
    training = Training(group, Run(thinwire.DGC(density=0.02, values="fp32"), "heavy"))
    wire, lines = training.wire, []
    assert wire is not None
    wire.log_every(2, lines.append)
    steps = [wire.stats]
    for step in range(5):
        training.step(step)
        steps.append(wire.stats)
    recent = steps[4].since(steps[2])
    numbers = steps[4].to_dict()
    assert recent.steps == 2 and recent.bytes_sent == steps[4].bytes_sent - steps[2].bytes_sent
    assert recent.steps_before == 2 and recent.gradient_norm == steps[4].gradient_norm
    assert numbers["link_ratio"] == steps[4].link_ratio and numbers["steps"] == 4 and numbers["added_ms"] > 0
    assert all(isinstance(value, int | float) for value in numbers.values()) and "slow_because" not in numbers
    if rank == 0:
        first, second = lines
        assert first.startswith("step 2: sent ") and second.startswith(f"step 4: {recent.sentence()}; gradient norm ")
    else:
        assert not lines
    with pytest.raises(ValueError, match="a number of steps of at least 1, not 0"):
        wire.log_every(0)
    wire.detach()
    return numbers


def test_stats_go_to_loggers_and_every_few_steps_to_people(cluster: Cluster) -> None:
    first, second = cluster.run(told_and_logged, 2)
    assert first["gradient_norm"] == second["gradient_norm"] > 0


def norm_of_plain_gradients(group: dist.ProcessGroup) -> tuple[float, float]:
    """One step of one parameter: what is measured, and the norm of this rank's own gradient."""
    weight = torch.nn.Parameter(torch.zeros(600, 10))
    reducer = thinwire.Reducer({"weight": weight}, thinwire.DGC(density=0.01), group)
    reducer.log_every(1, lambda line: None)
    gradient = noise((600, 10), dist.get_rank(group), 0, "weight")
    own = float(gradient.norm())
    reducer.reduce({"weight": gradient})
    found = reducer.stats.gradient_norm
    reducer.detach()
    assert found is not None
    return found, own


def test_gradient_norm_is_that_of_the_gradients_before_compression(cluster: Cluster) -> None:
    results = cluster.run(norm_of_plain_gradients, 3)
    expected = (sum(own**2 for _, own in results) / 3) ** 0.5
    assert all(found == pytest.approx(expected, rel=1e-6) for found, _ in results)
