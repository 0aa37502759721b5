"""The examples of frameworks run as they are written, for an epoch."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from launched import Launcher
from paths import ROOT


def run(script: str, folder: Path, **settings: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **settings}
    done = subprocess.run(
        [*command, str(ROOT / "examples" / script)], cwd=folder, env=environment, capture_output=True, text=True,
        timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize(
    ("library", "script"),
    [("transformers", "hf_trainer.py"), ("lightning", "lightning_digits.py"), ("accelerate", "accelerate_digits.py")],
)
def test_example_of_a_framework(tmp_path: Path, library: str, script: str) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    printed = run(script, tmp_path, EPOCHS="1")
    assert re.search(r"4[45] steps: sent .* instead of .*x less", printed)


def test_example_of_adamw_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    whole = run("adamw_amp.py", tmp_path, FILE="whole.pt", STEPS="100")
    with closing(Launcher(ROOT / "examples" / "adamw_amp.py")) as launcher:
        launcher.ranks(2, tmp_path, FILE="halves.pt", STEPS="50")
        resumed, _ = launcher.ranks(2, tmp_path, FILE="halves.pt", STEPS="100")
    assert "step 50: " not in resumed
    told = [re.search(r"step 100: loss ([\d.]+);.*\n(test accuracy .*)", printed) for printed in (whole, resumed)]
    assert told[0] is not None and told[1] is not None and told[0].groups() == told[1].groups()
