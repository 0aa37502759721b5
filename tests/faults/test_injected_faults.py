"""A full disk or no memory at any call of saving and loading: one sentence, and everything is as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster import Cluster
from injected import DISK_FULL, MEMORY, NO_MEMORY, each_call, failing
from workers import digest, noise, sentence_of, tensors_of

import thinwire
from thinwire.lab.recipes.checkpoints import CheckpointError, Checkpoints, world_net
from thinwire.transport import ThreadNet, ThreadWorld

CPU = torch.device("cpu")
DISK = ("os.open", "os.fsync", *(f"pathlib.Path.{call}" for call in ("open", "replace", "mkdir", "iterdir")))
SHAPES = {"a": (40, 30), "b": (17,)}


def reducer_on(net: ThreadNet, method: str) -> tuple[thinwire.Reducer, Callable[[], None]]:
    weights = {name: noise(shape, 9, 9, name) for name, shape in SHAPES.items()}
    reducer = thinwire.Reducer(weights, method, net)

    def train() -> None:
        step = reducer.progress.step
        reducer.reduce({name: noise(shape, 0, step, name) for name, shape in SHAPES.items()})

    return reducer, train


METHODS = ["dgc:density=0.05,dense_below=8", "blocksign:dense_below=1", "dropping:density=0.05,residual=bf16"]


@pytest.mark.parametrize("method", METHODS)
def test_no_memory_at_any_call_of_a_load_changes_nothing(method: str) -> None:
    def work(net: ThreadNet) -> int:
        reducer, train = reducer_on(net, method)
        train()
        saved, found = copy.deepcopy(reducer.state_dict()), 0
        for state in (saved, [saved]):
            train()
            before = digest(*tensors_of(reducer.state_dict()))
            for raised in each_call(MEMORY, NO_MEMORY, lambda state=state: reducer.load_state_dict(state)):
                assert "\n" not in str(raised) and "can't allocate memory" in str(raised), raised
                now = reducer.state_dict()
                assert digest(*tensors_of(now)) == before and now["step"] == 2
                found += 1
            now = reducer.state_dict()  # behind a last one in which nothing failed
            assert digest(*tensors_of(now)) == digest(*tensors_of(saved)) and now["step"] == 1
        train()
        return found

    assert ThreadWorld(1).run(work)[0] > 10


@pytest.mark.parametrize("all_ranks", [False, True])
def test_no_memory_at_any_call_of_a_save_changes_nothing(all_ranks: bool) -> None:
    def work(net: ThreadNet) -> int:
        reducer, train = reducer_on(net, METHODS[0])
        train()
        before, found = digest(*tensors_of(reducer.state_dict())), 0
        for raised in each_call(MEMORY, NO_MEMORY, lambda: reducer.state_dict(all_ranks)):
            assert "\n" not in str(raised) and "can't allocate memory" in str(raised), raised
            assert digest(*tensors_of(reducer.state_dict())) == before
            found += 1
        train()
        return found

    assert ThreadWorld(1).run(work)[0] > 3


def saved_with_failures(group: Any, folder: str) -> tuple[int, int]:
    """Rank 1's disk or memory fails at the first, second, ... call of a save; rank 0's does not."""
    net = world_net(CPU)
    checkpoints = Checkpoints(Path(folder), net)
    checkpoints.save((0, 1), lambda: {"x": torch.ones(3)})
    refused, place, done = 0, 1, False
    while not done:
        with ExitStack() as stack:
            mine = [stack.enter_context(failing(*one, place if net.rank == 1 else None)) for one in FAILING]
            try:
                checkpoints.save((0, 2), lambda: {"x": torch.zeros(3)})
            except CheckpointError as error:
                said = str(error)
                assert "cannot be written: " in said and said.endswith("; the one before it is kept"), said
                refused += 1
            else:
                said = ""
        ended = torch.tensor([int(all(one.calls < place for one in mine))])
        torch.distributed.broadcast(ended, 1)
        done = bool(ended)
        found, state = Checkpoints(Path(folder), net).load(CPU)
        # The mark of the last rank decides: what fails behind it leaves the new one, whole.
        assert found == (0, 1 if said else 2) and torch.equal(state["x"], torch.full((3,), float(bool(said))))
        torch.distributed.barrier()
        left = {path.name.split(".rank")[0] for path in Path(folder).iterdir()}
        assert left <= {"0-1", "0-2"} and ("0-2" in left) == (not said), left
        torch.distributed.barrier()
        if not said and not done:  # once more, with the next call failing
            for path in Path(folder).glob(f"0-2.rank{net.rank}of*"):
                path.unlink()
            checkpoints = Checkpoints(Path(folder), net)
            checkpoints.load(CPU)
        place += 1
    return refused, place


FAILING = [(DISK, DISK_FULL), (("torch.save",), NO_MEMORY)]


def test_disk_or_memory_failing_at_any_call_of_a_checkpoint_leaves_the_one_before(
    cluster: Cluster, tmp_path: Path
) -> None:
    for refused, _ in cluster.run(saved_with_failures, 5, str(tmp_path)):
        assert refused >= 8


def loaded_with_failures(group: Any, folder: str) -> int:
    net = world_net(CPU)
    Checkpoints(Path(folder), net).save((0, 1), lambda: {"x": torch.ones(3)})
    refused = 0
    for place in range(1, 30):
        names, error = (DISK, DISK_FULL) if place % 2 else (("torch.load",), NO_MEMORY)
        with failing(names, error, (place + 1) // 2 if net.rank == 1 else None) as injected:
            used = torch.tensor([0])
            try:
                Checkpoints(Path(folder), net).load(CPU)
            except CheckpointError as problem:
                assert "cannot be read: " in str(problem), problem
                refused += 1
            used[0] = injected.calls
        torch.distributed.broadcast(used, 1)
        if place > 2 * int(used):
            break
    assert sentence_of(CheckpointError, lambda: Checkpoints(Path(folder) / "nowhere", net).load(CPU))
    return refused


def test_disk_or_memory_failing_at_any_call_of_a_load_is_one_sentence(cluster: Cluster, tmp_path: Path) -> None:
    for refused in cluster.run(loaded_with_failures, 5, str(tmp_path)):
        assert refused >= 3
