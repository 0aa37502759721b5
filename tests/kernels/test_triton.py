"""The Triton kernels equal the reference; without a GPU they run in Triton's interpreter, on small tensors."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from paths import ROOT

HERE = Path(__file__).resolve().parent


def test_triton_kernels_equal_the_reference() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    if not torch.cuda.is_available() and tuple(map(int, numpy.__version__.split(".")[:2])) >= (2, 4):
        pytest.skip(f"Triton's interpreter does not work with numpy {numpy.__version__}, only with versions before 2.4")
    chosen = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(HERE / "triton_checks.py")],
        env={**os.environ, **chosen, "THINWIRE_KERNELS": "gpu", "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
