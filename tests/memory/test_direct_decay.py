"""Weight decay is applied at every step, whatever waits: direct_decay."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import thinwire
from thinwire.collectives import VoteServer
from thinwire.compressors import Sign
from thinwire.engine.aggregators import Exchange
from thinwire.engine.context import ExchangeContext, Hyper
from thinwire.engine.group_mean import Base
from thinwire.kernels import native, reference
from thinwire.kernels.native import library
from thinwire.memory import MomentumCorrection
from thinwire.methods import Method
from thinwire.transport import ThreadNet, ThreadWorld

STEPS, LR, DECAY = 120, 0.1, 0.02


def without_gradients(method: Method, hyper: Hyper, weights: Tensor) -> Tensor:
    """The weights after STEPS steps in which two workers have no gradient at all."""

    def train(net: ThreadNet) -> Tensor:
        aggregator, w = method.aggregator(net, True), weights.clone()
        layout = method.layout([("w", 0, w.shape)])
        for step in range(STEPS):
            update = torch.zeros(w.numel())
            aggregator.reduce(ExchangeContext(layout, step, (hyper,), (w,)), [update])
            w -= hyper.lr * update.view_as(w)
        return w

    first, second = ThreadWorld(2).run(train)
    assert torch.equal(first, second)
    return first


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("spec", ["dgc:density=0.001", "dgc:density=0.001,factor_masking=true", "gtopk:density=0.001"])
def test_direct_decay_shrinks_weights_as_sgd_although_hardly_anything_is_sent(spec: str, nesterov: bool) -> None:
    weights = torch.randn(50, 40, generator=torch.Generator().manual_seed(1))  # two of 2,000 are sent in a step
    parameter = torch.nn.Parameter(weights.clone())
    sgd = torch.optim.SGD([parameter], LR, 0.9, nesterov=nesterov, weight_decay=DECAY)
    for _ in range(STEPS):
        parameter.grad = torch.zeros_like(parameter)
        sgd.step()
    shrunk = float(parameter.detach().norm() / weights.norm())
    assert shrunk < 0.15
    hyper = Hyper(LR, 0.9, nesterov, DECAY)
    direct = without_gradients(thinwire.parse_method(f"{spec},direct_decay=true"), hyper, weights)
    waiting = without_gradients(thinwire.parse_method(f"{spec},direct_decay=false"), hyper, weights)
    assert float(direct.norm() / weights.norm()) == pytest.approx(shrunk, abs=0.03)
    assert float(waiting.norm() / weights.norm()) > 0.5, "most of them never had their turn"


def settled(spec: str, density: float) -> Tensor:
    """Where 400 elements come to rest that two workers push by a constant gradient, while they decay."""
    push = torch.linspace(0.5, 1.5, 400)
    hyper = Hyper(0.02, 0.9, False, 0.05)
    method = thinwire.parse_method(f"{spec},density={density},values=fp32,dense_below=0")

    def train(net: ThreadNet) -> Tensor:
        aggregator, w, layout = method.aggregator(net, True), torch.zeros(400), method.layout([("w", 0, push.shape)])
        for step in range(600):  # of which each takes a hundredth of what is left
            update = push.clone()
            aggregator.reduce(ExchangeContext(layout, step, (hyper,), (w,)), [update])
            w -= hyper.lr * update
        return w / (-push / 0.05)

    return ThreadWorld(2).run(train)[0]


@pytest.mark.parametrize("spec", ["dgc:factor_masking=false", "gtopk:momentum_correction=true"])
@pytest.mark.parametrize("density", [1.0, 0.1])
def test_direct_decay_and_gradient_keep_their_weights_beside_each_other(spec: str, density: float) -> None:
    """Weights come to rest where gradient and decay cancel, as with SGD: neither is counted more than the other."""
    for decay in ("", ",direct_decay=false"):
        rest = settled(spec + decay, density)
        assert float(rest.mean()) == pytest.approx(1.0, abs=0.02), decay
        torch.testing.assert_close(rest, torch.ones(400), rtol=0.2, atol=0)  # some were just sent, others wait


def test_direct_decay_is_the_stronger_with_masking() -> None:
    """As MomentumCorrection says: sent at every step, a gradient has no velocity, and the decay has."""
    spec = "dgc:factor_masking=true"
    torch.testing.assert_close(settled(spec, 1.0), torch.full((400,), 0.1), rtol=0.03, atol=0)
    waiting = settled(f"{spec},direct_decay=false", 1.0)
    assert float(waiting.mean()) > 0.4  # on its way to 1, ten times as slowly


@pytest.mark.parametrize("nesterov", [False, True])
def test_direct_decay_takes_the_same_off_in_all_homes(nesterov: bool) -> None:
    numels = (1000, 127, 70_001)
    parts, weights = ([torch.randn(n, generator=torch.Generator().manual_seed(n + s)) for n in numels] for s in (0, 1))
    rows = reference.Segments((0, 1000, 1127), (0.9, 0.5, 0.0), (nesterov,) * 3, (0.1, 0.2, 0.0), (*weights[:2], None),
                              (1.0, 0.4, 0.0))  # fmt: skip
    states = []
    for home in (native, reference) if library.handle() is not None else (reference,):
        u, v = (torch.randn(sum(numels), generator=torch.Generator().manual_seed(seed)) for seed in (8, 9))
        home.accumulate(parts, rows, u, v, None, 0)
        states.append((u, v))
    assert all(torch.equal(one, other) for one, other in zip(states[0], states[-1], strict=True))
    u, v = states[-1]
    before = torch.randn(sum(numels), generator=torch.Generator().manual_seed(9))[:1000]
    d = parts[0] + 0.1 * weights[0]
    step = d + 0.9 * u[:1000] if nesterov else u[:1000]
    torch.testing.assert_close(v[:1000], before + step - 1.0 * weights[0])


def test_direct_decay_leaves_others_alone_and_reads_16_bits_and_any_order_of_memory() -> None:
    """A group without decay beside one with it, in which an infinite weight must not become nan; channels_last."""
    method = thinwire.DGC(density=0.01, dense_below=0)
    image = torch.randn(4, 8, 3, 3).contiguous(memory_format=torch.channels_last)
    weights = {"a": torch.full((20, 20), -torch.inf), "b": torch.randn(30, 10).bfloat16(), "c": image}
    layout = method.layout([(name, place, w.shape) for place, (name, w) in enumerate(weights.items())])
    hypers = (Hyper(0.1, 0.9), Hyper(0.1, 0.9, weight_decay=0.02), Hyper(0.1, 0.9, weight_decay=0.01))
    context = ExchangeContext(layout, 0, hypers, tuple(weights.values()))
    parts = [torch.full((w.numel(),), 7.0) for w in weights.values()]
    Base(direct_decay=(0.0, 0.2, 0.1)).write(context, parts)
    assert torch.equal(parts[0], torch.zeros(400))
    assert torch.equal(parts[1], 0.2 * weights["b"].float().flatten())
    assert torch.equal(parts[2], 0.1 * image.permute(0, 2, 3, 1).flatten())
    assert MomentumCorrection(masking=False).direct_decay(context) == pytest.approx((0.0, 0.2, 0.1))


def test_direct_decay_is_refused_beside_a_collective_that_would_not_apply_it() -> None:
    (net,) = ThreadWorld(1).run(lambda net: net)
    exchange = Exchange(MomentumCorrection(masking=False), Sign(), VoteServer("server"), net)
    w = torch.ones(64, 64)
    layout = thinwire.SignSGD().layout([("w", 0, w.shape)])
    with pytest.raises(AssertionError, match="would be lost"):
        exchange.reduce(ExchangeContext(layout, 0, (Hyper(0.1, 0.9, weight_decay=0.1),), (w,)), [torch.ones(4096)])


def test_steady_decay_is_what_momentum_makes_of_it() -> None:
    assert Hyper(momentum=0.9, weight_decay=0.02).steady_decay == pytest.approx(0.2)
    assert Hyper(momentum=0.9, weight_decay=0.02, maximize=True).steady_decay == pytest.approx(-0.2)
    assert Hyper(weight_decay=0.02).steady_decay == 0.02
    assert Hyper(momentum=1.0, weight_decay=0.02).steady_decay == 0.02  # for ever more: no steady state


def test_direct_decay_must_be_true_or_false() -> None:
    with pytest.raises(ValueError, match="direct_decay must be True or False"):
        thinwire.parse_method("dgc:direct_decay=often")
