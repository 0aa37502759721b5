"""A state that is not what was saved, or not of this model, is refused whole on all ranks; orders in memory are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cluster import Cluster
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from workers import Run, Training, digest, own_part, sentence_of, tensors_of, through_a_file

import thinwire

State = dict[str, Any]


def vectors(state: State, kind: str = "residual") -> dict[str, Tensor]:
    return own_part(state)["aggregator"]["memory"][kind]


def put(state: State, name: str, value: Any) -> None:
    vectors(state)[name] = value


def changed(state: State, room: str, kind: str) -> None:
    (name, value), *rest = own_part(state)["aggregator"][room][kind]
    own_part(state)["aggregator"][room][kind] = ((name, value * 2), *rest)


def flip(state: State) -> None:
    vectors(state)["c"].view(torch.uint8)[4321] ^= 1


DAMAGES: dict[str, Callable[[State], Any]] = {
    "no residual of 'c' in its memory": lambda s: vectors(s).pop("c"),
    "residual of 'c' was changed or damaged": flip,
    "residual of 'a' was changed": lambda s: vectors(s)["a"].fill_(float("nan")),
    "'a' is [1, 1200] float32, and was saved as [1200] float32": lambda s: put(s, "a", vectors(s)["a"][None]),
    "'b' is [50] float64": lambda s: put(s, "b", vectors(s)["b"].double()),
    "no residual of 'd'": lambda s: put(s, "d", "text"),
    "state's residual is a NoneType": lambda s: own_part(s)["aggregator"]["memory"].update(residual=None),
    "state's memory is a int": lambda s: own_part(s)["aggregator"].update(memory=7),
    "'step' is a str": lambda s: s.update(step="3"),
    "'step' is a float": lambda s: s.update(step=3.0),
    "of rank": lambda s: s.update(step=s["step"] + 1),
    "changed or damaged": lambda s: changed(s, "memory", "rates"),
    "was changed or damaged after": lambda s: changed(s, "collective", "rates"),
    "residual of 'nowhere'": lambda s: put(s, "nowhere", torch.zeros(3)),
    "'seal'": lambda s: own_part(s).pop("seal"),
    "list of tensors cannot be read": lambda s: own_part(s).update(tensors=5),
}


def damaged_on_one_rank(group: dist.ProcessGroup) -> None:
    """Rank 1's state is damaged, in every way; rank 0's is whole."""
    rank, training = dist.get_rank(group), Training(group, Run("blocksign:dense_below=1", "heavy"))
    for step in range(3):
        training.step(step)
    wire = training.wire
    assert wire is not None
    good = through_a_file(wire.state_dict())
    before = digest(*tensors_of(good))
    for words, damage in DAMAGES.items():
        state = copy.deepcopy(good)
        if rank == 1:
            damage(state)
        said = sentence_of(ValueError, lambda state=state: wire.load_state_dict(state))
        assert words in said and (rank == 1 or said.startswith("on rank 1: ")), said
        assert digest(*tensors_of(wire.state_dict())) == before and wire.state_dict()["step"] == 3, words
    training.step(3)  # nothing hangs, and it goes on
    wire.load_state_dict(good)
    assert digest(*tensors_of(wire.state_dict())) == before
    wire.detach()


def test_state_damaged_on_one_rank_is_refused_on_all_and_changes_nothing(cluster: Cluster) -> None:
    cluster.run(damaged_on_one_rank, 2)


def saved_not_finite(group: dist.ProcessGroup) -> str:
    """A residual that held an infinity when it was saved, so that its hash is right."""
    training = Training(group, Run("dgc:density=0.02", "heavy"))
    training.step(0)
    assert training.wire is not None
    training.wire.reducer.running.kept("residual")["a"].fill_(float("inf"))
    state = training.wire.state_dict()
    said = sentence_of(ValueError, lambda: training.wire.load_state_dict(state))
    training.wire.detach()
    return said


def test_state_that_was_saved_not_finite_is_refused(cluster: Cluster) -> None:
    for said in cluster.run(saved_not_finite, 2):
        assert "the state's residual of 'a' holds an inf or a nan" in said


def differing_replicas(group: dist.ProcessGroup) -> None:
    training = Training(group, Run("dgc:density=0.02", "heavy"))
    training.step(0)
    wire = training.wire
    assert wire is not None
    state = wire.state_dict()
    training.step(1)
    before = digest(*tensors_of(wire.state_dict()))
    if dist.get_rank(group) == 1:  # as where rank 0 alone loaded the model
        with torch.no_grad():
            training.module.b.add_(1.0)
    said = sentence_of(thinwire.ReplicaError, lambda: wire.load_state_dict(state))
    assert "'b' (rank 0 against rank 1)" in said and "load the same model on every rank" in said
    assert wire.state_dict()["step"] == 2 and digest(*tensors_of(wire.state_dict())) == before
    wire.detach()


def test_load_compares_the_replicas_and_refuses_where_they_differ(cluster: Cluster) -> None:
    cluster.run(differing_replicas, 2)


# ------------------------------------------------------------------------------------------------ shapes and orders


def convolution(group: dist.ProcessGroup, spec: str, memory_format: Any, fold: bool = False) -> tuple[Any, ...]:
    torch.manual_seed(0)
    # 4,608 elements: the sharded servers cut it.
    module = nn.Sequential(nn.Conv2d(16, 32, 3), nn.Flatten(), nn.Linear(128, 3)).to(memory_format=memory_format)
    if fold:
        module[0] = nn.Conv2d(16, 16, (6, 3))
    model = DDP(module, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return model, optimizer, thinwire.attach(model, optimizer, spec)


def saved_in(group: dist.ProcessGroup, spec: str, memory_format: Any) -> tuple[State, dict[str, Tensor]]:
    model, optimizer, wire = convolution(group, spec, memory_format)
    for step in range(3):
        generator = torch.Generator().manual_seed(100 * dist.get_rank(group) + step)
        optimizer.zero_grad()
        model(torch.randn(4, 16, 4, 4, generator=generator)).square().mean().backward()
        optimizer.step()
    state = through_a_file(wire.state_dict())
    return state, wire.detach()


def loaded_in(group: dist.ProcessGroup, spec: str, memory_format: Any, states: list[State]) -> dict[str, Tensor]:
    _, _, wire = convolution(group, spec, memory_format)
    wire.load_state_dict(states)
    return wire.detach()


@pytest.mark.parametrize("spec", ["dgc:density=0.02", "blocksign:dense_below=1"])
def test_state_is_permuted_to_the_memory_order_of_the_model(cluster: Cluster, spec: str) -> None:
    """What was not sent is the same, element by element, also where servers keep stretches of it."""
    formats = (torch.contiguous_format, torch.channels_last)
    for saving, loading in (formats, formats[::-1]):
        saved = cluster.run(saved_in, 2, spec, saving)
        for found in cluster.run(loaded_in, 2, spec, loading, [state for state, _ in saved]):
            for name, before in saved[0][1].items():
                assert torch.equal(found[name], before), name
            assert bool(saved[0][1]["0.weight"].any())


def refused_in(group: dist.ProcessGroup, states: list[State]) -> list[str]:
    said = []
    for options in ({"memory_format": torch.contiguous_format, "fold": True}, {"memory_format": torch.channels_last}):
        _, _, wire = convolution(group, "blocksign:dense_below=1", **options)
        said.append(sentence_of(ValueError, lambda wire=wire: wire.load_state_dict(states[dist.get_rank(group)])))
        wire.detach()
    return said


def test_state_of_another_shape_or_with_a_cut_server_in_another_order_is_refused(cluster: Cluster) -> None:
    saved = cluster.run(saved_in, 2, "blocksign:dense_below=1", torch.contiguous_format)
    for shape, order in cluster.run(refused_in, 2, [state for state, _ in saved]):
        assert "another model" in shape and "'0.weight' is [32, 16, 3, 3] in the state and [16, 16, 6, 3]" in shape
        assert "another memory order" in order and "list of all ranks' states" in order
