"""Real Gloo processes through thinwire.attach follow the NumPy simulations, which are checked here too."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cluster import Cluster, ClusterError
from oracles import blocksign, dgc, dropping, gtopk, random_numbers, real, selection, signsgd, terngrad
from oracles.optimizers import SGD, Adam
from oracles.problem import Params, Problem

STEPS = 20
WIDE = Problem(sizes=(64, 65, 5))  # hidden.weight has 4160 elements: enough to be cut into slices
DEAD = Problem(dead_input=True)
PLAIN, HEAVY, NESTEROV = SGD(), SGD(momentum=0.9), SGD(momentum=0.9, nesterov=True)
DECAY = SGD(momentum=0.9, weight_decay=0.02)
NESTEROV_DECAY = replace(NESTEROV, weight_decay=0.02)
ONE_CYCLE_GROUPS = replace(DECAY, schedule="onecycle", bias_group=True)
ADAMW = Adam(weight_decay=0.1, decoupled=True)


@dataclass(frozen=True, eq=False)
class Case:
    """One method with its options (the same words for engine and oracle) under one optimizer."""

    name: str
    oracle: ModuleType
    method: str | None
    optimizer: SGD | Adam
    options: dict[str, Any] = field(default_factory=dict)
    problem: Problem = field(default_factory=Problem)
    workers: tuple[int, ...] = (1, 2, 3, 4, 5)
    steps: int = STEPS

    def simulate(self, N: int, **noise: Any) -> list[Any]:
        problem = replace(self.problem, **noise)
        return self.oracle.simulate(problem, N, self.steps, self.optimizer, **self.options)

    def hinges_on_rounding(self, N: int) -> bool:
        """Whether gradients perturbed by a few float32 roundings lead elsewhere.

        Which element is the k-th largest, or on which side of a coin a value falls, can be decided by the
        last bit; then float32 and float64 rightly part. Such data are no test: `python tests/test_oracles.py`
        finds cases that need another seed.
        """
        exact = self.simulate(N)
        return any(distance(exact, self.simulate(N, noise=3e-7, noise_seed=i), N) > 4e-6 for i in range(4))


def make(oracle: ModuleType, method: str, rows: list[tuple], extra: list[tuple], **always: Any) -> list[Case]:
    """rows run with 1 to 5 workers; extra ones, which cross what rows show, with 3 and 4 (odd, even).

    ``always`` are options of all of them that do not say otherwise: the tensors are too small for the defaults.
    """
    cases = [Case(f"{method}-{name}", oracle, method, *rest) for name, *rest in rows]
    cases = [replace(case, options={**always, **case.options}) for case in cases]
    crossed = [replace(case, workers=(3, 4)) for case in make(oracle, method, extra, [], **always)] if extra else []
    return cases + crossed


PAPER = {"scope": "tensor", "factor_masking": True, "values": "fp32"}
ALL = {"density": 0.3, "dense_below": 0, **PAPER}  # k = 16, 3, 14, 2
EXACT = {"density": 1.0, "dense_below": 0, **PAPER, "factor_masking": False}
SOME = {"density": 0.1, "dense_below": 50, **PAPER}  # hidden.weight: k = 5; the others travel dense
CLIPPED = {"density": 0.1, "clip_norm": 0.5}
CASES = [
    *make(dgc, "DGC", [
        ("plain", HEAVY, ALL),
        ("nesterov", NESTEROV, ALL),
        ("momentum 0", PLAIN, ALL),
        ("weight decay", DECAY, ALL),
        ("weight decay that waits", DECAY, {**ALL, "direct_decay": False}),
        ("weight decay, no masking", DECAY, {**ALL, "factor_masking": False}),
        ("no masking", HEAVY, {**ALL, "factor_masking": False}),
        ("some dense", DECAY, SOME),
        ("exclude", HEAVY, {"density": 0.1, "dense_below": 0, "exclude": ("out.*",), **PAPER}),
        ("clip", DECAY, {**ALL, "clip_norm": 0.5}),
        ("the whole model's", HEAVY, {**ALL, "scope": "model"}),
        ("warmup", HEAVY, {"density": 0.05, "dense_below": 0, "warmup": 13, **PAPER}),
        ("no correction", NESTEROV_DECAY, {**ALL, "factor_masking": False, "momentum_correction": False}),
        ("rescaling", replace(DECAY, schedule="staircase"), {**ALL, "factor_masking": False, "lr_rescaling": True}),
    ], [
        ("rescaling, two groups", replace(NESTEROV, schedule="increasing", bias_group=True),
         {**ALL, "lr_rescaling": True}),
        ("rescaling, the whole model's, onecycle", replace(NESTEROV_DECAY, schedule="onecycle"),
         {**SOME, "dense_below": 20, "scope": "model", "lr_rescaling": True}),
        ("nesterov, weight decay, no masking", NESTEROV_DECAY, {**ALL, "factor_masking": False}),
        ("nesterov, weight decay that waits", NESTEROV_DECAY,
         {**SOME, "factor_masking": False, "direct_decay": False}),
        ("some dense, nesterov", NESTEROV, {**SOME, "factor_masking": False}),
        ("the whole model's, some dense", NESTEROV_DECAY, {**SOME, "dense_below": 20, "scope": "model"}),
        ("balanced, some dense", NESTEROV_DECAY, {**SOME, "dense_below": 20, "scope": "balanced"}),
        ("balanced, warmup", DECAY, {**ALL, "factor_masking": False, "scope": "balanced", "warmup": 7}),
        ("the whole model's, warmup", DECAY, {**ALL, "factor_masking": False, "scope": "model", "warmup": 7}),
        ("two groups", replace(DECAY, bias_group=True), ALL),
        ("onecycle", replace(DECAY, schedule="onecycle"), ALL),
        ("onecycle, no masking", replace(NESTEROV, schedule="onecycle"), {**SOME, "factor_masking": False}),
        ("density 1, no masking", NESTEROV_DECAY, EXACT),
        ("no correction, clip, some dense", DECAY,
         {**SOME, "factor_masking": False, "momentum_correction": False, "clip_norm": 0.5}),
    ]),
    *make(gtopk, "GTopK", [
        ("plain", PLAIN, {"density": 0.05}),
        ("momentum", DECAY, {"density": 0.05}),
        ("momentum of the optimizer", DECAY, {"density": 0.05, "momentum_correction": False}),
        ("nesterov", NESTEROV, {"density": 0.15, "momentum_correction": False}),
        ("warmup", HEAVY, {"density": 0.03, "warmup": 10, "momentum_correction": False}),
        ("warmup, correction", NESTEROV, {"density": 0.03, "warmup": 10}),
        ("exclude", HEAVY, {"density": 0.1, "exclude": ("out.*",)}),
        ("correction", DECAY, {"density": 0.1, "momentum_correction": True}),
        ("correction, nesterov", NESTEROV, {"density": 0.1, "momentum_correction": True}),
        ("masking", DECAY, {"density": 0.1, "factor_masking": True}),
        ("decay directly", DECAY, {"density": 0.1, "direct_decay": True}),
        ("masking, decay directly", DECAY, {"density": 0.1, "factor_masking": True, "direct_decay": True}),
        ("rescaling", replace(DECAY, schedule="decreasing", bias_group=True),
         {"density": 0.1, "lr_rescaling": True, "direct_decay": True}),
    ], [
        ("adam", Adam(), {"density": 0.1}),
        ("density 1", HEAVY, {"density": 1.0}),
        ("clip", DECAY, CLIPPED),
        ("decay directly, nesterov", NESTEROV_DECAY, {"density": 0.1, "direct_decay": True}),
        ("masking, nesterov, warmup", NESTEROV, {"density": 0.03, "warmup": 10, "factor_masking": True}),
        ("clip, correction, exclude", DECAY, {**CLIPPED, "momentum_correction": True, "exclude": ("out.*",)}),
    ]),
    *make(terngrad, "TernGrad", [
        ("default", HEAVY, {"seed": 7}),
        ("no clip", NESTEROV_DECAY, {"seed": 1, "clip_sigma": None}),
        ("strong clip, own scalers", HEAVY, {"seed": 1, "clip_sigma": 1.0, "share_scaler": False}),
        ("server", DECAY, {"seed": 2, "topology": "server", "clip_sigma": 1.5}),
        ("last layer float", HEAVY, {"seed": 3, "exclude": ("out.*",)}),
        ("adam", Adam(), {"seed": 2**32 + 5}),
    ], [
        ("server, own scalers", PLAIN, {"seed": 2, "topology": "server", "share_scaler": False}),
        ("last layer float, server", HEAVY, {"seed": 3, "exclude": ("out.*",), "topology": "server"}),
        ("adamw", ADAMW, {"seed": 4, "share_scaler": False}),
        ("zero gradients", HEAVY, {"seed": 5}, DEAD),
        ("one scaler", HEAVY, {"seed": 6, "scaler": "model"}),
        ("one scaler, last layer float", Adam(), {"seed": 6, "scaler": "model", "exclude": ("out.*",)}),
        ("one scaler of its own", HEAVY, {"seed": 6, "scaler": "model", "share_scaler": False, "clip_sigma": None}),
    ], dense_below=0),
    *make(blocksign, "BlockSign", [
        ("nesterov", NESTEROV, {}),
        ("everything, nesterov, server", NESTEROV, {"topology": "server", "dense_below": 0}),
        ("no momentum", PLAIN, {"block": 7, "dense_below": 0}),
        ("momentum, server, blocks", DECAY, {"topology": "server", "block": 7}),
        ("one way", NESTEROV_DECAY, {"two_way": False}),
        ("one way, server, blocks", HEAVY, {"two_way": False, "topology": "server", "block": 16}),
        ("decreasing", replace(NESTEROV, schedule="decreasing"), {}),
        ("increasing, server", replace(NESTEROV_DECAY, schedule="increasing"), {"topology": "server"}),
        ("staircase, blocks", replace(HEAVY, schedule="staircase"), {"block": 10}),
    ], [
        ("decreasing, one way", replace(PLAIN, schedule="decreasing"), {"two_way": False}),
        ("nesterov, server", NESTEROV, {"topology": "server"}),
        ("exclude", NESTEROV_DECAY, {"exclude": ("out.*",)}),
        ("small and excluded, server", HEAVY, {"exclude": ("hidden.bias",), "dense_below": 50, "topology": "server"}),
        ("everything, one way", replace(NESTEROV, schedule="decreasing"), {"two_way": False, "dense_below": 0}),
        ("everything, adam", Adam(), {"block": 7, "dense_below": 0}),
        ("onecycle", replace(NESTEROV, schedule="onecycle"), {}),
        ("two groups", replace(NESTEROV_DECAY, bias_group=True, schedule="decreasing"), {}),
        ("zero gradients", NESTEROV, {}, DEAD),
        ("adam", Adam(), {"block": 7}),
        ("clip", NESTEROV_DECAY, {"clip_norm": 0.5}),
        ("clip, no momentum, server", replace(PLAIN, schedule="decreasing"), {"clip_norm": 0.4, "topology": "server"}),
        ("clip, adam", Adam(), {"clip_norm": 0.5, "block": 16}),
        # The more signs, the sooner rounding decides one: fewer steps.
        ("slices", NESTEROV, {"dense_below": 0}, WIDE, (), 8),
        ("slices, blocks", replace(NESTEROV, schedule="decreasing"), {"block": 100, "dense_below": 0}, WIDE, (), 8),
    ], dense_below=1),
    *make(signsgd, "SignSGD", [
        ("plain", SGD(lr=0.01)),
        ("weight decay", SGD(lr=0.01, weight_decay=0.1)),
        ("signum", SGD(lr=0.01, momentum=0.9)),
        ("signum, nesterov, weight decay", SGD(0.01, 0.9, True, 0.1)),
    ], [
        ("signum, decreasing, two groups", SGD(0.01, 0.9, False, 0.1, "decreasing", True)),
        ("zero gradients", SGD(lr=0.01, momentum=0.9), {}, DEAD),
        ("signum, server", SGD(lr=0.01, momentum=0.9), {"topology": "server"}),
    ]),
    *make(dropping, "GradientDropping", [
        ("momentum", DECAY, {"density": 0.1}),
        ("adam", Adam(), {"density": 0.1}),
        ("warmup", NESTEROV, {"density": 0.05, "warmup": 12}),
        ("sum", DECAY, {"density": 0.1, "local": "sum", "sync_every": 7}),
        ("sum, adam", Adam(), {"density": 0.1, "local": "sum", "sync_every": 7}),
        ("partial", HEAVY, {"density": 0.1, "local": "partial", "sync_every": 7}),
        ("partial, adam", Adam(), {"density": 0.1, "local": "partial", "sync_every": 7}),
        ("error", NESTEROV, {"density": 0.1, "local": "error", "sync_every": 7}),
    ], [
        ("correction", NESTEROV_DECAY, {"density": 0.1, "momentum_correction": True}),
        ("density 1", HEAVY, {"density": 1.0}),
        ("partial, warmup", HEAVY, {"density": 0.05, "local": "partial", "sync_every": 1, "warmup": 12}),
        ("partial, never averaged", HEAVY, {"density": 0.1, "local": "partial", "sync_every": None}),
        ("error, adamw", ADAMW, {"density": 0.1, "local": "error", "sync_every": 7}),
        ("clip, adam", Adam(), CLIPPED),
        ("clip, correction", NESTEROV_DECAY, {**CLIPPED, "momentum_correction": True}),
        ("clip, partial, adam", Adam(), {**CLIPPED, "local": "partial", "sync_every": 7}),
        ("clip, sum", HEAVY, {**CLIPPED, "local": "sum", "sync_every": 7}),
        ("each tensor's", DECAY, {"density": 0.1, "scope": "tensor"}),
        ("each tensor's, partial, some dense, adam", Adam(),
         {"density": 0.1, "scope": "tensor", "dense_below": 20, "local": "partial", "sync_every": 7}),
        ("partial, some dense", HEAVY, {"density": 0.1, "dense_below": 20, "local": "partial", "sync_every": 7}),
        ("balanced, sum, some dense", DECAY,
         {"density": 0.1, "scope": "balanced", "dense_below": 20, "local": "sum", "sync_every": 7}),
        ("each tensor's, error, exclude, warmup", NESTEROV,
         {"density": 0.05, "scope": "tensor", "exclude": ("out.*",), "local": "error", "sync_every": 7, "warmup": 12}),
    ], values="fp32"),
]  # fmt: skip


def of_rank(snapshot: Params | list[Params], rank: int) -> Params:
    """Parameters of one worker: simulations whose workers differ give a list."""
    return snapshot[rank] if isinstance(snapshot, list) else snapshot


def distance(a: list[Any], b: list[Any], N: int) -> float:
    """The largest difference of two trajectories."""
    pairs = [(of_rank(x, r), of_rank(y, r)) for x, y in zip(a, b, strict=True) for r in range(N)]
    return max(float(np.abs(x[name] - y[name]).max()) for x, y in pairs for name in x)


def follow(cluster: Cluster, case: Case, N: int, ddp_options: dict[str, Any], last: bool = False) -> None:
    expected = case.simulate(N)
    args = (case.problem, case.steps, case.optimizer, case.method, case.options, ddp_options)
    results = cluster.run(real.train, N, *args, last=last)
    for t in range(case.steps):
        for r in range(N):
            for name, value in of_rank(expected[t], r).items():
                if np.allclose(results[r][t][name], value, rtol=1e-5, atol=1e-5):
                    continue
                where = f"{case.name}: {name} on rank {r} of {N} after step {t} (the first is 0)"
                if case.hinges_on_rounding(N):
                    where += "; rounding decides this trajectory: give the case another seed"
                np.testing.assert_allclose(results[r][t][name], value, rtol=1e-5, atol=1e-5, err_msg=where)


ALL_RUNS = [pytest.param(case, N, id=f"{case.name}-{N}") for case in CASES for N in case.workers]


@pytest.mark.parametrize("case, N", ALL_RUNS)
def test_processes_follow_the_simulation(cluster: Cluster, case: Case, N: int) -> None:
    follow(cluster, case, N, {})


FIRST_OF_EACH = list({case.method: case for case in reversed(CASES)}.values())
# An option that needs something of all gradients, in methods that otherwise exchange bucket by bucket.
WAITING = [case for case in CASES if case.name in ("DGC-clip", "TernGrad-one scaler", "BlockSign-clip")]
# And the other way round.
BY_BUCKET = [case for case in CASES if case.name in ("GradientDropping-each tensor's, partial, some dense, adam",
                                                     "GradientDropping-balanced, sum, some dense")]  # fmt: skip


@pytest.mark.parametrize("case", FIRST_OF_EACH + WAITING + BY_BUCKET, ids=lambda case: case.name)
def test_one_bucket_per_parameter_on_other_ranks(cluster: Cluster, case: Case) -> None:
    """Global ranks 2, 3, 4 are group ranks 0, 1, 2; buckets of 100 bytes hold one parameter each."""
    follow(cluster, case, 3, {"bucket_cap_mb": 1e-4}, last=True)


@pytest.mark.parametrize("N", [1, 2, 5])
@pytest.mark.parametrize("optimizer", [NESTEROV_DECAY, ONE_CYCLE_GROUPS, Adam()])
def test_plain_ddp_follows_the_dense_simulation(cluster: Cluster, optimizer: SGD | Adam, N: int) -> None:
    """No thinwire here: problem, optimizers, schedules and the processes are right by themselves."""
    follow(cluster, Case("dense", dropping, None, optimizer, {"density": 1.0}), N, {})


# --- the simulations by themselves ---------------------------------------------------------------


def dense(problem: Problem, N: int, optimizer: SGD | Adam) -> list[Params]:
    """Synchronous training on the mean gradient."""
    w, step, trajectory = problem.initial(), optimizer.start(), []
    for t in range(STEPS):
        g = [problem.gradient(w, r, t) for r in range(N)]
        step(w, {name: np.mean([x[name] for x in g], axis=0) for name in w}, t)
        trajectory.append(selection.copy(w))
    return trajectory


@pytest.mark.parametrize("problem", [Problem(), Problem(seed=3, dead_input=True), WIDE])
def test_numpy_and_torch_gradients_agree(problem: Problem) -> None:
    model = problem.module()
    problem.loss(model, worker=2, step=5).backward()
    expected = problem.gradient(problem.initial(), worker=2, step=5)
    assert [name for name, _ in model.named_parameters()] == list(expected)
    for name, p in model.named_parameters():
        assert p.grad is not None
        np.testing.assert_allclose(p.grad.numpy(), expected[name], rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(p.grad.numpy() == 0, expected[name] == 0)


def test_analytic_gradient_is_the_slope() -> None:
    problem = Problem()
    w = problem.initial()
    x, labels = problem.batch(0, 0)

    def loss() -> float:
        z = np.tanh(x @ w["hidden.weight"].T + w["hidden.bias"]) @ w["out.weight"].T + w["out.bias"]
        return float(np.mean(np.log(np.exp(z).sum(axis=1)) - z[np.arange(len(z)), labels]))

    g = problem.gradient(w, 0, 0)
    for name in w:
        w[name].flat[3] += 1e-5
        above = loss()
        w[name].flat[3] -= 2e-5
        slope = (above - loss()) / 2e-5
        w[name].flat[3] += 1e-5
        assert slope == pytest.approx(g[name].flat[3], abs=1e-8)


@pytest.mark.parametrize(
    "optimizer",
    [
        NESTEROV_DECAY,
        ONE_CYCLE_GROUPS,
        replace(HEAVY, schedule="increasing"),
        Adam(weight_decay=0.1),
        ADAMW,
    ],
)
def test_numpy_optimizers_are_torch_optimizers(optimizer: SGD | Adam) -> None:
    problem = Problem()
    model = problem.module().double()
    torch_optimizer = optimizer.build(model)
    scheduler = optimizer.scheduler(torch_optimizer)
    for t, expected in enumerate(dense(problem, 1, optimizer)):
        g = problem.gradient({name: p.detach().numpy() for name, p in model.named_parameters()}, 0, t)
        for name, p in model.named_parameters():
            p.grad = torch.from_numpy(g[name])
        torch_optimizer.step()
        scheduler.step()
        for name, p in model.named_parameters():
            np.testing.assert_allclose(p.detach().numpy(), expected[name], rtol=1e-10, atol=1e-10)


def test_random_numbers_in_plain_integers() -> None:
    def mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x7FEB352D % 2**32
        x ^= x >> 15
        x = x * 0x846CA68B % 2**32
        return x ^ x >> 16

    check = 0xCBF43926
    for seed, step, rank, crc in ((0, 0, 0, 0), (2**32 - 1, 19, 0xFFFFFFFF, check), (2**32 + 5, 7, 3, check)):
        name = "123456789" if crc else ""  # the check value of CRC-32
        k = mix(mix(mix(mix(seed % 2**32 ^ 0x9E3779B9) ^ step) ^ rank) ^ crc)
        key = random_numbers.key(seed, step, rank, name)
        assert key[0] == k
        words = [mix(mix(i ^ k) ^ mix((k + 0x9E3779B9) % 2**32)) for i in range(100)]
        np.testing.assert_array_equal(random_numbers.random(key, 100), words)
    u = random_numbers.uniform(random_numbers.key(0, 0, 0, "w"), 100_000)
    assert u.dtype == np.float32 and u.min() >= 0 and u.max() < 1 and abs(u.mean() - 0.5) < 0.005
    assert abs(random_numbers.coin(random_numbers.key(0, 0, 0, "w"), 100_000).mean() - 0.5) < 0.005


def test_selection_rules() -> None:
    assert [selection.kept(0.1, n) for n in (1, 5, 45, 54, 55)] == [1, 1, 4, 5, 6]
    np.testing.assert_array_equal(selection.top_k(np.array([1.0, -3, 2, 3, -2]), 3), [1, 3, 2])
    assert [selection.exponential(t, 0.01, 8) for t in range(9)] == [
        *(0.25, 0.25, 0.0625, 0.0625, 0.015625, 0.015625, 0.01, 0.01, 0.01)
    ]
    assert [selection.listed(t, 0.001, 4) for t in range(5)] == [0.25, 0.0725, 0.015, 0.004, 0.001]
    kept = [selection.drop_ratio(t, 0.01, 1000) for t in (0, 499, 999, 5000)]
    np.testing.assert_allclose(kept, [1 - 0.99**1000, 1 - 0.99**2, 0.01, 0.01])


@pytest.mark.parametrize("N", [1, 3])
@pytest.mark.parametrize("optimizer", [HEAVY, NESTEROV, NESTEROV_DECAY])
def test_density_one_is_dense_training(optimizer: SGD, N: int) -> None:
    problem, expected = Problem(), dense(Problem(), N, optimizer)
    masked = dgc.simulate(problem, N, STEPS, optimizer, density=1.0)
    assert distance(masked, expected, N) > 1e-2
    for changed in (
        {"factor_masking": False},
        {"momentum_correction": False},
        {"density": 0.1, "exclude": ("*",)},
    ):
        same = dgc.simulate(problem, N, STEPS, optimizer, **{"density": 1.0} | changed)
        assert distance(same, expected, N) < 1e-12
    for correction in (False, True):
        options: dict[str, Any] = {"density": 1.0, "momentum_correction": correction}
        assert distance(gtopk.simulate(problem, N, STEPS, optimizer, **options), expected, N) < 1e-12
        assert distance(dropping.simulate(problem, N, STEPS, optimizer, **options), expected, N) < 1e-12


def test_masking_at_density_one_is_plain_sgd() -> None:
    masked = dgc.simulate(Problem(), 2, STEPS, HEAVY, density=1.0)
    assert distance(masked, dense(Problem(), 2, PLAIN), 2) < 1e-12


def test_dgc_clipping_bounds_the_global_norm() -> None:
    g = {"a": np.array([3.0, 0.0]), "b": np.array([[4.0]])}
    np.testing.assert_allclose(dgc.clip(g, 1.0)["b"], 0.8, rtol=1e-6)
    np.testing.assert_array_equal(dgc.clip(g, 6.0)["b"], 4.0)


@pytest.mark.parametrize("N", [1, 2, 3, 4, 5, 6, 7, 8, 16])
def test_gtopk_loses_nothing(N: int) -> None:
    ledger: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    gtopk.simulate(Problem(), N, 50, HEAVY, density=0.05, ledger=ledger)
    put_in, applied = sum(row[0] for row in ledger), sum(row[1] for row in ledger)
    np.testing.assert_allclose(applied + ledger[-1][2], put_in, rtol=0, atol=1e-12)
    assert max(np.count_nonzero(row[1]) for row in ledger) == selection.kept(0.05, ledger[0][0].size)


def test_gtopk_keeps_an_entry_that_was_rejected_before_its_index_came_back() -> None:
    """k = 1: rank 1's index 0 loses against rank 0's index 5, and then wins from ranks 2 and 3 without it."""
    sets = [{5: 2.0}, {0: 1.0}, {0: 3.0}, {0: 4.0}]
    results, accepted = gtopk.global_top_k(sets, 1)
    assert results == [{0: 7.0}] * 4
    assert accepted == [set(), set(), {0}, {0}]
    results, accepted = gtopk.global_top_k([{1: 1.0}, {2: -3.0}, {1: 4.0}], 1)  # rank 2 goes through rank 0
    assert results == [{1: 5.0}] * 3 and accepted == [{1}, set(), {1}]
    assert gtopk.merge({3: 1.0}, {2: -1.0}, 1) == {2: -1.0}


def test_terngrad_is_unbiased_for_the_clipped_gradient() -> None:
    g = Problem().gradient(Problem().initial(), 0, 0)["hidden.weight"].ravel()
    f = terngrad.clipped(g, 1.0)
    assert np.abs(f).max() == pytest.approx(g.std(), rel=1e-6) and np.abs(g).max() > g.std()
    s = np.abs(f).max()
    keys = [random_numbers.key(0, t, 0, "w") for t in range(4000)]
    draws = [terngrad.trits(f, s, random_numbers.uniform(key, f.size)) for key in keys]
    assert set(np.unique(draws)) == {-1.0, 0.0, 1.0}
    np.testing.assert_allclose(np.mean(draws, axis=0) * s, f, atol=4 * 0.5 * s / np.sqrt(4000))


@pytest.mark.parametrize("problem", [Problem(), WIDE], ids=["tiny", "wide"])
@pytest.mark.parametrize("options", [{}, {"block": 99}, {"topology": "server", "block": 7}, {"two_way": False}])
def test_blocksign_error_corrected_iterate(problem: Problem, options: dict[str, Any]) -> None:
    """Lemma 3: x_t - eta_{t-1} (server's error + mean of workers') moves exactly by -eta_t mean(q)."""
    sgd, N = SGD(0.1, 0.9, True, 0.01, "increasing"), 3
    ledger: list[tuple[Params, Params]] = []
    trajectory = blocksign.simulate(problem, N, STEPS, sgd, dense_below=1, ledger=ledger, **options)
    for name, start in problem.initial().items():
        corrected = start.ravel()
        for t, (entered, errors) in enumerate(ledger):
            eta = sgd.lr_at(t, name)
            corrected = corrected - eta * entered[name]
            found = trajectory[t][name].ravel() - eta * errors[name]
            np.testing.assert_allclose(found, corrected, atol=1e-12)


def test_blocksign_compressor() -> None:
    v = np.array([1.0, -3.0, 0.0, 5.0, -1.0])
    np.testing.assert_allclose(blocksign.C(v, blocksign.runs(0, 5, "tensor")), [2, -2, 2, 2, -2])
    np.testing.assert_allclose(blocksign.C(v, blocksign.runs(0, 5, 2)), [2, -2, 2.5, 2.5, -1])


@pytest.mark.parametrize("N", [1, 2, 3])
def test_signsgd_moves_every_weight_by_the_learning_rate(N: int) -> None:
    start, first = DEAD.initial(), signsgd.simulate(DEAD, N, 1, SGD(lr=0.01, momentum=0.9))[0]
    signs = [{name: np.sign(x) for name, x in DEAD.gradient(start, r, 0).items()} for r in range(N)]
    for name in start:
        moved = (start[name] - first[name]) / 0.01
        np.testing.assert_allclose(np.abs(moved), 1)
        total = np.sum([s[name] for s in signs], axis=0)
        np.testing.assert_allclose(moved[total != 0], np.sign(total)[total != 0])


@pytest.mark.parametrize("local", ["sum", "partial", "error"])
def test_nodes_part_and_meet_again(local: str) -> None:
    trajectory = dropping.simulate(Problem(), 3, STEPS, HEAVY, density=0.1, local=local, sync_every=7)
    for t, nodes in enumerate(trajectory):
        apart = max(np.abs(nodes[0][name] - nodes[r][name]).max() for name in nodes[0] for r in range(3))
        assert apart == 0 if t % 7 == 6 else apart > 1e-4


@pytest.mark.parametrize("local", ["partial", "error"])
def test_one_node_with_its_own_gradient_is_dense(local: str) -> None:
    options: dict[str, Any] = {"density": 0.1, "local": local, "sync_every": 7}
    nodes = dropping.simulate(Problem(), 1, STEPS, NESTEROV, **options)
    if local == "partial":
        assert distance(nodes, dense(Problem(), 1, NESTEROV), 1) < 1e-12
    first = dropping.simulate(Problem(), 1, 1, NESTEROV, **options)
    assert distance(first, dense(Problem(), 1, NESTEROV)[:1], 1) < 1e-12


# --- the processes by themselves -----------------------------------------------------------------


def total_of_ranks(group: dist.ProcessGroup, factor: int) -> tuple[int, int, int]:
    value = torch.tensor([factor * (dist.get_rank(group) + 1)])
    dist.all_reduce(value, group=group)
    return int(value), dist.get_world_size(group), os.getpid()


def fail_on(group: dist.ProcessGroup, ranks: tuple[int, ...]) -> str:
    if dist.get_rank(group) in ranks:
        raise ValueError(f"rank {dist.get_rank(group)} says no")
    return "fine"


def hang(group: dist.ProcessGroup) -> None:
    time.sleep(3600)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_cluster_runs_on_a_group_of_n(cluster: Cluster, n: int, last: bool) -> None:
    results = cluster.run(total_of_ranks, n, 10, last=last)
    assert [r[:2] for r in results] == [(10 * n * (n + 1) // 2, n)] * n
    assert len({r[2] for r in results}) == n


def test_cluster_reports_errors(cluster: Cluster) -> None:
    before = cluster.run(total_of_ranks, 3, 1)
    answers = cluster.run("test_oracles:fail_on", 3, (0, 2), expect_errors=True)
    assert [getattr(a, "type", a) for a in answers] == ["ValueError", "fine", "ValueError"]
    assert answers[2].message == "rank 2 says no"
    assert cluster.run(total_of_ranks, 3, 1) == before  # the same processes


def test_cluster_survives_errors_and_hangs() -> None:
    pool = Cluster(1)
    try:
        with pytest.raises(ClusterError, match=r"(?s)failed on 1 of 1 ranks.*rank 0 says no.*in fail_on"):
            pool.run(fail_on, 1, (0,))
        (first,) = pool.run(total_of_ranks, 1, 1)
        with pytest.raises(ClusterError, match=r"(?s)not every rank answered.*rank 0: no answer"):
            pool.run(hang, 1, timeout_s=0.5)
        (second,) = pool.run(total_of_ranks, 1, 1)
        assert first[:2] == second[:2] == (1, 1) and first[2] != second[2]  # new processes each time
    finally:
        pool.stop()


if __name__ == "__main__":
    for case in CASES:
        for N in case.workers:
            if case.hinges_on_rounding(N):
                print(f"{case.name}: with {N} workers rounding decides; give the case another seed")
