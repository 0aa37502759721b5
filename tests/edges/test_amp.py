"""Loss scaling and gradients that are not finite, through real processes: nothing bad ever enters a residual."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from cluster import Cluster
from torch.nn.parallel import DistributedDataParallel as DDP
from workers import own_part

import thinwire

METHODS = [
    "dgc:density=0.1,dense_below=8,values=fp32,factor_masking=true",
    "gtopk:density=0.1",
    "terngrad:dense_below=0",
    "blocksign:dense_below=1",
    "dropping:density=0.1",
    "signsgd",
    "perlayer:0.*=dense,*=(dgc:density=0.1,dense_below=8)",
]
STEPS = 12


def _batch(rank: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + index)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 4, generator=generator)


def _model(group: dist.ProcessGroup) -> tuple[DDP, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(6, 20), torch.nn.Tanh(), torch.nn.Linear(20, 4))
    model = DDP(module, process_group=group, bucket_cap_mb=0.0002)
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-3)


def _flat(model: DDP) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def plain(group: dist.ProcessGroup, spec: str) -> torch.Tensor:
    model, optimizer = _model(group)
    thinwire.attach(model, optimizer, spec)
    for index in range(STEPS):
        x, y = _batch(dist.get_rank(group), index)
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    return _flat(model)


def scaled(group: dist.ProcessGroup, spec: str, bad_at: list[int], bad_rank: int) -> dict[str, Any]:
    """The same training under a GradScaler that grows often, with extra overflowing steps that must leave no trace."""
    model, optimizer = _model(group)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    wire = thinwire.attach(model, optimizer, spec, scaler=scaler)
    rank, scales = dist.get_rank(group), []
    for index in range(STEPS):
        for overflow in [True, False] if index in bad_at else [False]:
            x, y = _batch(rank, index)
            before = wire.state_dict()
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            if overflow and rank == bad_rank:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            old = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            if overflow:
                assert scaler.get_scale() < old, "the scaler did not see the infinity"
                assert _same(before, wire.state_dict()), "a skipped step changed the state"
    return {"parameters": _flat(model), "scales": scales}


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return bool(a == b)


def skipping(group: dist.ProcessGroup, spec: str, bad_at: list[int], bad_rank: int) -> torch.Tensor:
    """Without a scaler: a bad step is passed over by all ranks alike, the optimizer's state included."""
    model, optimizer = _model(group)
    wire = thinwire.attach(model, optimizer, spec, on_nonfinite="skip")
    rank = dist.get_rank(group)
    for index in range(STEPS):
        for bad in [True, False] if index in bad_at else [False]:
            x, y = _batch(rank, index)
            before = (wire.state_dict(), _flat(model))
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            (loss * float("nan") if bad and rank == bad_rank else loss).backward()
            optimizer.step()
            assert not bad or (_same(before[0], wire.state_dict()) and torch.equal(before[1], _flat(model)))
    return _flat(model)


def raising(group: dist.ProcessGroup, spec: str) -> tuple[str, bool]:
    model, optimizer = _model(group)
    wire = thinwire.attach(model, optimizer, spec)
    rank = dist.get_rank(group)
    x, y = _batch(rank, 0)
    (model(x) - y).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    try:
        ((model(x) - y).square().mean() * (float("nan") if rank == 1 else 1.0)).backward()
    except RuntimeError as error:
        memory = own_part(wire.state_dict())["aggregator"]["memory"]
        vectors = [v for kind in memory.values() for v in dict(kind).values() if isinstance(v, torch.Tensor)]
        return str(error), all(bool(torch.isfinite(vector).all()) for vector in vectors)
    return "no error", False


@pytest.mark.parametrize("spec", METHODS)
def test_scaler_changes_nothing_and_skipped_steps_leave_no_trace(cluster: Any, spec: str) -> None:
    expected = cluster.run(plain, 3, spec)
    got = cluster.run(scaled, 3, spec, [2, 7], 1)
    for result in got:
        assert torch.equal(result["parameters"], got[0]["parameters"])
        assert result["scales"] == got[0]["scales"] and max(result["scales"]) > min(result["scales"])
        torch.testing.assert_close(result["parameters"], expected[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("spec", METHODS)
def test_skip_passes_over_a_bad_step_on_all_ranks(cluster: Any, spec: str) -> None:
    expected = cluster.run(plain, 3, spec)
    got = cluster.run(skipping, 3, spec, [0, 5], 2)
    assert all(torch.equal(result, expected[0]) for result in got)


def test_nonfinite_gradient_stops_all_ranks_with_a_sentence_and_poisons_nothing(cluster: Any) -> None:
    for spec in METHODS:
        for sentence, clean in cluster.run(raising, 3, spec):
            assert "inf or a nan" in sentence and "on_nonfinite" in sentence and clean, (spec, sentence)


def unscaled(group: dist.ProcessGroup, with_closure: bool) -> tuple[str, bool]:
    """A scaler that the loop does not use, behind a method that left momentum with the optimizer."""
    model, optimizer = _model(group)
    rank = dist.get_rank(group)
    thinwire.attach(model, optimizer, METHODS[0]).detach()
    thinwire.attach(model, optimizer, METHODS[0], scaler=torch.amp.GradScaler("cpu"))
    x, y = _batch(rank, 0)
    before = _flat(model)

    def closure() -> torch.Tensor:
        loss: torch.Tensor = (model(x) - y).square().mean()
        loss.backward()
        return loss

    with pytest.raises(ValueError) as caught:
        if with_closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    return str(caught.value), torch.equal(before, _flat(model))


@pytest.mark.parametrize("with_closure", [False, True])
def test_scaler_that_scales_nothing_is_refused_before_a_parameter_changes(cluster: Any, with_closure: bool) -> None:
    for sentence, unchanged in cluster.run(unscaled, 2, with_closure):
        assert "scaler.scale(loss)" in sentence and unchanged


def test_on_nonfinite_and_scaler_refuse_bad_values_on_all_ranks(cluster: Any) -> None:
    for sentence in cluster.run(refused, 2):
        assert "on_nonfinite" in sentence[0] and "GradScaler" in sentence[1]


def refused(group: dist.ProcessGroup) -> list[str]:
    sentences = []
    for options in ({"on_nonfinite": "ignore"}, {"scaler": 3}):
        model, optimizer = _model(group)
        with pytest.raises(ValueError) as caught:
            thinwire.attach(model, optimizer, "dgc", **options)  # type: ignore[arg-type]
        sentences.append(str(caught.value))
    return sentences


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
