"""`thinwire train --in-process`: workers that are threads do what worker processes do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import data_folders
import pytest
import torch
from command import command

import thinwire
from thinwire.engine.local_gradients import averaged
from thinwire.lab.recipes import RECIPES
from thinwire.lab.recipes.digits import Digits
from thinwire.lab.recipes.events import Epoch, Event
from thinwire.lab.recipes.loop import TrainingPlan, evaluate
from thinwire.lab.recipes.threads import ThreadTraining
from thinwire.transport import ThreadNet, ThreadWorld

SPECS = (
    "gtopk:density=0.01",
    "dense",
    "dgc:density=0.02",
    "terngrad",
    "blocksign",
    "dropping:density=0.05,local=partial,sync_every=20",
    "powersgd:rank=2",
)


def trained(folder: Path, *more: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The epochs and the summary of three workers on the digits."""
    method, *others = SPECS
    done = command(
        "thinwire",
        "train", "--workers", "3", "--epochs", "2", "--method", method, "--compare", ",".join(others), "--out",
        str(folder), *more,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    return [line for line in lines if line["kind"] == "epoch"], {run["spec"]: run for run in summary["runs"]}


def test_in_process_run_learns_and_counts_what_processes_do(tmp_path: Path) -> None:
    epochs, summary = trained(tmp_path / "processes")
    thread_epochs, thread_summary = trained(tmp_path / "threads", "--in-process")
    assert len(epochs) == len(thread_epochs) == 2 * len(SPECS)
    for one, other in zip(epochs, thread_epochs, strict=True):
        assert one["spec"] == other["spec"]
        assert other["loss"] == pytest.approx(one["loss"], rel=2e-3), one["spec"]
        assert abs(other["metric"] - one["metric"]) < 1.5, one["spec"]
    for spec in SPECS:
        # Processes exchange bucket by bucket and compare their pace: a few headers and bytes more.
        assert thread_summary[spec]["bytes_sent"] == pytest.approx(summary[spec]["bytes_sent"], rel=0.02), spec
    assert json.loads((tmp_path / "threads" / "config.json").read_text())["in_process"] is True


def test_in_process_run_repeats_and_every_rank_has_random_numbers_of_its_own(tmp_path: Path) -> None:
    folder = data_folders.write_all(tmp_path)

    def losses() -> list[float]:
        found: list[float] = []
        world = ThreadWorld(2, 60, one_at_a_time=True)

        def report(event: Event) -> None:
            if isinstance(event, Epoch):
                found.append(event.loss)

        def work(net: ThreadNet) -> list[float]:
            recipe = RECIPES["an4-gru"](folder)
            recipe.set("batch_size", "4")
            training = ThreadTraining(recipe, "dgc:density=0.1", TrainingPlan(2, 3), net, report)
            training.run(None, 0, [], stop=lambda: False)
            return [float(p.detach().double().sum()) for p in training.module.parameters()]

        first, second = world.run(work)
        assert first == second, "replicas must be equal"
        return found

    torch.manual_seed(0)
    once = losses()
    torch.manual_seed(1)
    assert losses() == once


def test_in_process_run_cannot_be_resumed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"in_process": True, "recipe": "digits", "workers": 2}))
    done = command("thinwire", "train", "--resume", str(folder))
    assert done.returncode == 2 and "keeps no checkpoints" in done.stderr and "Traceback" not in done.stderr


def test_in_process_run_answers_an_exclude_of_nothing_with_one_sentence(tmp_path: Path) -> None:
    done = command(
        "thinwire", "train", "--workers", "2", "--epochs", "1", "--in-process", "--method", "dgc:exclude=nothing.*"
    )
    assert done.returncode != 0 and "matches no parameter" in done.stderr and "Traceback" not in done.stderr


def test_precision_of_a_recipe_is_set_or_refused_with_one_sentence(tmp_path: Path) -> None:
    folder = data_folders.write_all(tmp_path)
    recipe = RECIPES["mnist-lenet"](folder)
    recipe.set("precision", "bf16")
    module = recipe.placed(recipe.model())
    loss = recipe.loss(module, next(recipe.test_batches(rank=0, world=1)))
    assert loss.dtype == torch.float32 and next(module.parameters()).dtype == torch.float32
    weights = [p for p in module.parameters() if p.dim() == 4]
    assert weights and all(p.is_contiguous(memory_format=torch.channels_last) for p in weights)
    with pytest.raises(ValueError, match="precision must be one of fp32, bf16"):
        recipe.set("precision", "fp8")


def test_weights_that_lie_channels_last_fit_ddps_buckets(tmp_path: Path) -> None:
    """A real DDP takes their gradients as they lie, and learns what threads without one learn."""
    folder = data_folders.write_all(tmp_path)
    losses = []
    for name, more in (("processes", ()), ("threads", ("--in-process",))):
        done = command(
            "thinwire",
            "train", "--recipe", "cifar10-resnet20", "--data", str(folder), "--workers", "2", "--epochs", "2",
            "--set", "precision=bf16,batch_size=10,lr=0.01", "--method", "dgc:density=0.1,dense_below=64",
            "--out", str(tmp_path / name), *more,
        )  # fmt: skip
        assert done.returncode == 0 and "strides" not in done.stderr, done.stderr
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        losses.append([line["loss"] for line in lines if line["kind"] == "epoch"])
    assert len(losses[0]) == 2 and losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize(("interval", "averages"), [("500", True), ("none", False)])
def test_workers_that_are_never_averaged_are_judged_by_their_own_models(interval: str, averages: bool) -> None:
    recipe = Digits()
    method = thinwire.parse_method(f"dropping:local=partial,sync_every={interval}")
    modules = []
    for seed in range(2):
        torch.manual_seed(seed)
        modules.append(recipe.model().eval())
    with torch.no_grad():
        mean = recipe.model().eval()
        for parameter, one, other in zip(*(m.parameters() for m in (mean, *modules)), strict=True):
            parameter.copy_((one + other) / 2)
        judged = [mean, mean] if averages else modules
        scores = [recipe.score(judged[r], batch) for r in range(2) for batch in recipe.test_batches(rank=r, world=2)]
    expected = recipe.judge(*(sum(column) for column in zip(*scores, strict=True)))

    def judge(net: ThreadNet) -> float:
        module = modules[net.rank]
        return evaluate(recipe, module, method, net, lambda: averaged(list(module.parameters()), net))

    found = ThreadWorld(2).run(judge)
    assert found == [expected, expected]
