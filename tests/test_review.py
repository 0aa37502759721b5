"""Faults that a review found, one test each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cluster import Cluster
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from thinwire import cli
from thinwire.checkpoint.reshard import reshard

CPU = torch.device("cpu")


def test_followers_of_a_machine_do_not_count_when_a_checkpoint_changes_its_group() -> None:
    """A follower that got a velocity when momentum was handed over was taken for a rank with an empty residual."""
    common = {"hierarchy": ((0, 1), (2, 3)), "pending": {}, "world_size": 4}
    ones, none = {"w": torch.ones(4)}, dict[str, torch.Tensor]()
    states = [
        {**common, "rank": rank, "aggregator": {"memory": {"velocity": ones, "residual": none if rank % 2 else ones}}}
        for rank in range(4)
    ]
    memory = reshard(states, {"w": 4}, None, 0, 3)["aggregator"]["memory"]
    assert torch.equal(memory["residual"]["w"], torch.ones(4)) and torch.equal(memory["velocity"]["w"], torch.ones(4))


def late_static_graph(group: dist.ProcessGroup) -> int:
    model = DDP(torch.nn.Linear(4, 3), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wire = thinwire.attach(model, optimizer, "dgc:dense_below=0")
    model._set_static_graph()
    for _ in range(2):
        model(torch.full((2, 4), 1.0 + dist.get_rank(group))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    dense = wire.stats.dense_bytes
    wire.detach()
    return dense


def test_a_static_graph_declared_after_attach_is_still_exchanged(cluster: Cluster) -> None:
    """Every parameter counted as unused, and nothing was sent at all."""
    assert cluster.run(late_static_graph, 2) == [2 * 4 * 15] * 2


def failed_exchange(group: dist.ProcessGroup) -> bool:
    """Rank 0 alone fails; what it does then must not wait for the others."""
    model = DDP(torch.nn.Linear(4, 3), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wire = thinwire.attach(model, optimizer, "dgc")
    if dist.get_rank(group) == 0:
        wire._exchange = _fail  # type: ignore[method-assign]
        with pytest.raises(OSError):
            model(torch.ones(2, 4)).sum().backward()
        assert wire.detach() == {}
        assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
        with pytest.raises(thinwire.DetachedError):
            wire.state_dict()
    return True


def _fail(*_: Any) -> None:
    raise OSError("for this test")


def test_leaving_after_a_failed_exchange_waits_for_nobody(cluster: Cluster) -> None:
    assert cluster.run(failed_exchange, 2, timeout_s=30) == [True, True]


def refused(group: dist.ProcessGroup, dtype: torch.dtype) -> str:
    module = torch.nn.Linear(2, 2)
    module.phase = torch.nn.Parameter(torch.zeros(3, dtype=dtype))
    model = DDP(module, process_group=group, find_unused_parameters=dist.get_rank(group) == 1)
    with pytest.raises(ValueError) as caught:
        thinwire.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "dgc")
    return str(caught.value)


def test_complex_parameters_and_ranks_that_differ_in_unused_parameters_are_refused(cluster: Cluster) -> None:
    assert "'phase' is complex64" in cluster.run(refused, 1, torch.complex64)[0]
    for sentence in cluster.run(refused, 2, torch.float32):
        assert "ranks differ in find_unused_parameters" in sentence


def skipped_closure(group: dist.ProcessGroup, optimizer_name: str) -> torch.Tensor:
    """A bad step by step(closure) leaves everything as it was; the good one after it moves."""
    torch.manual_seed(0)
    module = torch.nn.Linear(4, 3)
    model = DDP(module, process_group=group)
    optimizer = getattr(torch.optim, optimizer_name)(model.parameters(), lr=0.1)
    wire = thinwire.attach(model, optimizer, "dropping", on_nonfinite="skip")
    factor, calls = float("nan"), []

    def closure() -> torch.Tensor:
        calls.append(factor)
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean() * (factor if dist.get_rank(group) == 0 else 1.0)
        loss.backward()
        return loss

    before = module.weight.detach().clone()
    optimizer.step(closure)
    assert torch.equal(module.weight, before) and calls
    factor = 1.0
    optimizer.step(closure=closure)
    assert not torch.equal(module.weight, before) and bool(module.weight.isfinite().all())
    wire.detach()
    return module.weight.detach().clone()


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_skip_passes_over_a_bad_step_of_a_closure(cluster: Cluster, optimizer: str) -> None:
    """The gradients were dropped before the closure made them, and the infinities were applied."""
    first, second = cluster.run(skipped_closure, 2, optimizer)
    assert torch.equal(first, second)


@pytest.mark.parametrize("verb", [["info"], ["bench", "wire", "--numel", "100"]])
def test_an_unknown_choice_of_kernels_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: list[str]
) -> None:
    monkeypatch.setenv("THINWIRE_KERNELS", "bogus")
    assert cli.run(verb) == 2
    captured = capsys.readouterr()
    assert not captured.out and captured.err.count("\n") == 1 and "THINWIRE_KERNELS must be one of" in captured.err


def test_a_folder_is_no_json_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.run(["bench", "wire", "--numel", "100", "--json", str(tmp_path)]) == 2
    assert "it is a folder" in capsys.readouterr().err
