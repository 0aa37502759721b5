"""A run is resumed with the method that it began with, option by option, whatever the defaults are by then."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_train_more import done, metrics, thinwire, until
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as library
from thinwire import cli
from thinwire.cli._job import Job
from thinwire.lab import peers

SPECS = ["dgc", "dgc:exclude=a.*+b.?,clip_norm=0.5,warmup=7", "terngrad:clip_sigma=none", "gtopk:values=int8", "bf16",
         "blocksign:block=64", "dropping:local=sum", "powersgd:rank=2", "signsgd", "noop"]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS)
def test_a_method_in_full_is_the_same_method(spec: str) -> None:
    method = peers.parse(spec)
    again = peers.parse(method.in_full)
    assert again == method and again.in_full == method.in_full
    assert all(f"{option.name}=" in method.in_full for option in fields(method))


def test_exclude_of_nothing_excludes_nothing() -> None:
    assert library.parse_method("dgc:exclude=").exclude == () == library.parse_method("dgc").exclude


def folder_of(tmp_path: Path, **changed: Any) -> Path:
    job = Job.checked(recipe="digits", specs=["dgc", "dense"], epochs=2, seed=0, device="cpu", out=tmp_path)
    config = {**json.loads(json.dumps(job.config)), "workers": 2, **changed}
    (tmp_path / "config.json").write_text(
        json.dumps({k: v for k, v in config.items() if k != "methods" or v is not None})
    )
    return tmp_path


def test_the_folder_keeps_methods_in_full_and_resuming_reads_them(tmp_path: Path) -> None:
    kept = json.loads((folder_of(tmp_path) / "config.json").read_text())
    assert kept["methods"] == [library.DGC().in_full, library.Dense().in_full] and kept["specs"] == ["dgc", "dense"]
    run = folder_of(tmp_path, methods=["dgc:density=0.25,values=fp32", "dense"])  # as if those had been the defaults
    job, workers = Job.resumed(run, timeout_s=1.0)
    # Weight decay waited, and every tensor sent the same share, when there was no option for it.
    assert job.methods[0] == library.DGC(density=0.25, scope="tensor", values="fp32", direct_decay=False).in_full
    assert job.specs == ("dgc", "dense") and workers == 2


@pytest.mark.parametrize(
    ("methods", "words"),
    [
        (None, ["older thinwire, which kept 'dgc dense' without the options", "with that version, or train anew"]),
        (["dgc"], ["it names 2 methods, and not as many in full"]),
        (["dgc:zeal=1", "dense"], ["method 'dgc' has no option 'zeal'"]),
    ],
)
def test_a_folder_whose_methods_are_not_certain_is_refused(
    tmp_path: Path, methods: Any, words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    run = folder_of(tmp_path, methods=methods)
    assert cli.run(["train", "--resume", str(run)]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith(f"thinwire: '{run}' cannot be resumed: ") and err.count("\n") == 1
    assert all(word in err for word in words), err


def loaded_from(group: dist.ProcessGroup, spec: str, changes: list[tuple[str, str]]) -> list[str]:
    """Save a wire's state, change the method that it names, and load it: what is said, nothing where it is taken."""
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(8, 8), process_group=group)
    wire = library.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), spec)
    model(torch.ones(2, 8)).sum().backward()
    state, said = wire.state_dict(), []
    for old, new in changes:
        assert old in state["method"]
        try:
            wire.load_state_dict({**state, "method": state["method"].replace(old, new)})
            said.append("")
        except ValueError as error:
            said.append(str(error))
    wire.detach()
    return said


def test_a_state_from_before_an_option_was_added_is_taken(cluster: Any) -> None:
    changes = [
        ("dense_below=0,", ""),
        ("dense_below=0,", "dense_below=9,"),
        ("seed=0", "zeal=0"),
        ("clip_sigma=2.5", ""),
    ]
    for taken, other, unknown, absent in cluster.run(loaded_from, 2, "terngrad:dense_below=0", changes):
        assert taken == "" and absent == ""
        assert "belongs to method terngrad:" in other and "belongs to method terngrad:" in unknown
    idle = [("factor_masking=false", "factor_masking=true")]  # how it was saved when DGC took that, and ignored it
    assert cluster.run(loaded_from, 2, "dgc:momentum_correction=false", idle) == [[""], [""]]
    older = [("direct_decay=false,", "")]
    assert cluster.run(loaded_from, 2, "gtopk", older) == [[""], [""]], "the decay waited when there was no option"
    older.append(("scope=tensor,", ""))
    assert cluster.run(loaded_from, 2, "dgc:scope=tensor,direct_decay=false", older) == [["", ""], ["", ""]]
    added = [(",values=fp32,indices=rice,residual=fp32,dense_below=0,exclude=", ",residual=fp32")]
    assert cluster.run(loaded_from, 2, "dropping:values=fp32", added) == [[""], [""]]
    added = [(added[0][0].replace("fp32,indices", "int8,indices"), added[0][1])]
    for (said,) in cluster.run(loaded_from, 2, "dropping", added):
        assert "values=fp32" in said, "values of 32 bits were the only ones then"
    changes = [("dgc:", "dgc:"), (f"density={library.DGC().density}", "density=0.5")]
    for own, other in cluster.run(loaded_from, 2, library.DGC(warmup=library.ListedWarmup(4)), changes):
        assert own == "", "a schedule has no string that can be read, and is still its own"
        assert other.endswith("attach the state's method (density=0.5)")


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("began", "named"), [("dgc:density=0.006", "dgc"), ("terngrad:dense_below=0", "terngrad")])
def test_a_run_goes_on_with_the_options_it_began_with(tmp_path: Path, began: str, named: str) -> None:
    """An option that was the default when the run began and is not any more: its checkpoint fits no other."""
    run = tmp_path / "run"
    first = thinwire("train", "--workers", "2", "--epochs", "6", "--method", began, "--out", str(run))
    until(first, "epoch 2/6")
    os.killpg(first.pid, signal.SIGINT)
    done(first, 130)
    config = json.loads((run / "config.json").read_text())
    assert config["methods"] == [library.parse_method(began).in_full]
    (run / "config.json").write_text(json.dumps({**config, "specs": [named]}))
    lines = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(lines.replace(json.dumps(began), json.dumps(named)))
    done(thinwire("train", "--resume", str(run)))
    (outcome,) = json.loads((run / "summary.json").read_text())["runs"]
    assert outcome["spec"] == named and outcome["method"] == began and outcome["steps"] == 108
    assert [row["epoch"] for row in metrics(run) if row["kind"] == "epoch"] == [1, 2, 3, 4, 5, 6]
