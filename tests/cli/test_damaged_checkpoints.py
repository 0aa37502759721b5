"""`thinwire train --resume` with a damaged checkpoint: one sentence that names the file, and the way out works."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from command import done, started, until


@pytest.mark.timeout(300)
def test_resume_with_a_damaged_part_says_which_and_goes_on_from_the_one_before(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train = ["train", "--workers", "2", "--epochs", "6", "--method", "dgc:density=0.05"]
    first = started(*train, "--out", str(run))
    until(first, "epoch 3/6")
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    steps = sorted(int(path.name.split("-")[1].split(".")[0]) for path in (run / "checkpoint").glob("0-*.rank1of2.pt"))
    part = run / "checkpoint" / f"0-{steps[-1]}.rank1of2.pt"
    whole = part.read_bytes()
    part.write_bytes(whole[:-30_000] + bytes(20_000) + whole[-10_000:])
    _, err = done(started("train", "--resume", str(run)), 2)
    assert err == (
        f"thinwire: the checkpoint '{part}' cannot be read: it is damaged; delete that file to go on from the "
        f"checkpoint of step {steps[-2]}, the one before.\n"
    )
    part.unlink()
    out, _ = done(started("train", "--resume", str(run)))
    assert f"goes on after step {steps[-2]}" in out
    (outcome,) = json.loads((run / "summary.json").read_text())["runs"]
    assert outcome["steps"] == 108
