"""A script in one process without a process group: the wire does nothing and says so once."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from cluster import Cluster
from torch import nn
from workers import Run, Training, flat, noise, sentence_of

import thinwire


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> torch.Tensor:
    for step in range(steps):
        optimizer.zero_grad()
        model(noise((5, 6), 0, step, "x")).square().mean().backward()
        optimizer.step()
    return flat(model)


@pytest.mark.parametrize("method", ["dgc", "dropping:local=partial", "auto", "local:every=2"])
def test_training_is_as_without_a_wire(method: str, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = made()
    wire = thinwire.attach(model, optimizer, method, check_replicas_every=2, guard="warn")
    with wire.averaged():
        pass
    wire.switch("dense")
    wire.load_state_dict(wire.state_dict())
    assert torch.equal(train(model, optimizer), train(*made()))
    assert wire.stats.steps == 0 and wire.stats.ratio is None and "nothing sent" in str(wire.snapshot(False))
    assert isinstance(wire, thinwire.Wire) and wire.attached and "without a process group" in repr(wire)
    assert wire.detach() == {} and not wire.attached
    assert "detached" in sentence_of(thinwire.DetachedError, wire.state_dict)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "there is no process group" in record.getMessage()


def test_everything_public_of_a_wire_is_there() -> None:
    model, optimizer = made()
    wire = thinwire.attach(model, optimizer, "dgc")
    inherited = {name for name in vars(thinwire.Wire) if not name.startswith("_")} - set(vars(type(wire)))
    assert not inherited, "these are a real wire's"


def test_mistakes_are_told_as_on_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = made()
    adam = torch.optim.Adam(model.parameters())
    for words, arguments in (
        ("did you mean", (model, optimizer, "dcg")),
        ("momentum_correction", (model, adam, "dgc")),
        ("torch optimizer", (model, None, "dgc")),
        ("matches no parameter", (model, optimizer, "dgc:exclude=zz*")),
        ("does not own", (model, torch.optim.SGD(nn.Linear(2, 2).parameters()), "dgc")),
        ("the model first", (optimizer, model, "dgc")),
    ):
        assert words in sentence_of(ValueError, lambda arguments=arguments: thinwire.attach(*arguments))
    assert "dcg" in sentence_of(ValueError, lambda: thinwire.attach(model, optimizer, "dense").switch("dcg"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    text = sentence_of(ValueError, lambda: thinwire.attach(model, optimizer, "dgc"))
    assert "one of 2" in text and "init_process_group" in text


def states(group: object) -> dict[str, object]:
    training = Training(group, Run("dgc:density=0.1", "heavy"))
    training.step(0)
    state = training.wire.state_dict()
    alone = {"format": state["format"], "method": state["method"]}
    text = sentence_of(ValueError, lambda: training.wire.load_state_dict(alone))
    assert "without a process group" in text and "without loading it" in text
    training.wire.detach()
    return state


def test_states_of_a_group_are_refused_and_a_group_refuses_its_state(cluster: Cluster, tmp_path: Path) -> None:
    model, optimizer = made()
    wire = thinwire.attach(model, optimizer, "dgc:density=0.1")
    (state,) = cluster.run(states, 1)
    assert wire.state_dict() == {key: state[key] for key in ("format", "method")}
    for given in (state, [state]):
        assert "torchrun" in sentence_of(ValueError, lambda given=given: wire.load_state_dict(given))
    assert "torchrun" in sentence_of(ValueError, lambda: wire.load_checkpoint(tmp_path))
