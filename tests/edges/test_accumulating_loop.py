"""A loop as nanoGPT's: an attribute switches the exchange off, and the scaler is there but may be switched off."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cluster import Cluster
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire

STEPS, PARTS, SAVED = 6, 3, 3
EVERYTHING = "dropping:density=1,values=fp32,dense_below=0"


def trained(group: dist.ProcessGroup, method: str | None, enabled: bool, resumes: bool = False) -> dict[str, Any]:
    """Saved and begun anew in the middle where it ``resumes``."""
    rank, state = dist.get_rank(group), dict[str, Any]()
    found: dict[str, Any] = {}
    spans = (range(SAVED), range(SAVED, STEPS)) if resumes else (range(STEPS),)
    for span in spans:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 8))
        model = DDP(module, process_group=group)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
        scaler = torch.amp.GradScaler("cpu", enabled=enabled, init_scale=256.0)
        wire = thinwire.attach(model, optimizer, method, scaler=scaler) if method else None
        if state:
            module.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            if enabled:
                scaler.load_state_dict(state["scaler"])
            if wire is not None:
                wire.load_state_dict(state["wire"])
        for step in span:
            for part in range(PARTS):
                generator = torch.Generator().manual_seed(1000 * step + 10 * part + rank)
                x, y = torch.randn(8, 16, generator=generator), torch.randint(0, 8, (8,), generator=generator)
                model.require_backward_grad_sync = part == PARTS - 1
                with torch.autocast("cpu", torch.bfloat16) if not enabled else nullcontext():
                    loss = nn.functional.cross_entropy(model(x), y) / PARTS
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
        state = {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
        if wire is not None:
            found["steps"], state["wire"] = wire.stats.steps, wire.state_dict()
            wire.detach()
    found["values"] = torch.cat([p.detach().flatten() for p in module.parameters()])
    return found


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("enabled", [False, True])
def test_a_loop_that_accumulates_by_switching_the_exchange_off(cluster: Cluster, ranks: int, enabled: bool) -> None:
    plain = cluster.run(trained, ranks, None, enabled)
    whole = cluster.run(trained, ranks, EVERYTHING, enabled)
    fewer = cluster.run(trained, ranks, "dropping:density=0.1,dense_below=0", enabled)
    again = cluster.run(trained, ranks, "dropping:density=0.1,dense_below=0", enabled, True)
    for one, dense, compressed, resumed in zip(whole, plain, fewer, again, strict=True):
        torch.testing.assert_close(one["values"], dense["values"], rtol=0, atol=2e-5)
        assert one["steps"] == compressed["steps"] == STEPS, "one exchange per optimizer step"
        assert torch.equal(compressed["values"], fewer[0]["values"]), "ranks differ"
        assert torch.equal(resumed["values"], compressed["values"])
