"""Copies of an attached model, of its optimizer and its module are plain ones, as of a model without thinwire."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import torch
import torch.distributed as dist
from cluster import SIZE, Cluster
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel
from workers import close, flat, noise, sentence_of

import thinwire

METHODS = ("dgc:density=0.1", "dropping:density=0.1,local=partial", "auto")


def saved(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def step(model: nn.Module, optimizer: Any, at: int) -> None:
    optimizer.zero_grad()
    model(noise((6, 8), dist.get_rank(), at, "x")).square().mean().backward()
    optimizer.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def copied(group: dist.ProcessGroup) -> None:
    """DDP can be copied on the default group alone, with thinwire and without."""
    for method in METHODS:
        model = DDP(nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 2)))
        optimizer = sgd(model)
        wire = thinwire.attach(model, optimizer, method)
        for at in range(2):
            step(model, optimizer, at)
        trains_plainly(copy.deepcopy(model), method)
        trains_plainly(saved(model), method)
        trains_plainly(DDP(copy.deepcopy(model.module)), method)
        average = AveragedModel(model)
        average.update_parameters(model)
        with torch.no_grad():
            close(average(torch.ones(1, 8)), model.module(torch.ones(1, 8)), method)
        again = copy.deepcopy(model)
        other = thinwire.attach(again, sgd(again), method)
        step(again, sgd(again), 0)
        assert other.stats.steps == 1 and wire.stats.steps == 2 and wire.attached
        other.detach()
        step(model, optimizer, 2)
        assert wire.stats.steps == 3
        wire.detach()


def trains_plainly(model: DDP, method: str) -> None:
    """A step of the copy is the one of a model that was never attached."""
    plain = DDP(nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 2)))
    plain.load_state_dict(model.state_dict())
    for each in (model, plain):
        step(each, sgd(each), 7)
    close(flat(model), flat(plain), method)


def test_copies_of_an_attached_model_are_plain_models(cluster: Cluster) -> None:
    cluster.run(copied, SIZE)


def parts(group: dist.ProcessGroup) -> None:
    model = DDP(nn.Linear(8, 4), process_group=group)
    optimizer = sgd(model)
    wire = thinwire.attach(model, optimizer, "dgc:density=0.5,dense_below=0")
    step(model, optimizer, 0)
    for other in (copy.deepcopy(optimizer), saved(optimizer)):
        (weight, _), before = other.param_groups[0]["params"], flat(model)
        weight.grad = torch.ones_like(weight)
        for _ in range(2):
            other.step()
        assert other.param_groups[0]["momentum"] == 0.9 and other.state[weight]["momentum_buffer"].max() > 1
        assert torch.equal(flat(model), before)
    for thing in (wire, wire.reducer):
        for action in (copy.copy, copy.deepcopy, pickle.dumps, saved):
            text = sentence_of(TypeError, lambda action=action, thing=thing: action(thing))
            assert "state_dict()" in text
    step(model, optimizer, 1)
    assert wire.stats.steps == 2
    wire.detach()


def test_optimizers_can_be_copied_and_wires_say_that_they_cannot(cluster: Cluster) -> None:
    cluster.run(parts, 1)
