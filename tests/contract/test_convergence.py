"""Every method learns real data as well as dense, in four processes, from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from command import command, run_of

import thinwire

# Every method at settings that suit 432 steps of a 118 thousand parameter model: warm-ups over four of 24 epochs,
# and local modes averaged about once an epoch.
CONVERGING = (
    "dense:dtype=bf16",
    "dgc:density=0.01,warmup=72",
    "gtopk:density=0.01,warmup=72",
    "terngrad",
    "blocksign",
    "dropping:density=0.01",
    "dropping:density=0.01,local=sum,sync_every=20",
    "dropping:density=0.01,local=partial,sync_every=20",
    "dropping:density=0.01,local=error,sync_every=20",
    "signsgd",
)


@pytest.fixture(scope="module")
def converged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run of the recipe as it ships over all methods; its folder."""
    folder = tmp_path_factory.mktemp("converged") / "run"
    compared = ",".join(CONVERGING)
    done = command(
        "thinwire", "train", "--recipe", "digits", "--workers", "4", "--method", "dense", "--compare", compared,
        "--out", str(folder), timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    print(done.stdout[done.stdout.index("digits: ") :])
    return folder


def test_converging_methods_are_all_methods() -> None:
    of_steps = {name for name, kind in thinwire.METHODS.items() if kind().outer_rule is None}
    assert {spec.partition(":")[0] for spec in ("dense", *CONVERGING)} == of_steps - {"noop", "perlayer"}


@pytest.mark.timeout(960)
def test_dense_learns_the_digits(converged: Path) -> None:
    assert run_of(converged, "dense")["metric"] > 98


@pytest.mark.timeout(960)
@pytest.mark.parametrize("spec", CONVERGING)
def test_method_ends_within_one_point_of_dense(converged: Path, spec: str) -> None:
    dense, run = run_of(converged, "dense"), run_of(converged, spec)
    assert run["metric"] >= dense["metric"] - 1.0
    assert run["bytes_sent"] < dense["bytes_sent"] / 1.9
