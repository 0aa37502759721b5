"""Native kernels where the system gives no more threads."""

from __future__ import annotations

import subprocess
import sys

import pytest

from thinwire.kernels.native import library

PROGRAM = """
import os, resource, sys, threading
import torch
from thinwire.kernels import native
from thinwire.kernels.native import library

def results():
    x = torch.randn(300_001, generator=torch.Generator().manual_seed(1))
    residual = torch.zeros_like(x)
    native.scatter_add([residual], [0], [(torch.arange(0, 300_000, 3), x[:100_000])] * 2, 0.5)
    scales = native.sign_scales(x, ((300_001, 1),))
    return residual, scales, native.select_topk(x, 5000), native.first_nonfinite([x], 3.0)

torch.set_num_threads(4)
expected = results()
if os.geteuid() == 0:  # whose number of threads has no limit
    os.setuid(65534)
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
try:
    threading.Thread(target=print).start()
    sys.exit(77)  # the limit does not hold here
except RuntimeError:
    pass
for one, other in zip(results(), expected):
    assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit on threads is Linux's")
def test_kernels_go_on_where_no_thread_can_be_started() -> None:
    if (why := library.why_not()) is not None:
        pytest.skip(why)
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    if run.returncode == 77:
        pytest.skip("this system starts threads whatever the limit")
    assert run.returncode == 0, run.stderr
