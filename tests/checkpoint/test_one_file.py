"""Loops that save one file on rank 0: all ranks' parts are in it, for a group of any size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cluster import Cluster
from workers import Run, Training, digest, flat, sentence_of, tensors_of

METHODS = [
    ("heavy", "dgc:density=0.02"),
    ("heavy", "gtopk:density=0.01"),
    ("groups", "blocksign:dense_below=1"),
    ("groups", "blocksign:dense_below=1,topology=server,residual=bf16"),
    ("adam", "terngrad"),
    ("adamw", "dropping:density=0.01"),
]


def bits(training: Training) -> tuple[str, str]:
    assert training.wire is not None
    return digest(flat(training.module)), digest(*tensors_of(training.wire.state_dict()))


def save(group: dist.ProcessGroup, folder: str) -> list[tuple[str, str]]:
    """Rank 0 writes one file half-way, with all that there is; the bits of the end, by method."""
    found = []
    for place, (optimizer, method) in enumerate(METHODS):
        training = Training(group, Run(method, optimizer))
        assert training.wire is not None
        for step in range(3):
            training.step(step)
        state = training.wire.state_dict(all_ranks=True)
        assert (state == {}) == (training.rank != 0)
        if training.rank == 0:
            rest = {"model": training.module.state_dict(), "optimizer": training.optimizer.state_dict()}
            torch.save({**rest, "wire": state}, f"{folder}/{place}.pt")
            torch.save({**rest, "wire": training.wire.state_dict()}, f"{folder}/{place}-rank0.pt")
        for step in range(3, 6):
            training.step(step)
        found.append(bits(training))
        training.wire.detach()
    return found


def resume(group: dist.ProcessGroup, folder: str) -> list[tuple[str, str]]:
    found = []
    for place, (optimizer, method) in enumerate(METHODS):
        training = Training(group, Run(method, optimizer))
        assert training.wire is not None
        saved = torch.load(f"{folder}/{place}.pt", weights_only=True)
        training.module.load_state_dict(saved["model"])
        training.optimizer.load_state_dict(saved["optimizer"])
        training.wire.load_state_dict(saved["wire"])
        for step in range(3, 6):
            training.step(step)
        found.append(bits(training))
        training.wire.detach()
    return found


def reshard(group: dist.ProcessGroup, folder: str) -> None:
    """One file or a list of all ranks' states: the same bits, with any number of ranks."""
    for place, (optimizer, method) in enumerate(METHODS):
        saved = torch.load(f"{folder}/{place}.pt", weights_only=True)["wire"]
        common = {key: value for key, value in saved.items() if not key.startswith("rank ")}
        parts = [{**common, key: value} for key, value in saved.items() if key.startswith("rank ")]
        found = []
        for state in (saved, parts):
            training = Training(group, Run(method, optimizer))
            assert training.wire is not None
            training.wire.load_state_dict(state)
            found.append((digest(*tensors_of(training.wire.state_dict())), training.wire.state_dict()["step"]))
            training.wire.detach()
        assert found[0] == found[1] and found[0][1] == 3


def refused(group: dist.ProcessGroup, folder: str) -> None:
    training = Training(group, Run(METHODS[0][1], METHODS[0][0]))
    wire = training.wire
    assert wire is not None
    before = digest(*tensors_of(wire.state_dict()))
    alone: Any = torch.load(f"{folder}/0-rank0.pt", weights_only=True)["wire"]
    for state in (alone, {}):
        said = sentence_of(ValueError, lambda state=state: wire.load_state_dict(state))
        assert "state_dict(all_ranks=True)" in said, said
        assert digest(*tensors_of(wire.state_dict())) == before
    wire.detach()


@pytest.fixture(scope="module")
def saved(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Any]]:
    folder = tmp_path_factory.mktemp("one-file")
    return str(folder), cluster.run(save, 3, str(folder))


def test_one_file_of_all_ranks_resumes_every_method_bit_exact(cluster: Cluster, saved: Any) -> None:
    folder, expected = saved
    assert cluster.run(resume, 3, folder) == expected


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_one_file_of_all_ranks_is_the_list_of_their_states(cluster: Cluster, saved: Any, ranks: int) -> None:
    cluster.run(reshard, ranks, saved[0])


@pytest.mark.parametrize("ranks", [2, 3])
def test_state_of_rank_0_alone_is_refused_on_all_ranks(cluster: Cluster, saved: Any, ranks: int) -> None:
    cluster.run(refused, ranks, saved[0])


def from_one_rank(group: dist.ProcessGroup, path: Path) -> None:
    training = Training(group, Run("dgc:density=0.02", "heavy"))
    assert training.wire is not None
    training.step(0)
    if dist.get_world_size(group) == 1:
        torch.save(training.wire.state_dict(all_ranks=True), path)
    else:
        training.wire.load_state_dict(torch.load(path, weights_only=True))
        assert training.wire.state_dict()["step"] == 1
    training.wire.detach()


def test_state_of_a_single_rank_is_taken_by_several(cluster: Cluster, tmp_path: Path) -> None:
    for ranks in (1, 2):
        cluster.run(from_one_rank, ranks, tmp_path / "one.pt")
