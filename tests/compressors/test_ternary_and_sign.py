"""What the ternary and the sign compressor make of a gradient, odd ones included."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from contexts import context_of
from generators import torch_generator_untouched  # noqa: F401  every test of this file
from means import mean_of
from sorted_topk import INF, NAN, vector
from torch import Tensor

import thinwire
from thinwire.compressors import Sign, Ternarize
from thinwire.transport import ThreadWorld

SIZES = [0, 1, 7, 1023, 4097]


@pytest.mark.parametrize("odd", [NAN, INF, -INF])
@pytest.mark.parametrize("clip", [None, 2.5])
@pytest.mark.parametrize("share", [False, True])
def test_ternary_payloads_show_what_is_not_finite(odd: float, clip: float | None, share: bool) -> None:
    """A broken gradient must be seen in the result; silently becoming zero would hide it."""
    x = torch.from_numpy(vector(5, 100, "plain"))
    x[42] = odd
    context, compressor = context_of([60, 40]), Ternarize(clip, share, 0)
    agreed = compressor.measure(context, x)
    payload = compressor.compress(context, x, agreed, 0).drawn()
    assert not bool(torch.isfinite(payload.values()[:60]).all())
    assert bool(torch.isfinite(payload.values()[60:]).all())
    assert set(payload.trits.tolist()) <= {-1, 0, 1}


@pytest.mark.parametrize("clip", [None, 2.5, 1.0])
@pytest.mark.parametrize("size", SIZES)
def test_ternary_values_of_the_clipped_gradient(clip: float | None, size: int) -> None:
    x = vector(6, size, "plain")
    compressor, context = Ternarize(clip, True, 0), context_of([size])
    given_: Tensor = torch.from_numpy(x.copy())
    agreed = compressor.measure(context, given_)
    payload = compressor.compress(context, given_, agreed, 0).drawn()
    assert np.array_equal(given_.numpy(), x)
    if not size:
        assert payload.trits.numel() == 0
        return
    exact = x.astype(np.float64)
    limit = np.inf if clip is None or exact.std() == 0 else clip * exact.std()  # without deviation: no clipping
    clipped = np.clip(exact, -limit, limit)
    assert float(agreed[0]) == pytest.approx(np.abs(clipped).max(), rel=1e-5)
    assert np.array_equal(np.sign(payload.trits.numpy()) * (payload.trits.numpy() != 0),
                          np.sign(x) * (payload.trits.numpy() != 0))  # fmt: skip
    if size > 1000:  # the share of trits that are not zero is the mean of |clipped| / s
        share = np.abs(clipped).mean() / np.abs(clipped).max()
        assert abs(float((payload.trits != 0).double().mean()) - share) < 5 * (share * (1 - share) / size) ** 0.5


def test_votes_of_zeros_are_fair_coins() -> None:
    x = torch.zeros(4097)
    x[:10], x[10:20] = -1.0, 1.0
    x[20:30] = -0.0
    negative = Sign().compress(context_of([4097], 3), x, None, 1).negative
    assert bool(negative[:10].all()) and not bool(negative[10:20].any())
    assert abs(float(negative[20:].double().mean()) - 0.5) < 5 * 0.5 / 4077**0.5
    assert torch.equal(negative, Sign().compress(context_of([4097], 3), x, None, 1).negative)
    assert not torch.equal(negative, Sign().compress(context_of([4097], 4), x, None, 1).negative)
    assert not torch.equal(negative, Sign().compress(context_of([4097], 3), x, None, 2).negative)


@pytest.mark.parametrize("numel", [1, 3])
def test_terngrad_moves_a_tensor_whose_elements_are_all_equal(numel: int) -> None:
    """Its deviation is zero: clipped at 2.5 times that, it never got a gradient."""
    for value in (-0.7, 1e-3, 12345.678):
        grad = torch.full((numel,), value)
        means = ThreadWorld(2).run(
            lambda net, g=grad: mean_of(thinwire.TernGrad().aggregator(net, True), context_of([numel]), g)
        )
        torch.testing.assert_close(means[0], grad)
