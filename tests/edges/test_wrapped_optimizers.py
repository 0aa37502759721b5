"""Models and optimizers as Accelerate and Lightning's Fabric wrap them, in processes as torchrun starts them."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch
from launched import Launcher
from torch import nn

from thinwire.engine.several_optimizers import seen_through
from thinwire.torch_private import uncompiled

TESTS = Path(__file__).parents[1]
SCRIPT = TESTS / "support" / "wrapped_training.py"


def needs(library: str) -> object:
    return pytest.importorskip(library, reason=f"{library} is not installed, so its wrappers cannot be tried")


@pytest.mark.parametrize(("library", "package"), [("accelerate", "accelerate"), ("fabric", "lightning.fabric")])
def test_wrapped_optimizers_follow_plain_ddp(tmp_path: Path, library: str, package: str) -> None:
    needs(package)
    with closing(Launcher(SCRIPT, package)) as launcher:
        printed = launcher.ranks(2, tmp_path, library)
    assert f"{library}: as plain DDP" in printed[0]


def test_lightnings_optimizer_is_seen_through() -> None:
    needs("lightning.pytorch")
    from lightning.pytorch.core.optimizer import LightningOptimizer

    own = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    assert seen_through(LightningOptimizer(own)) is own


def test_an_optimizer_with_groups_of_its_own_is_no_wrapper() -> None:
    """Such as one of half-precision weights around one of their full-precision copies."""
    inner = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    outer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    outer.optimizer = inner  # type: ignore[attr-defined]
    assert seen_through(outer) is outer and seen_through(inner) is inner and seen_through(None) is None
    outer.optimizer = outer  # type: ignore[attr-defined]
    assert seen_through(outer) is outer


def test_fabrics_module_is_seen_through() -> None:
    needs("lightning.fabric")
    from lightning.fabric import Fabric

    net = nn.Linear(2, 2)
    fabric = Fabric(accelerator="cpu", devices=1)
    model = fabric.setup(net)
    assert model is not net and uncompiled(model) is net
    assert uncompiled(torch.compile(model, backend="eager")) is net
