"""States of models of fully_shard: resumed on the same mesh to the bit, and on other meshes with nothing lost."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cluster import Cluster
from sharded import OPTIMIZERS, ShardedTraining, loss_of, mesh_of, network, rows_digest, whole
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel as DDP
from workers import digest, own_part, sentence_of, through_a_file

import thinwire

DGC = thinwire.DGC(density=0.05, dense_below=0, values="fp32")
METHODS: dict[str, Any] = {
    "dgc": DGC,
    "dgc-bf16": thinwire.DGC(density=0.05, dense_below=0, residual="bf16"),
    "gtopk": thinwire.GTopK(density=0.05, dense_below=0),
    "blocksign": thinwire.BlockSign(dense_below=0),
    "terngrad": "terngrad:dense_below=0",
    "mixture": thinwire.PerLayer({"*bias": "dense", "2.*": thinwire.GTopK(density=0.1, dense_below=0), "*": DGC}),
}
SMALL = thinwire.DGC(density=0.05, dense_below=300, values="fp32")  # by whole sizes: 2.weight has 561, a quarter less


def resumed(group: Any, name: str, shape: tuple[int, int], one_file: bool) -> None:
    training = ShardedTraining(mesh_of(*shape), METHODS[name])
    training.train(0, 4)
    saved = training.wire.state_dict(all_ranks=True) if one_file else training.wire.state_dict()
    model, its = ({n: p.detach().clone() for n, p in training.net.named_parameters()}, _copied(training))
    if one_file:
        everybody = [saved]
        dist.broadcast_object_list(everybody, src=0)
        saved = everybody[0]
        assert len([key for key in saved if key.startswith("rank ")]) == 4
    else:
        own_part(saved)
    straight = training.train(4, 7)
    kept = digest(*_vectors(training.wire.state_dict()))
    training.wire.detach()
    again = ShardedTraining(mesh_of(*shape), METHODS[name], seed=3)
    with torch.no_grad():
        for n, parameter in again.net.named_parameters():
            parameter.copy_(model[n])
    again.optimizer.load_state_dict(its)
    again.wire.load_state_dict(through_a_file(saved))
    for mine, theirs in zip(again.train(4, 7), straight, strict=True):
        assert torch.equal(mine, theirs)
    assert digest(*_vectors(again.wire.state_dict())) == kept
    again.wire.detach()


def _copied(training: ShardedTraining) -> Any:
    """The optimizer's state, which the training goes on to change."""
    state = training.optimizer.state_dict()
    values = {
        k: {n: v.clone() if isinstance(v, Tensor) else v for n, v in s.items()} for k, s in state["state"].items()
    }
    return {"state": values, "param_groups": copy.deepcopy(state["param_groups"])}


def _vectors(state: Any) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state]
    values = state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else ()
    return [tensor for value in values for tensor in _vectors(value)]


@pytest.mark.parametrize("name", METHODS)
def test_the_same_mesh_goes_on_to_the_bit(four: Cluster, name: str) -> None:
    four.run(resumed, 4, name, (2, 2), False)


@pytest.mark.parametrize("shape", [(4, 1), (1, 4), (2, 2)])
def test_one_file_of_all_ranks_goes_on_to_the_bit(four: Cluster, shape: tuple[int, int]) -> None:
    four.run(resumed, 4, "dgc", shape, True)


# ----------------------------------------------------------------------------------------------- another mesh


def _left(wire: Any, optimizer: Any, named: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What was not sent, and the momentum, of whole parameters; ends the wire."""
    full = lambda t: t.full_tensor() if hasattr(t, "full_tensor") else t  # noqa: E731
    rest = {name: full(tensor).clone() for name, tensor in wire.detach().items()}
    buffers = {name: optimizer.state[p].get("momentum_buffer") for name, p in named}
    return rest, {name: full(buffer).clone() for name, buffer in buffers.items() if buffer is not None}


class _DdpTraining:
    """The same in DDP, over all four ranks."""

    def __init__(self, group: Any, method: Any, optimizer: str) -> None:
        self.net = network()
        self.model, self.optimizer = DDP(self.net, process_group=group), OPTIMIZERS[optimizer](self.net)
        self.wire = thinwire.attach(self.model, self.optimizer, method)

    def train(self, first: int, last: int) -> list[Tensor]:
        for step in range(first, last):
            self.optimizer.zero_grad()
            loss_of(self.model, dist.get_rank(), step).backward()
            self.optimizer.step()
        return [whole(self.net)]


def _training(group: Any, shape: tuple[int, int] | None, method: Any) -> Any:
    if shape is None:
        return _DdpTraining(group, method, "heavy")
    return ShardedTraining(mesh_of(*shape), method)


def remeshed(group: Any, ways: list[tuple[Any, Any]]) -> None:
    for name in ("dgc", "gtopk", "blocksign", "small", "mixture"):
        method = METHODS.get(name, SMALL)
        for first, second in ways:
            training = _training(group, first, method)
            training.train(0, 5)
            states: list[Any] = [None] * 4
            dist.all_gather_object(states, training.wire.state_dict(), group=group)
            weights = whole(training.net)
            rest, velocity = _left(training.wire, training.optimizer, training.net.named_parameters())
            assert any(tensor.any() for tensor in rest.values()), name

            other = _training(group, second, method)
            _give(other.net, weights)
            other.wire.load_state_dict(through_a_file(states))
            assert other.wire.stats.steps_before == 5
            its = other.wire.state_dict()
            rest_now, velocity_now = _left(other.wire, other.optimizer, other.net.named_parameters())
            where = f"{name}: {first} to {second}"
            assert rest.keys() == rest_now.keys() and velocity_now, where
            for kind, before, now in (("rest", rest, rest_now), ("velocity", velocity, velocity_now)):
                for key, value in now.items():  # momentum that the optimizer kept itself is in its own state
                    torch.testing.assert_close(value, before[key], rtol=1e-5, atol=1e-6, msg=f"{where} {kind} {key}")

            other.wire = _attached(other, group, second, method)
            other.wire.load_state_dict(its)  # this rank's alone: of the new mesh
            other.train(5, 8)
            other.wire.detach()


def _attached(training: Any, group: Any, shape: Any, method: Any) -> Any:
    for state in training.optimizer.state.values():
        state.pop("momentum_buffer", None)
    if shape is None:
        return thinwire.attach(training.model, training.optimizer, method)
    return thinwire.attach(training.net, training.optimizer, method, mesh=training.mesh)


def _give(net: Any, weights: Tensor) -> None:
    """Put whole parameters into a model, sharded or not."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    with torch.no_grad():
        parts = weights.split([p.numel() for p in net.parameters()])
        for parameter, part in zip(net.parameters(), parts, strict=True):
            value = part.view(parameter.shape)
            if isinstance(parameter, DTensor):
                value = distribute_tensor(value.clone(), parameter.device_mesh, parameter.placements)
            parameter.copy_(value)


WAYS: list[tuple[Any, Any]] = [((2, 2), (1, 4)), ((2, 2), (4, 1)), ((4, 1), (2, 2)), ((1, 4), (2, 2)), ((4, 1), (1, 4))]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_another_mesh_takes_up_all_that_was_not_sent(four: Cluster, way: Any) -> None:
    four.run(remeshed, 4, [way])


def test_ddp_and_meshes_take_up_each_other(four: Cluster) -> None:
    four.run(remeshed, 4, [(None, (2, 2)), ((2, 2), None), (None, (4, 1))])


# ------------------------------------------------------------------------------- torch.distributed.checkpoint


def _state(training: ShardedTraining) -> dict[str, Any]:
    model, optim = get_state_dict(training.net, training.optimizer)
    return {"model": model, "optim": optim, "wire": training.wire}


def by_dcp(group: Any, folder: str, shape: tuple[int, int]) -> None:
    training = ShardedTraining(mesh_of(2, 2), DGC)
    training.train(0, 4)
    dcp.save(_state(training), checkpoint_id=folder)
    straight = training.train(4, 7)
    training.wire.detach()

    again = ShardedTraining(mesh_of(*shape), DGC, seed=3)
    state = _state(again)
    if shape == (2, 2):
        dcp.load(state, checkpoint_id=folder)
    else:
        its = again.wire
        del state["wire"]
        dcp.load(state, checkpoint_id=folder)
    set_state_dict(again.net, again.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    if shape != (2, 2):
        its.load_checkpoint(folder)
    found = again.train(4, 7)
    if shape == (2, 2):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, straight, strict=True))
    else:  # other replicas choose other entries
        assert 0 < (found[-1] - straight[-1]).abs().max() < 0.2
    digests = [""] * shape[0]
    dist.all_gather_object(digests, rows_digest(again.net), group=again.mesh.get_group(0))
    assert len(set(digests)) == 1
    assert again.wire.stats.steps == 3 and again.wire.stats.steps_before == 4
    again.wire.detach()


@pytest.mark.parametrize("shape", [(2, 2), (1, 4), (4, 1)])
def test_distributed_checkpoints_resume_on_the_same_mesh_and_on_others(
    four: Cluster, tmp_path: Path, shape: tuple[int, int]
) -> None:
    four.run(by_dcp, 4, str(tmp_path / "saved"), shape)


# ------------------------------------------------------------------------------------------------- mistakes


def refused(group: Any) -> None:
    training = ShardedTraining(mesh_of(2, 2), DGC)
    training.train(0, 3)
    state = training.wire.state_dict()
    everybody: list[Any] = [None] * 4
    dist.all_gather_object(everybody, state, group=group)
    before = digest(*_vectors(state))

    def check(words: list[str], given: Any, wire: Any = training.wire) -> None:
        text = sentence_of(ValueError, lambda: wire.load_state_dict(given))
        assert all(word in text for word in words), f"{words} in {text!r}"

    damaged = copy.deepcopy(state)
    if dist.get_rank() == 3:
        own_part(damaged)["aggregator"]["memory"]["residual"]["2.weight"][0] += 1
    check(["residual of '2.weight'", "changed or damaged"], damaged)
    check(["rank 0 of shard 0", "alone"], everybody[0])
    check(["of shard 1", "were given"], everybody[:3])
    check(["unknown part"], {**state, "rank 0 of shard 7": {}})
    assert digest(*_vectors(training.wire.state_dict())) == before, "something was changed"
    training.train(3, 4)
    training.wire.detach()

    other = ShardedTraining(mesh_of(1, 4), DGC)
    check(["alone", "world_size 2", "list of all ranks' states"], state, other.wire)
    other.wire.detach()


def test_states_that_do_not_fit_are_refused_on_all_ranks_and_change_nothing(four: Cluster) -> None:
    four.run(refused, 4)
