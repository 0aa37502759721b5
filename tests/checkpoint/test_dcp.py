"""torch.distributed.checkpoint: a wire is a stateful object, every rank writes and reads its own part."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import workers
from cluster import Cluster
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire

METHODS = [
    ("groups", "dgc:density=0.02,warmup=8,values=fp32,factor_masking=true"),
    ("heavy", "dgc:density=0.02,residual=bf16,values=fp32,factor_masking=true"),
    ("heavy", "gtopk:density=0.01"),
    ("adam", "terngrad:dense_below=0,seed=5"),
    ("nesterov", "blocksign:dense_below=1"),
    ("groups", "blocksign:dense_below=1,block=100,topology=server,residual=bf16"),
    ("adamw", "dropping:density=0.01,local=partial,sync_every=5"),
    ("tiny", "signsgd"),
    ("heavy", "dense:dtype=bf16"),
    ("adamw", "local:every=5,method=(dropping:density=0.02,values=fp32),outer_momentum=0.9"),
    ("groups", "perlayer:a=dense,c=(blocksign:dense_below=1),*=(dgc:density=0.02,dense_below=0)"),
]
FEW, STEPS = 5, 9


class One:
    """One rank's training, whose whole state is a dictionary for torch.distributed.checkpoint."""

    def __init__(self, group: dist.ProcessGroup, optimizer: str, method: str, **options: Any) -> None:
        self.group = group
        self.module = workers.Dot(options.pop("shapes", workers.SHAPES))
        self.model = DDP(self.module, process_group=group, bucket_cap_mb=options.pop("bucket_cap_mb", 25))
        self.optimizer = workers.OPTIMIZERS[optimizer](self.module)
        self.wire = thinwire.attach(self.model, self.optimizer, method, **options)

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last):
            self.optimizer.zero_grad()
            self.model(workers.pulls(dist.get_rank(self.group), step)).backward()
            self.optimizer.step()

    def optimizer_file(self, folder: str) -> Path:
        # Not through DCP: with momentum in the wire an optimizer has no state before its first step.
        return Path(f"{folder}-optimizer-{dist.get_rank(self.group)}.pt")

    def save(self, folder: str) -> None:
        torch.save(self.optimizer.state_dict(), self.optimizer_file(folder))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(
                {"model": self.module.state_dict(), "wire": self.wire},
                checkpoint_id=folder, process_group=self.group,
            )  # fmt: skip

    def load(self, folder: str) -> None:
        state = {"model": self.module.state_dict(), "wire": self.wire}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(state, checkpoint_id=folder, process_group=self.group)
        self.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(torch.load(self.optimizer_file(folder), weights_only=True))

    def bits(self) -> tuple[str, str]:
        return workers.digest(workers.flat(self.module)), workers.digest(*workers.tensors_of(self.wire.state_dict()))


def save(group: dist.ProcessGroup, folder: str, **options: Any) -> list[tuple[str, str]]:
    """Train every method, save it half-way; the bits of the end."""
    found = []
    for place, (optimizer, method) in enumerate(METHODS):
        one = One(group, optimizer, method, **options)
        one.steps(0, FEW)
        one.save(f"{folder}/{place}")
        one.steps(FEW, STEPS)
        found.append(one.bits())
        one.wire.detach()
    return found


def resume(group: dist.ProcessGroup, folder: str, **options: Any) -> list[tuple[str, str]]:
    found = []
    for place, (optimizer, method) in enumerate(METHODS):
        one = One(group, optimizer, method, **options)
        with torch.no_grad():
            for parameter in one.module.parameters():
                parameter.zero_()
        one.load(f"{folder}/{place}")
        one.steps(FEW, STEPS)
        found.append(one.bits())
        one.wire.detach()
    return found


def small_buckets(group: dist.ProcessGroup, folder: str) -> list[tuple[str, str]]:
    return resume(group, folder, bucket_cap_mb=1e-5)


@pytest.fixture(scope="module")
def saved(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Any]]:
    """A folder with one checkpoint a method by three ranks, and the bits that each rank ends with."""
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    bits = cluster.run(save, 3, folder)
    cluster.stop()  # whoever loads is a new process
    return folder, bits


@pytest.mark.parametrize("resuming", [resume, small_buckets])
def test_dcp_resumes_every_method_bit_exact(cluster: Cluster, saved: Any, resuming: Any) -> None:
    """Nothing but the folder is carried over; the sizes of buckets may change."""
    folder, expected = saved
    for before, after in zip(expected, cluster.run(resuming, 3, folder), strict=True):
        for (_, method), a, b in zip(METHODS, before, after, strict=True):
            assert a == b, method


def resharded(group: dist.ProcessGroup, folder: str) -> list[dict[str, torch.Tensor]]:
    """What was not sent, as the group's mean, of every method as it was saved."""
    found = []
    for place, (optimizer, method) in enumerate(METHODS):
        one = One(group, optimizer, method)
        one.wire.load_checkpoint(f"{folder}/{place}")
        assert one.wire.state_dict()["step"] == FEW
        found.append(one.wire.detach())
    return found


def test_dcp_checkpoint_is_read_by_another_number_of_ranks_without_loss(cluster: Cluster, saved: Any) -> None:
    expected = cluster.run(resharded, 3, saved[0])[0]
    for size in (2, 5):
        for found in cluster.run(resharded, size, saved[0]):
            for (_, method), before, after in zip(METHODS, expected, found, strict=True):
                for name, tensor in before.items():
                    tolerance = {"rtol": 2**-7, "atol": 2**-7} if "bf16" in method else {"rtol": 1e-5, "atol": 1e-5}
                    torch.testing.assert_close(after[name], tensor, **tolerance, msg=lambda m, k=method: f"{k}: {m}")
    assert any(tensor.abs().max() > 0.1 for tensor in expected[0].values())


def own_parts(group: dist.ProcessGroup, folder: str) -> tuple[list[str], str]:
    """The tensors that this rank asked DCP to write for the wire, and what it would have to say itself."""
    one = One(group, "heavy", "blocksign:dense_below=1", hierarchy=[[0, 1], [2]])
    one.steps(0, 3)
    one.save(folder)
    state, again = one.wire.state_dict(), one.wire.state_dict()
    one.steps(3, 4)
    later = one.wire.state_dict()
    assert state.keys() == again.keys() == later.keys()
    bits = workers.digest(*workers.tensors_of(state))
    one.wire.detach()
    return [key for key in state if key.startswith("rank ")], bits


def test_dcp_checkpoint_has_a_part_per_rank_that_plain_torch_reads(cluster: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    answers = cluster.run(own_parts, 3, str(folder))
    assert [keys for keys, _ in answers] == [["rank 0"], ["rank 1"], ["rank 2"]]
    dcp_to_torch_save(folder, tmp_path / "all.pt")
    everything = torch.load(tmp_path / "all.pt", weights_only=True)["wire"]
    for rank, (_, bits) in enumerate(answers):
        part = everything.get(f"rank {rank}", {})
        vectors = part.get("aggregator", {}).get("memory", {})
        # Rank 1 stands behind rank 0, the first of its machine, and keeps nothing.
        assert set(vectors.get("residual", {})) == (set() if rank == 1 else set(workers.SHAPES))
        common = {key: value for key, value in everything.items() if not key.startswith("rank ")}
        mine = {**common, f"rank {rank}": part}
        assert rank == 1 or workers.digest(*workers.tensors_of(mine)) == bits


def refused(group: dist.ProcessGroup, folder: str) -> dict[str, str]:
    good = One(group, "heavy", "dgc:density=0.02")
    good.steps(0, 2)
    good.save(folder)
    sentences = {}
    others = {
        "another shape": ("dgc:density=0.02", {"shapes": {**workers.SHAPES, "c": (7, 6)}}),
        "a parameter more": ("dgc:density=0.02", {"shapes": {**workers.SHAPES, "zz": (7, 6)}}),
        "a parameter less": ("dgc:density=0.02", {"shapes": {"a": (40, 30), "b": (50,)}}),
        "another method": ("gtopk:density=0.02", {}),
        "another density": ("dgc:density=0.03", {}),
    }
    for case, (method, options) in others.items():
        one = One(group, "heavy", method, **options)
        before = one.bits()
        for way in ("dcp", "load_checkpoint"):
            try:
                if way == "dcp":
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        dcp.load({"wire": one.wire}, checkpoint_id=folder, process_group=group)
                else:
                    one.wire.load_checkpoint(folder)
            except BaseException as error:  # DCP's own errors are no Exceptions
                sentences[f"{case}, {way}"] = str(error)
            assert one.bits() == before, f"{case}: something was loaded"
        one.wire.detach()
    good.wire.detach()
    return sentences


def test_dcp_refuses_another_model_or_method_by_name_and_loads_nothing(cluster: Cluster, tmp_path: Path) -> None:
    words = {
        "another shape": "c",
        "a parameter more": "zz",
        "a parameter less": "c",
        "another method": "method dgc:density=0.02",
        "another density": "dgc:density=0.03",
    }
    for sentences in cluster.run(refused, 2, str(tmp_path)):
        for case, word in words.items():
            for way in ("dcp", "load_checkpoint"):
                text = sentences[f"{case}, {way}"]
                assert word in text, (case, way, text)


def other_group(group: dist.ProcessGroup, folder: str) -> str:
    one = One(group, "heavy", "dgc:density=0.02")
    with warnings.catch_warnings(), pytest.raises(ValueError) as caught:
        warnings.simplefilter("ignore")
        dcp.load({"wire": one.wire}, checkpoint_id=folder, process_group=group)
    with pytest.raises(ValueError, match="has no 'wires'; it has 'model', 'wire'"):
        one.wire.load_checkpoint(folder, key="wires")
    with pytest.raises(ValueError, match=r"there is no checkpoint in '.*nowhere'"):
        one.wire.load_checkpoint(f"{folder}/nowhere")
    one.wire.detach()
    return str(caught.value)


def test_dcp_load_into_a_smaller_group_says_what_to_call(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(refused, 3, str(tmp_path))
    for sentence in cluster.run(other_group, 2, str(tmp_path)):
        assert "world_size 3" in sentence and "load_checkpoint(folder)" in sentence


def damaged(group: dist.ProcessGroup, folder: str, place: float) -> list[str]:
    """Rank 1's file loses bytes around a place in it: what is said where it is loaded."""
    one, said = One(group, "heavy", "dgc:density=0.02"), []
    one.steps(0, 2)
    one.save(folder)
    one.steps(2, 3)
    before = one.bits()
    if dist.get_rank(group) == 1:
        path = max(Path(folder).glob("__1_*.distcp"))
        whole = path.read_bytes()
        start = int(place * len(whole))
        path.write_bytes(whole[:start] + bytes(4_000) + whole[start + 4_000 :])
    dist.barrier(group)
    for load in (lambda: one.wire.load_checkpoint(folder), lambda: one.load(folder)):
        try:
            load()
        except BaseException as error:  # DCP's own errors are no Exceptions
            said.append(f"{type(error).__name__}: {error}")
        assert one.bits()[1] == before[1] and one.wire.state_dict()["step"] == 3
    one.wire.detach()
    return said


@pytest.mark.parametrize("place", [0.3, 0.9])
def test_dcp_checkpoint_that_was_damaged_is_refused_on_all_ranks(
    cluster: Cluster, tmp_path: Path, place: float
) -> None:
    for rank, said in enumerate(cluster.run(damaged, 2, str(tmp_path), place)):
        assert len(said) == 2 and said[0].startswith("ValueError: "), said
        assert ("\n" not in said[0]) and ("on rank 1: " in said[0]) == (rank == 0), said
