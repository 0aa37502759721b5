"""Real Gloo processes through thinwire.attach follow the NumPy simulations."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cluster import Cluster
from oracles import dropping
from oracles.cases import CASES, DENSE, NESTEROV_DECAY, ONE_CYCLE_GROUPS, Case, follow
from oracles.optimizers import SGD, Adam
from oracles.problem import SharpProblem

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


# Of every method one with momentum, one with Nesterov momentum and weight decay, and what acts on a step as a whole.
IN_PASSES = [DENSE] + [case for case in CASES if case.name in (
    "DGC-plain", "DGC-nesterov, weight decay, no masking", "DGC-nesterov, weight decay that waits", "DGC-clip",
    "GTopK-momentum", "GTopK-masking, decay directly", "GTopK-nesterov", "GTopK-adam",
    "TernGrad-no clip", "TernGrad-server", "BlockSign-nesterov", "BlockSign-one way",
    "SignSGD-signum", "SignSGD-signum, nesterov, weight decay",
    "GradientDropping-momentum", "GradientDropping-correction", "GradientDropping-partial",
)]  # fmt: skip
IN_LOOPS = [(loop, {}) for loop in ("TwoLosses", "Scaled", "Sharp", "Adversarial")]
IN_LOOPS += [("TwoLosses", {"find_unused_parameters": True}), ("Adversarial", {"bucket_cap_mb": 1e-4})]


@pytest.mark.parametrize(
    ("loop", "ddp_options"), IN_LOOPS, ids=lambda value: value if isinstance(value, str) else "-".join(value)
)
@pytest.mark.parametrize("case", IN_PASSES, ids=lambda case: case.name)
def test_several_backward_passes_follow_the_simulation_of_one(
    cluster: Cluster, case: Case, loop: str, ddp_options: dict[str, object]
) -> None:
    """The simulations know of one gradient per step; what the passes sum up to, or what counts of them, is the same."""
    case = replace(case, steps=10)
    if loop == "Sharp":
        case = replace(case, problem=SharpProblem(seed=case.problem.seed))
    follow(cluster, case, 3, ddp_options, loop=loop)


@pytest.mark.parametrize("N", [1, 2, 5])
@pytest.mark.parametrize("optimizer", [NESTEROV_DECAY, ONE_CYCLE_GROUPS, Adam()])
def test_plain_ddp_follows_the_dense_simulation(cluster: Cluster, optimizer: SGD | Adam, N: int) -> None:
    """No thinwire here: problem, optimizers, schedules and the processes are right by themselves."""
    follow(cluster, Case("dense", dropping, None, optimizer, {"density": 1.0}), N, {})
