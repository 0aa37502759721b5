"""Every integration trains with its real library, resumes to the bit, and hands out the ranks' mean.

Four processes train and resume; two try the rest as well.
"""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from launched import Launcher

STEPS, SAVED = 12, 6
START = 2.3  # loss of ten classes before the first step
NEAR = 0.15  # of dense's loss; twelve steps with 5 % of the gradient, without a warm-up


def needs(library: str) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")


def launcher_for(library: str, script: str) -> Iterator[Launcher]:
    needs(library)
    with closing(Launcher(Path(__file__).with_name(script))) as launcher:
        yield launcher


@pytest.fixture(scope="module")
def hugging_face() -> Iterator[Launcher]:
    yield from launcher_for("transformers", "huggingface_rank.py")


@pytest.fixture(scope="module")
def lightning() -> Iterator[Launcher]:
    yield from launcher_for("lightning", "lightning_rank.py")


@pytest.fixture(scope="module")
def accelerate() -> Iterator[Launcher]:
    yield from launcher_for("accelerate", "accelerate_rank.py")


def found_by(launcher: Launcher, ranks: int, folder: Path) -> list[dict[str, Any]]:
    """What every rank of the script found; rank 0 has written it down."""
    launcher.ranks(ranks, folder)
    found: list[dict[str, Any]] = json.loads((folder / "found.json").read_text())
    return found


def check_training(ranks: list[dict[str, Any]]) -> None:
    for name in ("plain", "whole", "resumed"):
        assert len({found[name]["digest"] for found in ranks}) == 1, f"{name}: ranks differ"
    for found in ranks:
        stats = found.get("stats") or found["whole"]["stats"]
        assert stats["steps"] == STEPS, "one exchange per optimizer step"
        assert stats["world_size"] == len(ranks)
        assert stats["bytes_sent"] < stats["dense_bytes_sent"] / 10
        assert found["whole"]["loss"] < START and abs(found["whole"]["loss"] - found["plain"]["loss"]) < NEAR
        assert found["resumed"]["digest"] == found["whole"]["digest"] != found["plain"]["digest"]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_trainer_of_hugging_face(hugging_face: Launcher, tmp_path: Path, ranks: int) -> None:
    everybody = found_by(hugging_face, ranks, tmp_path)
    check_training(everybody)
    for found in everybody if ranks == 2 else ():
        assert found["clip_norm"] == 0.5 and found["clipped"]["clips"] == 0.5  # for whoever reads the arguments later
        assert found["clipped"]["digest"] != found["whole"]["digest"]
        assert "there is no checkpoint" in found["told"] and "resume=False" in found["told"]
        assert found["begun at"] == STEPS - SAVED
        assert found["saved is mean"] and found["evaluated is mean"] and found["evaluations"]
        assert found["the second trainer's"]
        assert found["interrupted"] and found["begun anew"] and found["clipping is back"]
        assert found["the best is kept"] and found["the best"] == f"checkpoint-{SAVED}"


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_trainer_of_lightning(lightning: Launcher, tmp_path: Path, ranks: int) -> None:
    everybody = found_by(lightning, ranks, tmp_path)
    check_training(everybody)
    for found in everybody if ranks == 2 else ():
        assert found["clip_norm"] == 0.5 and found["clipped"]["clips"] == 0.5
        assert found["begun at"] == STEPS - SAVED
        assert found["saved is mean"] and found["saved alike"]
        assert found["validated is mean"] and all(found["validated is mean"])
        assert found["weights are mean"] and found["begins anew"] and found["left out"]
        assert "dgc" in found["told"] and "resume=False" in found["told"]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_loop_of_accelerate(accelerate: Launcher, tmp_path: Path, ranks: int) -> None:
    everybody = found_by(accelerate, ranks, tmp_path)
    check_training(everybody)
    for found in everybody if ranks == 2 else ():
        assert found["drifting"]["saved is mean"]
        assert abs(found["default"]["loss"] - found["plain"]["loss"]) < 1e-5  # dense is plain DDP
        assert found["tied is mean"] and found["steps again"] == 2


class Wire:
    """As much of a wire as the clipping asks for."""

    def __init__(self, method: Any) -> None:
        self.method, self.switched = method, list[Any]()

    def switch(self, method: Any) -> None:
        self.switched.append(method)


def test_a_trainers_clipping_goes_to_methods_that_can_clip(caplog: pytest.LogCaptureFixture) -> None:
    import thinwire
    from thinwire.integrations.trainer_clipping import takes_clipping

    with caplog.at_level(logging.INFO, "thinwire"):
        wire = Wire(thinwire.DGC())
        assert takes_clipping(wire, 1.0) and wire.switched == [thinwire.DGC(clip_norm=1.0)]
        assert "clips at a norm of 1" in caplog.text
    own = Wire(thinwire.DGC(clip_norm=0.3))
    assert takes_clipping(own, 1.0) and not own.switched, "the user's own threshold stays"
    for method, norm in ((thinwire.Dense(), 1.0), (thinwire.DGC(), None), (thinwire.DGC(), 0.0)):
        other = Wire(method)
        assert not takes_clipping(other, norm) and not other.switched


ALONE = {
    "hugging_face": """
import huggingface_rank as rank
from thinwire.integrations.huggingface import ThinwireCallback
plain = rank.trained("plain", max_grad_norm=0.1)
ours = rank.trained("ours", ThinwireCallback("dgc"), max_grad_norm=0.1)
again = rank.trained("ours", ThinwireCallback("dgc"), max_grad_norm=0.1, resume=str(rank.FOLDER / "ours/checkpoint-6"))
print(plain["digest"] == ours["digest"] == again["digest"])
""",
    "lightning": """
import lightning_rank as rank
from thinwire.integrations.lightning import ThinwireCallback
options = {"gradient_clip_val": 0.1, "strategy": "auto"}
plain = rank.trained("plain", **options)
ours = rank.trained("ours", ThinwireCallback("dgc"), **options)
print(plain["digest"] == ours["digest"])
""",
}


@pytest.mark.parametrize("library", list(ALONE))
def test_one_process_without_a_group_trains_as_without_thinwire(
    request: pytest.FixtureRequest, tmp_path: Path, library: str
) -> None:
    launcher: Launcher = request.getfixturevalue(library)
    printed = launcher.alone(ALONE[library], tmp_path)
    assert printed.splitlines()[-1] == "True"
