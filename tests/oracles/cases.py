"""Every method with its options under some optimizer: real processes follow what the simulations say."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from oracles import blocksign, dgc, dropping, gtopk, real, selection, signsgd, terngrad
from oracles.optimizers import SGD, Adam
from oracles.problem import Params, Problem

if TYPE_CHECKING:
    from cluster import Cluster

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
    oracle: ModuleType | SimpleNamespace
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
        last bit; then float32 and float64 rightly part. Such data are no test: `python -m oracles.cases`, in this
        folder's parent, finds cases that need another seed.
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
        ("every chunk's", DECAY, {**ALL, "factor_masking": False, "scope": "chunk", "density": 0.02}, WIDE),
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
        ("every chunk's, warmup", NESTEROV, {"density": 0.02, "scope": "chunk", "warmup": 6}, WIDE),
        ("partial, some dense", HEAVY, {"density": 0.1, "dense_below": 20, "local": "partial", "sync_every": 7}),
        ("balanced, sum, some dense", DECAY,
         {"density": 0.1, "scope": "balanced", "dense_below": 20, "local": "sum", "sync_every": 7}),
        ("each tensor's, error, exclude, warmup", NESTEROV,
         {"density": 0.05, "scope": "tensor", "exclude": ("out.*",), "local": "error", "sync_every": 7, "warmup": 12}),
    ], values="fp32"),
]  # fmt: skip


def _dense(problem: Problem, N: int, steps: int, optimizer: SGD | Adam) -> list[Params]:
    return dense(problem, N, optimizer)[:steps]


DENSE = Case("Dense", SimpleNamespace(simulate=_dense), "Dense", NESTEROV_DECAY)


def of_rank(snapshot: Params | list[Params], rank: int) -> Params:
    """Parameters of one worker: simulations whose workers differ give a list."""
    return snapshot[rank] if isinstance(snapshot, list) else snapshot


def distance(a: list[Any], b: list[Any], N: int) -> float:
    """The largest difference of two trajectories."""
    pairs = [(of_rank(x, r), of_rank(y, r)) for x, y in zip(a, b, strict=True) for r in range(N)]
    return max(float(np.abs(x[name] - y[name]).max()) for x, y in pairs for name in x)


def dense(problem: Problem, N: int, optimizer: SGD | Adam) -> list[Params]:
    """Synchronous training on the mean gradient."""
    w, step, trajectory = problem.initial(), optimizer.start(), []
    for t in range(STEPS):
        g = [problem.gradient(w, r, t) for r in range(N)]
        step(w, {name: np.mean([x[name] for x in g], axis=0) for name in w}, t)
        trajectory.append(selection.copy(w))
    return trajectory


def follow(
    cluster: Cluster, case: Case, N: int, ddp_options: dict[str, Any], last: bool = False, loop: str = "Loop"
) -> None:
    expected = case.simulate(N)
    args = (case.problem, case.steps, case.optimizer, case.method, case.options, ddp_options, loop)
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


if __name__ == "__main__":
    for case in CASES:
        for N in case.workers:
            if case.hinges_on_rounding(N):
                print(f"{case.name}: with {N} workers rounding decides; give the case another seed")
