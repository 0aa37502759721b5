"""Ranks that die, links that are cut, workers that are killed: short versions of faults.py and soak.py.

None of these tests asserts how fast something is; a rank that hangs is ended after minutes and fails its test.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fault_links
import faults
import pytest
import soak
from paths import TESTS

from thinwire.lab import emulation

HANG_S = 180.0
Run = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def zygote() -> Iterator[Run]:
    """Runs a case of zygote.py on n ranks, which may die, and returns how each of them ended."""
    command = [sys.executable, str(TESTS / "support" / "zygote.py")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None

    def run(case: str, ranks: int, **arguments: Any) -> list[dict[str, Any]]:
        print(
            json.dumps({"case": case, "ranks": ranks, "timeout_s": HANG_S, **arguments}), file=process.stdin, flush=True
        )
        answer: list[dict[str, Any]] = json.loads(process.stdout.readline())
        return answer

    yield run
    process.stdin.close()
    process.wait()


@pytest.mark.parametrize(
    ("method", "ranks", "victim", "how"),
    [
        ("dgc", 3, 2, "kill"),
        ("gtopk", 4, 3, "kill"),
        ("terngrad:dense_below=0", 3, 1, "hang"),
        ("blocksign:dense_below=1", 3, 0, "fail"),
    ],
)
def test_lost_rank_ends_all_others_with_one_error_that_names_it(
    zygote: Run, method: str, ranks: int, victim: int, how: str
) -> None:
    rows = zygote("lose", ranks, method=method, victim=victim, how=how)
    assert rows[victim]["exit_code"] == (-9 if how == "kill" else 1), rows[victim]
    for rank, row in enumerate(rows):
        if rank == victim:
            continue
        assert row["exit_code"] == 1, row  # the error left backward() and ended the script
        told = json.loads(row["out"])
        assert told["type"] == "ExchangeError" and told["peers"] == [victim] and told["step"] == 4, told
        assert told["stage"] in told["sentence"] and f"rank {victim}" in told["sentence"]
        assert told["stage"] == ("agree on scalers" if method.startswith("terngrad") else "exchange frames")
        assert told["threads"] == [] and row["err"].count("Traceback") == 1
        if how == "fail":
            assert "OSError: for this test" in told["sentence"]


def test_call_that_only_some_ranks_make_is_named(zygote: Run) -> None:
    told = [json.loads(row["out"]) for row in zygote("apart", 2)]
    assert all("all ranks must make the same calls" in one["sentence"] for one in told), told
    assert all("averaged(), which all ranks must enter" in one["sentence"] for one in told), told


ORDERS = {
    "detach destroy": 0,
    "destroy detach": 0,
    "detach": 0,
    "destroy": 0,
    "": 0,
    "forget": 0,
    "forget destroy": 0,
    "detach exit": 3,
    "exit": 3,
    "backward": 3,
    "raise": 1,
    "destroy raise": 1,
}


@pytest.mark.parametrize("order", ORDERS)
def test_processes_leave_cleanly_in_any_order(zygote: Run, order: str) -> None:
    for row in zygote("leave", 2, actions=order.split()):
        assert row["exit_code"] == ORDERS[order], row
        if "raise" in order:
            assert row["err"].count("Traceback") == 1 and "an error of the user's" in row["err"]
        else:
            assert row["out"] == row["err"] == ""


def test_killed_workers_go_on_where_the_last_checkpoint_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "STEPS", 60)
    (row,) = faults.run_kills("agent", 3, ["dgc:density=0.05,dense_below=8"], 0, tmp_path)
    assert row["tried"] == 3 and row["runs"] == row["runs_bit_equal"]


REASON = emulation.why_not()


@pytest.mark.skipif(REASON is not None, reason=f"no clusters here: {REASON}")
def test_cut_link_is_survived_or_ends_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_links, "HOSTS", 2)
    monkeypatch.setattr(fault_links, "STEPS", 60)
    dice = random.Random(0)
    survived = fault_links.cut_shortly("blocksign:dense_below=1", 1, dice)
    assert survived["tried"] == 1 and survived["bit_equal"], survived
    ended = fault_links.cut_too_long("gtopk:density=0.05", dice)
    assert ended["named_by_all_others"] and 0 not in ended["exit_codes"], ended


def test_soak_of_120_steps_grows_nothing_and_keeps_replicas_equal() -> None:
    result = soak.soak(steps=120, workers=2)
    assert result["replicas_equal"] and result["evaluation_clean"], result
    assert result["growth"]["threads"] <= 0 and result["growth"]["files"] <= 0, result
