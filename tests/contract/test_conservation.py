"""Nothing is ever lost: what was applied and what is kept, servers included, add up to what was put in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import workers
from cluster import Cluster
from means import mean_of
from torch import Tensor
from workers import Run, noise

import thinwire
from thinwire.engine.context import ExchangeContext, Hyper
from thinwire.engine.layout import Layout
from thinwire.methods import Method
from thinwire.transport import ThreadNet, ThreadWorld

STEPS = 50
NUMELS = {"a": 300, "b": 40, "c": 4200, "d": 7, "e": 1}
RATES = [0.1, 0.1, 0.05, 0.2, 0.01]  # of step t: RATES[t % 5]


def context_of(layout: Layout, step: int, hyper: Hyper) -> ExchangeContext:
    weights = tuple(torch.zeros(segment.numel) for segment in layout.segments)
    return ExchangeContext(layout, step, (hyper,) * len(layout.segments), weights)


def buckets_of(method: Method, several: bool) -> list[Layout]:
    """The model's parameters as DDP would hand them over: one exchange, or several of them, not in model order."""
    rows = [
        (name, i, torch.Size([numel, 1] if i % 2 == 0 else [numel])) for i, (name, numel) in enumerate(NUMELS.items())
    ]
    parts = (rows[3:], rows[1:3], rows[:1]) if several else (rows,)
    return [method.layout(part, model=rows) for part in parts]


class Ledger:
    """One rank's books, in float64: what entered, what came out, and what is kept after the last step."""

    def __init__(self, net: ThreadNet, method: Method, several: bool, hyper: Hyper) -> None:
        self.net, self.hyper = net, hyper
        self.aggregator: Any = method.aggregator(net, True)
        assert not (several and self.aggregator.whole_model)
        self.layouts = buckets_of(method, several)
        self.entered = {name: torch.zeros(n, dtype=torch.float64) for name, n in NUMELS.items()}
        self.applied = {name: torch.zeros(n, dtype=torch.float64) for name, n in NUMELS.items()}
        self.last: dict[str, Tensor] = {}

    def step(self, t: int) -> None:
        memory, compensate = self.aggregator.memory, self.aggregator.memory.compensate
        for layout in self.layouts:
            context = context_of(layout, t, self.hyper)
            before = {s.name: memory.state.named["residual"].get(s.name) for s in layout.segments}
            before = {name: 0.0 if e is None else e.double() for name, e in before.items()}

            def watched(context: ExchangeContext, *arguments: Any, before: dict[str, Any] = before) -> Any:
                x, candidates = compensate(context, *arguments)  # residual + what enters
                for segment in context.layout.segments:
                    self.entered[segment.name] += x[segment.span].double() - before[segment.name]
                return x, candidates

            memory.compensate = watched
            grad = torch.cat([noise((s.numel,), self.net.rank, t, s.name) for s in layout.segments])
            mean = mean_of(self.aggregator, context, grad)
            memory.compensate = compensate
            for segment in layout.segments:
                self.applied[segment.name] += mean[segment.span].double()
                self.last[segment.name] = mean[segment.span].clone()


def keep_books(net: ThreadNet, method: Method, several: bool, hyper: Hyper) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What entered on this rank, what was applied, this rank's share of what is left, and the last mean."""
    torch.set_num_threads(1)
    ledger = Ledger(net, method, several, hyper)
    for t in range(STEPS):
        ledger.step(t)
    rest = ledger.aggregator.leftover(NUMELS, dict.fromkeys(NUMELS, 0.1))
    flats = [
        torch.cat([vectors[name] for name in NUMELS]) for vectors in (ledger.entered, ledger.applied, rest, ledger.last)
    ]
    return flats[0], flats[1], flats[2].double(), flats[3]


def check_books(method: Method, N: int, several: bool = False, momentum: float = 0.9, nesterov: bool = False) -> Tensor:
    hyper = Hyper(0.1, momentum, nesterov)
    results = ThreadWorld(N).run(lambda net: keep_books(net, method, several, hyper))
    entered = sum(r[0] for r in results) / N
    kept = sum(r[2] for r in results) / N
    torch.testing.assert_close(results[0][1] + kept, entered, rtol=0, atol=1e-6 * float(entered.abs().max()) + 2e-5)
    assert kept.abs().max() > 0.1, "nothing was left out: this run shows nothing"
    for result in results:  # and every rank applied the same bits
        assert torch.equal(result[1], results[0][1]) and torch.equal(result[3], results[0][3])
    return results[0][1]


DGCS = [
    (thinwire.DGC(density=0.01, dense_below=0, values="fp32", factor_masking=True), 7, False),
    (thinwire.DGC(density=0.02, dense_below=0, values="fp16", indices="delta16", factor_masking=True), 3, True),
    (thinwire.DGC(density=0.02, dense_below=50, values="bf16", factor_masking=True), 5, True),
    (thinwire.DGC(density=0.05, dense_below=0, values="int8", factor_masking=False), 2, True),
    (thinwire.DGC(density=0.05, dense_below=0, values="int4", factor_masking=True), 4, False),
    (thinwire.DGC(density=0.05, dense_below=0, values="int2", scope="chunk"), 3, False),
    (thinwire.DGC(density=0.05, dense_below=50, values="int2", factor_masking=True), 1, True),
    (thinwire.DGC(density=0.02, dense_below=0, values="fp32", scope="chunk"), 4, True),
    (
        thinwire.DGC(density=0.02, dense_below=0, clip_norm=3.0, indices="int32", values="fp32", factor_masking=True),
        8,
        False,
    ),
    (
        thinwire.DGC(density=0.02, selection="sampled", dense_below=0, warmup=20, values="fp32", factor_masking=True),
        16,
        False,
    ),
    (thinwire.DGC(density=0.02, momentum_correction=False, values="fp32"), 1, True),
]
GTOPKS = [
    (thinwire.GTopK(density=0.01), 16),
    (thinwire.GTopK(density=0.02, values="fp16"), 7),
    (thinwire.GTopK(density=0.02, values="bf16", exclude=("a",)), 5),
    (thinwire.GTopK(density=0.02, values="int8"), 8),
    (thinwire.GTopK(density=0.02, values="int8", indices="int32"), 3),
    (thinwire.GTopK(density=0.02, values="int4"), 6),
    (thinwire.GTopK(density=0.02, values="int2"), 5),
    (thinwire.GTopK(density=0.02, momentum_correction=True, dense_below=50), 2),
    (thinwire.GTopK(density=0.02, warmup=20), 1),
]
BLOCKSIGNS = [
    (thinwire.BlockSign(dense_below=1), 16, False),
    (thinwire.BlockSign(block=64, dense_below=1), 6, False),
    (thinwire.BlockSign(topology="server", dense_below=1), 5, True),
    (thinwire.BlockSign(block=64, topology="server", dense_below=1), 3, False),
    (thinwire.BlockSign(dense_below=1), 8, True),
    (thinwire.BlockSign(block=1000, dense_below=1), 1, True),
    (thinwire.BlockSign(two_way=False, dense_below=1), 2, False),
]


@pytest.mark.parametrize("method, N, several", DGCS, ids=str)
def test_dgc_loses_nothing(method: Method, N: int, several: bool) -> None:
    check_books(method, N, several, nesterov=N % 2 == 1)


@pytest.mark.parametrize("method, N", GTOPKS, ids=str)
def test_global_topk_loses_nothing(method: Method, N: int) -> None:
    check_books(method, N)


@pytest.mark.parametrize("method, N", [
    (thinwire.GradientDropping(density=0.01), 7),
    (thinwire.GradientDropping(density=0.01, momentum_correction=True, warmup=20), 5),
    (thinwire.GradientDropping(density=0.05), 16),
    (thinwire.GradientDropping(density=0.05, scope="chunk", values="int2"), 2),
], ids=str)  # fmt: skip
def test_gradient_dropping_loses_nothing(method: Method, N: int) -> None:
    check_books(method, N)


@pytest.mark.parametrize(
    "method",
    [thinwire.DGC(density=0.02, dense_below=0, values="fp32", factor_masking=True), thinwire.BlockSign(dense_below=1)],
    ids=str,
)
def test_several_buckets_apply_the_same_bits_as_one(method: Method) -> None:
    assert torch.equal(check_books(method, 3, several=True), check_books(method, 3, several=False))


def follow_lemma(net: ThreadNet, method: Method, several: bool, nesterov: bool) -> tuple[Tensor, Tensor, Tensor]:
    """x_t, where SGD with this rank's gradients alone would be, and this rank's share of the errors times the rate."""
    torch.set_num_threads(1)
    aggregator: Any = method.aggregator(net, True)
    numel = sum(NUMELS.values())
    x, wanted, velocity = (torch.zeros(numel, dtype=torch.float64) for _ in range(3))
    spans, start = {}, 0
    for name, n in NUMELS.items():
        spans[name], start = slice(start, start + n), start + n
    for t in range(STEPS):
        eta = RATES[t % len(RATES)]
        for layout in buckets_of(method, several):
            context = context_of(layout, t, Hyper(eta, 0.9, nesterov))
            parts = {s.name: noise((s.numel,), net.rank, t, s.name) for s in layout.segments}
            mean = mean_of(aggregator, context, torch.cat(list(parts.values())))
            for s in layout.segments:
                span = spans[s.name]
                velocity[span] = 0.9 * velocity[span] + parts[s.name].double()
                q = parts[s.name].double() + 0.9 * velocity[span] if nesterov else velocity[span]
                wanted[span] -= eta * q
                x[span] -= eta * mean[s.span].double()
    rest = aggregator.leftover(NUMELS, dict.fromkeys(NUMELS, eta))
    return x, wanted, eta * torch.cat([rest[name] for name in NUMELS]).double()


@pytest.mark.parametrize("method, N, several", BLOCKSIGNS, ids=str)
def test_blocksign_error_corrected_iterate_follows_sgd(method: Method, N: int, several: bool) -> None:
    """Lemmas 1 and 3 over steps whose rates change: x_t - eta (server's error + mean of workers') is SGD's iterate."""
    results = ThreadWorld(N).run(lambda net: follow_lemma(net, method, several, nesterov=N % 2 == 1))
    corrected = results[0][0] - sum(r[2] for r in results) / N
    wanted = sum(r[1] for r in results) / N
    torch.testing.assert_close(corrected, wanted, rtol=1e-5, atol=1e-4)
    assert (results[0][0] - wanted).abs().max() > 0.05
    assert all(torch.equal(r[0], results[0][0]) for r in results)


PROCESS_METHODS = {
    "heavy": [
        thinwire.DGC(density=0.02, factor_masking=False, values="int8"),
        thinwire.GTopK(density=0.02, momentum_correction=True, values="bf16"),
        thinwire.BlockSign(dense_below=1),
    ],
    "plain": [thinwire.GTopK(density=0.02, values="int8"), thinwire.GradientDropping(density=0.02)],
    "nesterov": [thinwire.BlockSign(block=100, topology="server", dense_below=1)],
}


@pytest.mark.parametrize("optimizer", PROCESS_METHODS)
def test_five_processes_plus_their_leftover_are_where_plain_ddp_is(cluster: Cluster, optimizer: str) -> None:
    """Constant pulls: parameters - rate x (what detach returns) are exactly what dense SGD has, after 50 steps."""
    methods = PROCESS_METHODS[optimizer]
    runs = [Run(method, optimizer, STEPS, trajectory=False) for method in [None, *methods]]
    for reference, *others in cluster.run(workers.train, 5, runs):
        for method, other in zip(methods, others, strict=True):
            apart = (other["final"] - reference["final"]).abs().max()
            assert apart > 0.01, f"{method} left nothing out"
            whole = other["final"] - workers.LR * other["leftover"]
            torch.testing.assert_close(
                whole, reference["final"], rtol=1e-4, atol=1e-4, msg=lambda found, method=method: f"{method}: {found}"
            )
