"""What every method in METHODS keeps: a new name there is tested without being named here."""

from __future__ import annotations

import inspect
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest
import torch
import workers
from cluster import Cluster
from means import mean_of
from workers import noise, sentence_of

import thinwire
from thinwire.advisor.cost import bucket_layouts, plan_exchange
from thinwire.engine.context import ExchangeContext, Hyper
from thinwire.transport import ThreadNet, ThreadWorld

ROWS = [("a", 0, torch.Size([40, 50])), ("b", 1, torch.Size([30]))]


@pytest.mark.parametrize("name", thinwire.METHODS)
def test_method_is_frozen_named_and_read_back_from_its_own_string(name: str) -> None:
    method = thinwire.METHODS[name]()
    assert method.name == name and str(method) == name and isinstance(method, thinwire.Method)
    assert thinwire.parse_method(name) == method and hash(method) == hash(thinwire.METHODS[name]())
    for option in fields(method):
        with pytest.raises(FrozenInstanceError):
            setattr(method, option.name, None)
        assert option.kw_only
    with pytest.raises(TypeError):
        thinwire.METHODS[name](1)  # positional
    assert type(method).__doc__


@pytest.mark.parametrize("method", thinwire.METHODS.values(), ids=str)
def test_every_option_is_explained_in_the_docstring(method: type[thinwire.Method]) -> None:
    lines = [line.split() for line in inspect.getdoc(method).splitlines()]  # type: ignore[union-attr]
    explained = {word.rstrip(",") for line in lines for word in line[:2]}
    assert {option.name for option in fields(method)} <= explained


@pytest.mark.parametrize("method", thinwire.METHODS.values(), ids=lambda m: m.name)
def test_method_refuses_an_option_that_it_does_not_have(method: Any) -> None:
    with pytest.raises(TypeError, match=f"{method.__name__} has no option 'colour'; known options"):
        method(colour="red")
    text = sentence_of(ValueError, lambda: thinwire.parse_method(f"{method.name}:colour=red"))
    known = "known methods" if method is thinwire.PerLayer else "known options"  # its string has patterns
    assert "'colour'" in text and method.name in text and known in text


def test_every_method_has_a_cost_model() -> None:
    for name, kind in thinwire.METHODS.items():
        (layout,) = bucket_layouts(kind(), [ROWS])
        plan = plan_exchange(kind(), layout, 4)
        assert (plan.nbytes > 0) == (name != "noop")


def contract(net: ThreadNet, name: str, sgd: bool) -> list[torch.Tensor]:
    """Four exchanges of a method's aggregator with default options, and a copy that takes its state over."""
    method: Any = thinwire.METHODS[name]()
    aggregator, other = method.aggregator(net, sgd), method.aggregator(net, sgd)
    layout = method.layout(ROWS)
    weights = tuple(torch.ones(segment.numel) for segment in layout.segments)
    outputs = []
    for step in range(4):
        context = ExchangeContext(layout, step, (Hyper(0.1, 0.9, True, 0.01),) * 2, weights)
        if step == 2:
            other.load_state_dict(workers.through_a_file(aggregator.state_dict()))
        grad = torch.cat([noise((s.numel,), net.rank, step, s.name) for s in layout.segments])
        parts = [part.clone() for part in layout.split(grad)]
        mean = mean_of(aggregator, context, grad)
        assert mean.shape == grad.shape and mean.dtype == torch.float32 and mean.isfinite().all()
        if step >= 2:  # the same from the saved state, of gradients that lie apart
            other.reduce(context, parts)
            assert torch.equal(torch.cat(parts), mean), f"{name}: another mean"
        outputs.append(mean)
    numels = {"a": 2000, "b": 30}
    rest = aggregator.leftover(numels, {"a": 0.1, "b": 0.1})
    assert {name: tensor.numel() for name, tensor in rest.items()}.items() <= numels.items()
    kept = [tensor for room in aggregator.state_dict().values() for tensor in room.get("residual", {}).values()]
    squares = sum(float(tensor.double().square().sum()) for tensor in kept)
    assert aggregator.residual_square_sum() == pytest.approx(squares) and bool(rest) == bool(squares)
    return outputs


@pytest.mark.parametrize("sgd", [True, False])
@pytest.mark.parametrize("name", thinwire.METHODS)
def test_aggregator_gives_finite_means_in_place_and_from_a_saved_state(name: str, sgd: bool) -> None:
    method = thinwire.METHODS[name]()
    if method.takes_momentum(sgd) and not sgd:
        pytest.skip(f"{name} needs SGD by default")
    results = ThreadWorld(3).run(lambda net: contract(net, name, sgd))
    if not method.replicas_drift:
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_every_method_trains_three_steps_on_three_ranks(cluster: Cluster) -> None:
    runs = [workers.Run(name, "tiny", 3) for name in thinwire.METHODS]  # two tensors are large enough for the defaults
    for run, *results in zip(runs, *cluster.run(workers.train, 3, runs), strict=True):
        assert results[0]["stats"].steps == 3
        assert (results[0]["trajectory"][0] - results[0]["trajectory"][-1]).abs().max() > 0
        if not thinwire.parse_method(run.method).replicas_drift:
            assert len({workers.digest(result["trajectory"]) for result in results}) == 1, run.method
