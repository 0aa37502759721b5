"""The simulations by themselves: gradients, optimizers, random numbers, and what the papers prove."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from oracles import blocksign, dgc, dropping, gtopk, random_numbers, selection, signsgd, terngrad
from oracles.cases import (
    ADAMW,
    DEAD,
    HEAVY,
    NESTEROV,
    NESTEROV_DECAY,
    ONE_CYCLE_GROUPS,
    PLAIN,
    STEPS,
    WIDE,
    dense,
    distance,
)
from oracles.optimizers import SGD, Adam
from oracles.problem import Params, Problem


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
def test_dropping_with_local_gradients_parts_and_meets_again(local: str) -> None:
    trajectory = dropping.simulate(Problem(), 3, STEPS, HEAVY, density=0.1, local=local, sync_every=7)
    for t, nodes in enumerate(trajectory):
        apart = max(np.abs(nodes[0][name] - nodes[r][name]).max() for name in nodes[0] for r in range(3))
        assert apart == 0 if t % 7 == 6 else apart > 1e-4


@pytest.mark.parametrize("local", ["partial", "error"])
def test_dropping_on_one_node_with_its_own_gradient_is_dense(local: str) -> None:
    options: dict[str, Any] = {"density": 0.1, "local": local, "sync_every": 7}
    nodes = dropping.simulate(Problem(), 1, STEPS, NESTEROV, **options)
    if local == "partial":
        assert distance(nodes, dense(Problem(), 1, NESTEROV), 1) < 1e-12
    first = dropping.simulate(Problem(), 1, 1, NESTEROV, **options)
    assert distance(first, dense(Problem(), 1, NESTEROV)[:1], 1) < 1e-12
