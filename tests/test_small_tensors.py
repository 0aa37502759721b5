"""By default BlockSign and TernGrad leave small and one-dimensional tensors dense, as DGC does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import thinwire
from thinwire.cli._job import Job
from thinwire.lab.recipes.histograms import GradientTap, histograms
from thinwire.transport import ThreadNet, ThreadWorld


def test_histograms_of_a_model_without_ternary_tensors() -> None:
    def work(net: ThreadNet) -> set[str]:
        module = nn.Linear(8, 4)
        tap = GradientTap(module)
        module(torch.ones(2, 8)).sum().backward()
        found = histograms("terngrad", thinwire.TernGrad(), module, tap, 0, net)
        return set(found.by_tag) if found is not None else set()

    assert ThreadWorld(2).run(work) == [{"weight/original", "weight/averaged"}, set()]


# --- runs that began with other defaults --------------------------------------------------------------


OLD = {"blocksign": "blocksign:dense_below=1", "terngrad": "terngrad:dense_below=0"}


@pytest.mark.parametrize("unknown", ["", "dense_below=0,"])
def test_a_run_that_began_with_the_old_defaults_goes_on_with_them(tmp_path: Path, unknown: str) -> None:
    """Also where TernGrad did not know the option when it began."""
    job = Job.checked(recipe="digits", specs=list(OLD), epochs=2, seed=0, device="cpu", out=tmp_path)
    then = [thinwire.parse_method(spec).in_full for spec in OLD.values()]  # what such a folder has
    kept = [method.replace(unknown, "") if method.startswith("terngrad") else method for method in then]
    config = {**json.loads(json.dumps(job.config)), "workers": 2, "methods": kept}
    (tmp_path / "config.json").write_text(json.dumps(config))
    again, _ = Job.resumed(tmp_path, timeout_s=1.0)
    assert again.specs == tuple(OLD) and list(again.methods) == then
    assert [thinwire.parse_method(method) for method in again.methods] == list(map(thinwire.parse_method, OLD.values()))
