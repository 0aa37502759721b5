"""Ray Train needs nothing but the line with attach."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from paths import ROOT

HERE = Path(__file__).parent
PROGRAM = """
import sys
import ray, ray_loop
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
folder = sys.argv[1]
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR", _temp_dir=folder + "/ray")
TorchTrainer(
    ray_loop.train, train_loop_config={"folder": folder}, torch_config=TorchConfig(backend="gloo"),
    scaling_config=ScalingConfig(num_workers=2), run_config=RunConfig(storage_path=folder + "/results"),
).fit()
"""


def test_a_trainer_of_ray(tmp_path: Path) -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed: pip install 'ray[train]'")
    folder = Path(tempfile.mkdtemp(prefix="ray-"))  # its sockets' names must be short
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, HERE))), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder)], cwd=tmp_path, env=environment, capture_output=True, text=True,
        timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    ranks = [(folder / str(rank)).read_text().split() for rank in range(2)]
    shutil.rmtree(folder, ignore_errors=True)
    assert ranks[0][0] == ranks[1][0], "ranks differ"
    for _, steps, sent, dense, first, last in ranks:
        assert int(steps) == 20 and int(sent) < float(dense) / 10
        assert float(last) < float(first) / 1.5
