"""The peers are what they are called, their bytes are counted, and they can be resumed."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cluster import Cluster
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from workers import noise, through_a_file

import thinwire
from thinwire.lab import peers


def make(group: Any, spec: str | None, layers: int, **options: Any) -> tuple[DDP, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    sizes = (48, 64, 10)[: layers + 1]
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))
    ddp = DDP(model, process_group=group, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    return ddp, optimizer, thinwire.attach(ddp, optimizer, peers.parse(spec)) if spec else None


def steps(model: DDP, optimizer: torch.optim.Optimizer, rank: int, first: int, last: int) -> list[torch.Tensor]:
    for step in range(first, last):
        optimizer.zero_grad()
        model(noise((8, 48), rank, step, "x")).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def against_the_hook(group: Any) -> None:
    """One matrix and one bucket: PyTorch's hook by itself and under our roof draw the same first Q."""
    rank = dist.get_rank(group)
    theirs, optimizer, _ = make(group, None, 1)
    state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=3)
    theirs.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    expected = steps(theirs, optimizer, rank, 0, 8)
    ours, optimizer, wire = make(group, "powersgd:rank=2,warmup=3", 1)
    for mine, other in zip(steps(ours, optimizer, rank, 0, 8), expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)
    matrix, bias, p_and_q = 48 * 64, 64, 2 * (48 + 64)
    assert wire.stats.frame_bytes == 4 * (3 * (matrix + bias) + 5 * (p_and_q + bias))
    assert wire.stats.seconds_waiting > 0 and wire.stats.residual_norm > 0
    wire.detach()


def resumed(group: Any, spec: str) -> None:
    """Several buckets (on which PyTorch's hook aborts over Gloo), saved before, at and after the warm-up's end."""
    rank, small = dist.get_rank(group), {"bucket_cap_mb": 0.001}
    model, optimizer, wire = make(group, spec, 2, **small)
    expected = steps(model, optimizer, rank, 0, 9)
    wire.detach()
    for at in (2, 4, 6):
        model, optimizer, wire = make(group, spec, 2, **small)
        steps(model, optimizer, rank, 0, at)
        saved = through_a_file([wire.state_dict(), model.module.state_dict(), optimizer.state_dict()])
        wire.detach()
        model, optimizer, wire = make(group, spec, 2, **small)
        model.module.load_state_dict(saved[1])
        optimizer.load_state_dict(saved[2])
        wire.load_state_dict(saved[0])
        assert all(map(torch.equal, steps(model, optimizer, rank, at, 9), expected)), at
        wire.detach()


def test_powersgd_is_pytorchs_hook_and_its_bytes_are_counted(cluster: Cluster) -> None:
    cluster.run(against_the_hook, 3)


def test_powersgd_resumes_bit_exact(cluster: Cluster) -> None:
    cluster.run(resumed, 2, "powersgd:rank=2,warmup=4")


def test_peers_are_read_by_name() -> None:
    assert peers.parse("bf16") == thinwire.Dense(dtype="bf16") and peers.parse("fp16") == thinwire.Dense(dtype="fp16")
    assert peers.parse("powersgd:rank=4") == peers.PowerSGD(rank=4) == peers.parse(str(peers.PowerSGD(rank=4)))
    assert peers.parse("dgc:density=0.01") == thinwire.DGC(density=0.01)
    with pytest.raises(ValueError, match=r"unknown method 'powrsgd' \(did you mean 'powersgd'\?\).*terngrad.*bf16"):
        peers.parse("powrsgd")
    with pytest.raises(ValueError, match="has no option 'rnak' "):
        peers.parse("powersgd:rnak=2")
    for wrong in ("powersgd:rank=0", "powersgd:rank=x", "powersgd:warmup=1"):
        with pytest.raises(ValueError, match="must be a whole number of at least"):
            peers.parse(wrong)
