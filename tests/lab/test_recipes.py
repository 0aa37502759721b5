"""Every registered recipe keeps the contract of thinwire.lab.recipes.base, on tiny data in the public formats."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import data_folders
import pytest
import torch
from cluster import Cluster
from data_folders import small
from paths import ROOT
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.lab import peers
from thinwire.lab.recipes import RECIPES, MissingData
from thinwire.lab.recipes.base import samples_in
from thinwire.lab.recipes.data import an4, multi30k, words

SHARED = ROOT.parent / "shared" / "data"
NEED_DATA = [name for name, recipe in RECIPES.items() if recipe.needs_data]
# The same code with a larger model: what trains `ptb-lstm` and `cifar10-resnet20` trains these.
LARGE = ("ptb-lstm-1500", "cifar10-resnet110", "cifar10-vgg16")


pytestmark = pytest.mark.usefixtures("one_thread")


def samples(batches: Iterator[tuple[Tensor, ...]], count: int) -> list[list[list[float]]]:
    """The first `count` batches as their samples: numbers of the first tensor, padding at the end left out."""
    found = []
    for _, batch in zip(range(count), batches, strict=False):
        rows = [row.flatten().tolist() for row in batch[0]]
        for row in rows:
            while row and row[-1] == 0:
                row.pop()
        found.append(rows)
    return found


# ---- the contract


def test_recipes_describe_themselves() -> None:
    assert list(RECIPES) == [
        "digits", "shakespeare", "mnist-lenet", "cifar10-resnet20", "cifar10-resnet110", "cifar10-vgg16",
        "cifar10-cifarnet", "ptb-lstm", "ptb-lstm-1500", "wikitext2-transformer", "multi30k-transformer",
        "multi30k-gru", "an4-gru",
    ]  # fmt: skip
    for name, recipe in RECIPES.items():
        assert recipe.name == name and recipe.summary and recipe.__doc__ and recipe.epochs > 0
        assert recipe.batch_size % 4 == 0, "shared by 4 workers without a rest"
        assert thinwire.parse_method(recipe.default_method)
        assert all(hasattr(recipe, setting) for setting in recipe.settings)


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in LARGE])
def test_recipes_method_excludes_parameters_that_are_there(name: str, folder: Path) -> None:
    names = [name for name, _ in small(name, folder).model().named_parameters()]
    thinwire.parse_method(RECIPES[name].default_method).check_names(names)


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_shares_among_workers_what_one_would_see(name: str, folder: Path) -> None:
    recipe = small(name, folder)
    assert recipe.num_batches(1) == recipe.num_batches(2) >= 2
    whole = samples(recipe.train_batches(1, seed=3, rank=0, world=1), 2)
    first = samples(recipe.train_batches(1, seed=3, rank=0, world=2), 2)
    second = samples(recipe.train_batches(1, seed=3, rank=1, world=2), 2)
    assert [a + b for a, b in zip(first, second, strict=True)] == whole
    assert [len(rows) for rows in whole] == [8, 8]
    assert samples(recipe.train_batches(1, seed=3, rank=1, world=2), 2) == second, "the same again"
    assert samples(recipe.train_batches(2, seed=3, rank=1, world=2), 2) != second, "another epoch"
    assert samples(recipe.train_batches(1, seed=4, rank=1, world=2), 2) != second, "another seed"
    assert sum(1 for _ in recipe.train_batches(1, seed=0, rank=0, world=2)) == recipe.num_batches(2)
    with pytest.raises(ValueError, match="too few for 9 workers"):
        next(recipe.train_batches(1, seed=0, rank=8, world=9))


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in LARGE])
def test_recipe_gives_workers_the_mean_gradient_of_the_global_batch(name: str, folder: Path) -> None:
    recipe = small(name, folder, batch_size=2)
    torch.manual_seed(1)
    model = recipe.model().eval()  # no dropout, no statistics of a batch

    def gradient(rank: int, world: int) -> tuple[Tensor, Tensor]:
        model.zero_grad()
        batch = next(recipe.train_batches(1, seed=0, rank=rank, world=world))
        assert samples_in(batch) == 2 // world
        loss = recipe.loss(model, batch)
        assert loss.shape == () and loss.isfinite()
        loss.backward()
        missing = [key for key, parameter in model.named_parameters() if parameter.grad is None]
        assert not missing
        return loss.detach(), torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    losses, gradients = zip(*(gradient(rank, 2) for rank in range(2)), strict=True)
    loss, whole = gradient(0, 1)
    assert whole.isfinite().all() and whole.norm() > 0
    torch.testing.assert_close(sum(losses) / 2, loss, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(sum(gradients) / 2, whole, rtol=1e-3, atol=float(1e-4 * whole.norm()))


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in LARGE])
@torch.no_grad()
def test_recipe_judges_alike_with_any_number_of_workers(name: str, folder: Path) -> None:
    recipe = small(name, folder)
    torch.manual_seed(2)
    model = recipe.model().eval()
    found = []
    for world in (1, 3):
        totals = torch.zeros(recipe.num_scores, dtype=torch.float64)
        for rank in range(world):
            for batch in recipe.test_batches(rank=rank, world=world):
                scores = recipe.score(model, batch)
                assert len(scores) == recipe.num_scores
                totals += torch.tensor(scores, dtype=torch.float64)
        found.append(totals)
    # Nobody is left out, nobody counts twice; sums of logarithms may differ by rounding.
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-3)
    value = recipe.judge(*found[0].tolist())
    assert math.isfinite(value) and value >= 0


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in LARGE])
def test_recipe_optimizer_and_schedule_cover_a_run(name: str, folder: Path) -> None:
    recipe = small(name, folder)
    parameter = nn.Parameter(torch.ones(3))
    optimizer = recipe.optimizer([parameter], lr_factor=0.5)
    schedule = recipe.schedule(optimizer, 40)
    rates = []
    for _ in range(40):
        parameter.grad = torch.zeros(3)
        optimizer.step()
        rates.append(optimizer.param_groups[0]["lr"])
        schedule.step()
    assert max(rates) <= optimizer.param_groups[0]["initial_lr"] == recipe.lr * 0.5  # type: ignore[attr-defined]
    assert max(rates) > 0.5 * recipe.lr * 0.5 and all(rate > 0 for rate in rates)  # type: ignore[attr-defined]
    assert rates[-1] < 0.2 * max(rates)


# ---- what users get wrong


@pytest.mark.parametrize("name", NEED_DATA)
def test_recipe_without_data_says_what_is_expected_where(name: str, tmp_path: Path) -> None:
    for data, said in ((None, "--data DIR"), (tmp_path, str(tmp_path))):
        with pytest.raises(MissingData, match="get it: ") as caught:
            RECIPES[name](data)
        assert said in str(caught.value) and "\n" not in str(caught.value)


def test_recipe_names_damaged_data(tmp_path: Path) -> None:
    folder = data_folders.write_all(tmp_path)
    for name, path, content in (
        ("cifar10-resnet20", "cifar-10-batches-bin/data_batch_3.bin", b"x" * 100),
        ("mnist-lenet", "MNIST/raw/train-labels-idx1-ubyte", b"x" * 100),
        ("ptb-lstm", "ptb/ptb.train.txt", b""),
        ("multi30k-gru", "multi30k/train.de", b"Ein Hund.\n"),
        ("an4-gru", "an4/transcripts.tsv", b"train\tYES\n"),
    ):
        (folder / path).write_bytes(content)
        with pytest.raises(ValueError, match="it may be damaged") as caught:
            RECIPES[name](folder)
        assert Path(path).name in str(caught.value)


def test_recipe_checks_its_settings() -> None:
    recipe = RECIPES["shakespeare"]()
    recipe.set("batch_size", "64")
    recipe.set("momentum", "0")
    assert recipe.batch_size == 64 and recipe.momentum == 0.0 and RECIPES["shakespeare"].batch_size != 64  # type: ignore[attr-defined]
    assert recipe.optimizer([nn.Parameter(torch.ones(1))], 1.0).param_groups[0]["momentum"] == 0
    with pytest.raises(
        ValueError, match=r"no setting 'batchsize' \(did you mean 'batch_size'\?\); known settings: batch_"
    ):
        recipe.set("batchsize", "64")
    for name, texts, wanted in (
        ("batch_size", ("many", "0", "-4", "2.5"), "a whole number of at least 1"),
        ("lr", ("-1", "nan", "inf", "fast"), "a number of at least 0"),
        ("momentum", ("-0.1",), "a number of at least 0"),
        ("clip_norm", ("0", "-1", "nan"), "a number above 0"),
    ):
        for text in texts:
            with pytest.raises(ValueError, match=f"{name} must be {wanted}, not '{text}'"):
                recipe.set(name, text)
    assert recipe.batch_size == 64
    assert RECIPES["cifar10-vgg16"].read_setting("lr_warmup", "0.25") == 0.25
    for text in ("1.1", "-0.1", "nan", "four"):
        with pytest.raises(ValueError, match=f"lr_warmup must be a share of the run, from 0 to 1, not '{text}'"):
            RECIPES["cifar10-vgg16"].read_setting("lr_warmup", text)
    with pytest.raises(ValueError, match="no setting 'lr_warmup'"):  # its schedule has none
        RECIPES["mnist-lenet"].read_setting("lr_warmup", "0.1")


def test_image_recipes_take_another_solver(folder: Path) -> None:
    recipe = small("mnist-lenet", folder)
    recipe.set("solver", "adam")
    recipe.set("nesterov", "true")
    assert isinstance(recipe.optimizer([nn.Parameter(torch.ones(1))], 1.0), torch.optim.Adam)
    with pytest.raises(ValueError, match="solver must be one of sgd, adam, not 'adams'"):
        recipe.set("solver", "adams")
    with pytest.raises(ValueError, match="nesterov must be true or false, not 'maybe'"):
        recipe.set("nesterov", "maybe")


def test_translation_without_sacrebleu_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs sacrebleu: pip install 'thinwire\[lab\]'"):
        RECIPES["multi30k-gru"](folder)


def test_importing_recipes_reads_no_data() -> None:
    code = """
import json, sys
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
import thinwire.lab.recipes
data = [path for path in opened if path.endswith((".npz", ".xz", ".bin", ".npy"))]
print(json.dumps([data, "sacrebleu" in sys.modules]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    assert json.loads(done.stdout) == [[], False]


# ---- clipping


def test_recipe_clips_before_accumulation_or_the_mean_gradient() -> None:
    recipe = RECIPES["shakespeare"]()
    assert recipe.clip_norm == 0.5
    dgc = recipe.adapted(thinwire.parse_method("dgc:density=0.01"))
    assert str(dgc) == "dgc:density=0.01,clip_norm=0.5"
    own = thinwire.parse_method("dgc:clip_norm=3")
    assert recipe.adapted(own) is own
    dense = thinwire.parse_method("dense")
    assert recipe.adapted(dense) is dense
    for accumulates in ("gtopk", "dropping:local=partial", "blocksign"):
        adapted = str(recipe.adapted(thinwire.parse_method(accumulates)))
        assert set(adapted.replace(":", ",").split(",")) == {*accumulates.replace(":", ",").split(","), "clip_norm=0.5"}
    for stays in ("terngrad", "signsgd", "noop"):
        assert str(recipe.adapted(thinwire.parse_method(stays))) == stays
    parameter = nn.Parameter(torch.zeros(4))
    for method, norm in ((dense, 0.5), (peers.parse("powersgd"), 0.5), (dgc, 20.0), (peers.parse("signsgd"), 20.0)):
        parameter.grad = torch.full((4,), 10.0)
        recipe.clip([parameter], method)
        torch.testing.assert_close(parameter.grad.norm(), torch.tensor(norm))
    plain = RECIPES["digits"]()
    parameter.grad = torch.full((4,), 10.0)
    plain.clip([parameter], dense)
    assert plain.adapted(own) is own and parameter.grad.norm() == 20


# ---- real processes


def train_shakespeare(group: Any, spec: str, steps: int) -> tuple[float, float, list[str]]:
    """A rank's life: the recipe as it ships, on a few batches."""
    recipe = RECIPES["shakespeare"]()
    recipe.set("batch_size", "16")
    torch.manual_seed(0)
    model = DistributedDataParallel(recipe.model(), process_group=group)
    optimizer = recipe.optimizer(model.parameters(), recipe.lr_factor(thinwire.parse_method(spec)))
    schedule = recipe.schedule(optimizer, steps)
    method = recipe.adapted(thinwire.parse_method(spec))
    wire = thinwire.attach(model, optimizer, method)
    losses = []
    batches = recipe.train_batches(1, seed=0, rank=group.rank(), world=group.size())
    for _, batch in zip(range(steps), batches, strict=False):
        optimizer.zero_grad()
        loss = recipe.loss(model, batch)
        loss.backward()
        recipe.clip(model.parameters(), method)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    wire.detach()
    return losses[0], sum(losses[-5:]) / 5, [str(method)]


@pytest.mark.parametrize("spec", ["dense", "dgc:density=0.05,warmup=10"])
def test_shakespeare_learns_on_two_ranks(cluster: Cluster, spec: str) -> None:
    for first, last, _ in cluster.run(train_shakespeare, 2, spec, 40):
        assert first == pytest.approx(math.log(65), rel=0.05)
        assert last < 3.0


# ---- the real files, where they are


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"no real data in {SHARED}")
def test_recipe_reads_real_files_of_the_known_sizes(tmp_path: Path) -> None:
    sets = ["ptb", "multi30k", "an4", "mnist"]
    subprocess.run(
        [sys.executable, SHARED / "unpack.py", tmp_path, *sets], check=True, capture_output=True, timeout=120
    )
    train, test, vocabulary = words.read(words.PTB, tmp_path, "ptb.train.txt", "ptb.test.txt")
    assert (len(train), len(test), len(vocabulary)) == (929_589, 82_430, 10_000)
    assert [len(part) for part in multi30k.read(tmp_path, "train")] == [29_000] * 2
    assert [len(part) for part in an4.read(tmp_path)] == [948, 130]
    recipe: Any = RECIPES["mnist-lenet"](tmp_path)
    assert len(recipe.train_labels) == 60_000 and len(recipe.test_labels) == 10_000
    pixels = recipe.normalised(recipe.train_images)
    assert abs(float(pixels.mean())) < 1e-3 and abs(float(pixels.std()) - 1) < 1e-3
