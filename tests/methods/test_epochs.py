"""Warm-ups in epochs: read, written, refused, and resolved to optimizer steps when the length of an epoch is known."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cluster import Cluster
from heard import Heard
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from workers import digest, flat, sentence_of, tensors_of, through_a_file

import thinwire
from thinwire import DGC, GradientDropping, GTopK, PerLayer


@pytest.mark.parametrize("kind", [DGC, GTopK, GradientDropping])
@pytest.mark.parametrize(("text", "steps"), [
    ("4 epochs", 40), ("1 epoch", 10), ("0.5 epochs", 5), (".25 epoch", 2), ("1.5epochs", 15), ("  2  Epochs ", 20),
])  # fmt: skip
def test_epochs_become_steps(kind: Any, text: str, steps: int) -> None:
    method = kind(warmup=text)
    assert method.in_steps(10) == kind(warmup=steps)
    assert method.in_steps(10).in_steps(None) == kind(warmup=steps)  # it is a number now
    assert thinwire.parse_method(f"{method.name}:warmup={text}").in_steps(10) == kind(warmup=steps)


@pytest.mark.parametrize("method", [
    DGC(warmup="4 epochs"), GTopK(warmup="0.5 epochs", density=0.01),
    PerLayer({"a*": DGC(warmup="4 epochs"), "b*": "gtopk:warmup=1 epoch", "*": "dense"}),
])  # fmt: skip
def test_epochs_are_written_as_they_are_read(method: thinwire.Method) -> None:
    assert "epoch" in str(method) and "epoch" in repr(method)
    assert thinwire.parse_method(str(method)) == method == thinwire.parse_method(method.in_full)


def test_members_of_a_mixture_have_their_own() -> None:
    shared = DGC(warmup="4 epochs")
    mixed = PerLayer({"a*": shared, "b*": "gtopk:warmup=1 epoch", "c*": "dgc:warmup=7", "d*": shared, "*": "dense"})
    assert [getattr(one, "warmup", None) for one in mixed.in_steps(10).members] == [40, 10, 7, 40, None]
    said = sentence_of(ValueError, lambda: mixed.in_steps(None))
    assert said.startswith('dgc: warmup="4 epochs" needs the length of an epoch: give steps_per_epoch=len(loader)')


BAD = [
    "4 epoch s", "-1 epochs", "0 epochs", "0.0 epochs", "epochs", "4", "4 steps", "four epochs", "1e1 epochs",
    "nan epochs", "4.5.1 epochs", "",
]  # fmt: skip


@pytest.mark.parametrize("text", BAD)
def test_what_is_no_number_of_epochs_is_refused(text: str) -> None:
    said = sentence_of(ValueError, lambda: DGC(warmup=text))
    assert 'epochs such as "4 epochs"' in said and repr(text) in said
    if text not in ("4", ""):
        sentence_of(ValueError, lambda: thinwire.parse_method(f"dgc:warmup={text}"))


def test_epochs_that_are_less_than_a_step_are_refused() -> None:
    said = sentence_of(ValueError, lambda: DGC(warmup="0.01 epochs").in_steps(10))
    assert 'warmup="0.01 epochs" is less than one of 10 steps per epoch' in said


def made(group: dist.ProcessGroup, method: Any, **options: Any) -> tuple[DDP, Any, Any]:
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 3)), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, thinwire.attach(model, optimizer, method, **options)


def train(group: dist.ProcessGroup, loop: tuple[DDP, Any, Any], steps: range) -> None:
    model, optimizer, _ = loop
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank(group))
        optimizer.zero_grad()
        model(torch.randn(4, 20, generator=generator)).square().mean().backward()
        optimizer.step()


def in_loops(group: dist.ProcessGroup) -> None:
    epochs, steps = "dgc:warmup=2 epochs,dense_below=0", "dgc:warmup=8,dense_below=0"
    handler, log = Heard(), logging.getLogger("thinwire")
    log.addHandler(handler)
    try:
        one, other = made(group, epochs, steps_per_epoch=4), made(group, steps)
        brief = made(group, "dgc:warmup=1 epoch", steps_per_epoch=4)  # an epoch may be this short
    finally:
        log.removeHandler(handler)
    brief[2].detach()
    assert not handler.sentences
    assert str(one[2].method) == steps == str(other[2].method)
    for loop in (one, other):
        train(group, loop, range(6))
    assert torch.equal(flat(one[0].module), flat(other[0].module))

    saved = through_a_file(one[2].state_dict())
    assert "warmup=8" in saved["method"]
    again = made(group, epochs, steps_per_epoch=4)
    again[0].module.load_state_dict(one[0].module.state_dict())
    again[1].load_state_dict(one[1].state_dict())
    again[2].load_state_dict(saved)
    for loop in (one, again):
        train(group, loop, range(6, 11))
    assert torch.equal(flat(one[0].module), flat(again[0].module))
    assert digest(*tensors_of(one[2].state_dict())) == digest(*tensors_of(again[2].state_dict()))

    one[2].switch("gtopk:warmup=5 epochs")
    assert str(one[2].method) == "gtopk:warmup=20"
    said = sentence_of(ValueError, lambda: other[2].switch("gtopk:warmup=5 epochs"))
    assert "give steps_per_epoch=len(loader)" in said and str(other[2].method) == steps
    model = DDP(nn.Linear(3, 3), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for make in (
        lambda: thinwire.attach(model, optimizer, "dgc:warmup=4 epochs"),
        lambda: thinwire.Reducer(model.named_parameters(), "dgc:warmup=4 epochs", group, optimizer),
    ):
        said = sentence_of(ValueError, make)
        assert said.startswith('dgc: warmup="4 epochs" needs the length of an epoch')
    reducer = thinwire.Reducer(model.named_parameters(), "gtopk:warmup=4 epochs", group, optimizer, steps_per_epoch=3)
    assert str(reducer.method) == "gtopk:warmup=12"
    reducer.detach()
    for loop in (one, other, again):
        loop[2].detach()


def test_a_loop_with_epochs_is_one_with_their_steps(cluster: Cluster) -> None:
    cluster.run(in_loops, 2)


def test_epochs_without_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert str(thinwire.attach(model, optimizer, "dgc:warmup=4 epochs", steps_per_epoch=5).method) == "dgc:warmup=20"
    assert "steps_per_epoch" in sentence_of(
        ValueError, lambda: thinwire.attach(model, optimizer, "dgc:warmup=4 epochs")
    )
    assert str(thinwire.attach(model, optimizer).method) == "dense"
