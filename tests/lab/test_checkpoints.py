"""Checkpoints of a run: damaged, incomplete or of a full disk, they are told in one sentence; the older one stays."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from cluster import Cluster
from workers import sentence_of

from thinwire.lab.recipes.checkpoints import CheckpointError, Checkpoints, has_checkpoint, world_net

CPU = torch.device("cpu")
SIZE = 200_000  # of a part, so that 20 kB in the middle are the tensor's


def value(place: tuple[int, int]) -> torch.Tensor:
    return torch.arange(SIZE // 4, dtype=torch.float32) + place[1]


def save(checkpoints: Checkpoints, *places: tuple[int, int]) -> None:
    for place in places:
        checkpoints.save(place, lambda place=place: {"x": value(place)})


def loads(checkpoints: Checkpoints, place: tuple[int, int]) -> None:
    found, state = checkpoints.load(CPU)
    assert found == place and torch.equal(state["x"], value(place)), found


def damages(whole: bytes) -> dict[str, bytes]:
    return {
        "zeros": whole[:50_000] + bytes(20_000) + whole[70_000:],
        "truncated": whole[: len(whole) // 2],
        "empty": b"",
        "garbage": os.urandom(len(whole)),
        "a bit": whole[:90_000] + bytes([whole[90_000] ^ 1]) + whole[90_001:],
        "of torch alone": whole.partition(b"\n")[2],
    }


def damaged(group: Any, folder: str) -> None:
    net = world_net(CPU)
    checkpoints = Checkpoints(Path(folder), net)
    save(checkpoints, (0, 1), (0, 2), (0, 3))
    torch.distributed.barrier()  # every rank removes its own old parts
    assert len(list(Path(folder).glob("*.pt"))) == 2 * net.size and has_checkpoint(Path(folder))
    path = Path(folder) / f"0-3.rank1of{net.size}.pt"
    whole = path.read_bytes()
    torch.distributed.barrier()
    for kind, bad in damages(whole).items():
        if net.rank == 1:
            path.write_bytes(bad)
        said = sentence_of(CheckpointError, lambda: Checkpoints(Path(folder), net).load(CPU))
        assert said.startswith(f"the checkpoint '{path}' cannot be read: it is damaged"), (kind, said)
        assert said.endswith("; delete that file to go on from the checkpoint of step 2, the one before"), said
        torch.distributed.barrier()
    if net.rank == 1:
        path.unlink()
    torch.distributed.barrier()
    again = Checkpoints(Path(folder), net)
    loads(again, (0, 2))
    save(again, (0, 4))  # what is left of the damaged one goes, on every rank
    torch.distributed.barrier()
    names = {path.name for path in Path(folder).iterdir()}
    parts = {f"0-{step}.rank{rank}of{net.size}.pt" for step in (2, 4) for rank in range(net.size)}
    assert names == parts | {f"{part}.done" for part in parts}


def test_damaged_part_is_told_on_all_ranks_with_the_one_before_as_way_out(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(damaged, 5, str(tmp_path))


def unmarked(group: Any, folder: str) -> None:
    """A kill between the marks of two ranks: the newest that all ranks have marked counts."""
    net = world_net(CPU)
    checkpoints = Checkpoints(Path(folder), net)
    save(checkpoints, (0, 1))
    save(checkpoints, (1, 1))
    if net.rank == 2:
        (Path(folder) / f"1-1.rank2of{net.size}.pt.done").unlink()
    torch.distributed.barrier()
    again = Checkpoints(Path(folder), net)
    loads(again, (0, 1))
    save(again, (0, 1))  # Ctrl-C right after a resume: the same place again
    loads(Checkpoints(Path(folder), net), (0, 1))
    (Path(folder) / f".0-9.rank{net.rank}of{net.size}.pt.partial").write_bytes(b"half")
    torch.distributed.barrier()
    again.clear()
    torch.distributed.barrier()
    assert not Path(folder).exists()


def test_checkpoint_counts_when_every_rank_has_put_its_mark(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(unmarked, 5, str(tmp_path / "run"))
