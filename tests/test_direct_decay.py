"""Weight decay is applied at every step, whatever waits: direct_decay."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import thinwire
from thinwire.layout import Hyper, Turn
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
            aggregator.reduce(Turn(layout, step, (hyper,), (w,)), [update])
            w -= hyper.lr * update.view_as(w)
        return w

    first, second = ThreadWorld(2).run(train)
    assert torch.equal(first, second)
    return first


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("spec", ["dgc:density=0.001", "dgc:density=0.001,factor_masking=true", "gtopk:density=0.001"])
def test_weights_decay_as_with_sgd_although_hardly_anything_is_sent(spec: str, nesterov: bool) -> None:
    weights = torch.randn(
        50, 40, generator=torch.Generator().manual_seed(1)
    )  # two elements of 2,000 are sent in a step
    parameter = torch.nn.Parameter(weights.clone())
    sgd = torch.optim.SGD([parameter], LR, 0.9, nesterov=nesterov, weight_decay=DECAY)
    for _ in range(STEPS):
        parameter.grad = torch.zeros_like(parameter)
        sgd.step()
    shrunk = float(parameter.detach().norm() / weights.norm())
    assert shrunk < 0.15
    hyper = Hyper(LR, 0.9, nesterov, DECAY)
    direct = without_gradients(thinwire.parse_method(spec), hyper, weights)
    waiting = without_gradients(thinwire.parse_method(f"{spec},direct_decay=false"), hyper, weights)
    assert float(direct.norm() / weights.norm()) == pytest.approx(shrunk, abs=0.03)
    assert float(waiting.norm() / weights.norm()) > 0.5, "most of them never had their turn"


def test_what_momentum_makes_of_the_decay() -> None:
    assert Hyper(momentum=0.9, weight_decay=0.02).steady_decay == pytest.approx(0.2)
    assert Hyper(momentum=0.9, weight_decay=0.02, maximize=True).steady_decay == pytest.approx(-0.2)
    assert Hyper(weight_decay=0.02).steady_decay == 0.02
    assert Hyper(momentum=1.0, weight_decay=0.02).steady_decay == 0.02  # for ever more: no steady state


def test_it_is_an_option_that_must_be_true_or_false() -> None:
    with pytest.raises(ValueError, match="direct_decay must be True or False"):
        thinwire.parse_method("dgc:direct_decay=often")
