"""Checkpoints in a group of another size: what was not sent is redistributed, and none of it is lost."""

from __future__ import annotations

import io
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from thinwire.checkpoint.other_world_size import reshard

METHODS = [
    "dgc:density=0.05,dense_below=8,values=fp32,factor_masking=true",
    "dgc:density=0.05,factor_masking=false,values=int8",
    "dgc:density=0.05,dense_below=8,scope=model,factor_masking=true",
    "gtopk:density=0.05,factor_masking=true,values=int8",
    "gtopk:density=0.05",
    "gtopk:density=0.05,momentum_correction=true",
    "terngrad:dense_below=0",
    "blocksign:dense_below=1",
    "blocksign:dense_below=1,block=50,topology=server",
    "dropping:density=0.05",
    "dropping:density=0.05,local=partial,sync_every=3",
    "signsgd",
    "perlayer:2.*=(blocksign:dense_below=1),4.*=dense,*=(dgc:density=0.05,dense_below=8)",
]
WAYS = [(1, 3), (2, 5), (3, 2), (4, 1), (5, 3)]
ALL_WAYS = os.environ.get("THINWIRE_TESTS") == "full"  # every method in every way: 50 resumes; else two ways each


def _attached(group: dist.ProcessGroup, spec: str, **options: Any) -> tuple[DDP, torch.optim.Optimizer, thinwire.Wire]:
    torch.manual_seed(0)
    # The middle weight has more than 4,096 elements: the sharded servers cut it.
    module = torch.nn.Sequential(
        torch.nn.Linear(8, 80), torch.nn.Tanh(), torch.nn.Linear(80, 60), torch.nn.Tanh(), torch.nn.Linear(60, 3)
    )
    model = DDP(module, process_group=group, bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return model, optimizer, thinwire.attach(model, optimizer, spec, **options)


def _steps(group: dist.ProcessGroup, model: DDP, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(1000 * dist.get_rank(group) + step)
        optimizer.zero_grad()
        x, y = torch.randn(8, 8, generator=generator), torch.randn(8, 3, generator=generator)
        (model(x) - y).square().mean().backward()
        optimizer.step()


def _saved(state: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def save(group: dist.ProcessGroup, spec: str, options: dict[str, Any]) -> dict[str, Any]:
    model, optimizer, wire = _attached(group, spec, **options)
    _steps(group, model, optimizer, 0, 6)
    state, model_state = _saved(wire.state_dict()), _saved(model.module.state_dict())
    return {"wire": state, "model": model_state, "leftover": wire.detach()}


def resume(group: dist.ProcessGroup, spec: str, saved: list[dict[str, Any]], options: dict[str, Any]) -> dict[str, Any]:
    model, optimizer, wire = _attached(group, spec, **options)
    model.module.load_state_dict(torch.load(io.BytesIO(saved[0]["model"]), weights_only=True))
    wire.load_state_dict([torch.load(io.BytesIO(one["wire"]), weights_only=True) for one in saved])
    state = wire.state_dict()
    _steps(group, model, optimizer, 6, 9)  # it goes on training
    step = wire.state_dict()["step"]
    _, _, wire2 = _attached(group, spec, **options)
    wire2.load_state_dict([torch.load(io.BytesIO(one["wire"]), weights_only=True) for one in saved])
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {"step": (state["step"], step), "leftover": wire2.detach(), "flat": flat}


def _check(saved: list[dict[str, Any]], resumed: list[dict[str, Any]], drifting: bool) -> None:
    for result in resumed:
        assert result["step"] == (6, 9)
        assert result["leftover"].keys() == saved[0]["leftover"].keys()
        for name, before in saved[0]["leftover"].items():
            torch.testing.assert_close(result["leftover"][name], before, rtol=1e-5, atol=1e-6)
        assert bool(torch.isfinite(result["flat"]).all())
        assert drifting or torch.equal(result["flat"], resumed[0]["flat"])


@pytest.mark.parametrize("spec", METHODS)
def test_reshard_keeps_the_mean_of_what_was_not_sent(cluster: Any, spec: str) -> None:
    place = METHODS.index(spec)
    for old, new in WAYS if ALL_WAYS else (WAYS[place % 5], WAYS[(place + 2) % 5]):
        saved = cluster.run(save, old, spec, {})
        _check(saved, cluster.run(resume, new, spec, saved, {}), "local" in spec)


@pytest.mark.parametrize(
    "spec", ["dgc:density=0.05,dense_below=8,values=fp32,factor_masking=true", "blocksign:dense_below=1"]
)
def test_reshard_keeps_the_mean_between_machines_with_several_ranks(cluster: Any, spec: str) -> None:
    for old, before, new, after in ((4, 2, 3, None), (3, None, 4, 2), (4, [[0, 1, 2], [3]], 5, [[0, 1], [2, 3, 4]])):
        saved = cluster.run(save, old, spec, {"hierarchy": before})
        _check(saved, cluster.run(resume, new, spec, saved, {"hierarchy": after}), False)


def incomplete(group: dist.ProcessGroup, saved: list[dict[str, Any]]) -> list[str]:
    _, _, wire = _attached(group, "blocksign:dense_below=1")
    states = [torch.load(io.BytesIO(one["wire"]), weights_only=True) for one in saved]
    before, sentences = _saved(wire.state_dict()), []
    other_step = {**states[1], "step": 99}
    for bad in ([], states[:-1], [states[0], other_step, *states[2:]], [{}, *states[1:]], [*states, states[0]]):
        with pytest.raises(ValueError) as caught:
            wire.load_state_dict(bad)
        sentences.append(str(caught.value))
    assert _saved(wire.state_dict()) == before
    return sentences


def test_reshard_refuses_incomplete_or_mixed_lists_and_changes_nothing(cluster: Any) -> None:
    saved = cluster.run(save, 3, "blocksign:dense_below=1", {})
    for sentences in cluster.run(incomplete, 2, saved):
        assert "no state" in sentences[0] and "ranks [0, 1]" in sentences[1] and "step" in sentences[2]
        assert all("\n" not in sentence for sentence in sentences)


def test_reshard_does_not_count_followers_of_a_machine() -> None:
    """A follower that got a velocity when momentum was handed over was taken for a rank with an empty residual."""
    common = {"hierarchy": ((0, 1), (2, 3)), "pending": {}, "world_size": 4}
    ones, none = {"w": torch.ones(4)}, dict[str, torch.Tensor]()
    states = [
        {**common, "rank": rank, "aggregator": {"memory": {"velocity": ones, "residual": none if rank % 2 else ones}}}
        for rank in range(4)
    ]
    memory = reshard(states, {"w": 4}, {}, {})["aggregator"]["memory"]
    assert torch.equal(memory["residual"]["w"], torch.ones(4)) and torch.equal(memory["velocity"]["w"], torch.ones(4))
