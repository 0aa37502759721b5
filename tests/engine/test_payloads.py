"""What was accepted of a payload, added and subtracted."""

from __future__ import annotations

import numpy as np
import torch
from generators import torch_generator_untouched  # noqa: F401  every test of this file
from torch import Tensor

from thinwire.codecs import SparseCodec
from thinwire.engine.context import ExchangeContext
from thinwire.engine.layout import Layout
from thinwire.engine.nonfinite_alarm import Alarm
from thinwire.engine.payloads import Accepted, Signs, Sparse, Ternary


def whole(accepted: Accepted, numel: int) -> Tensor:  # -> (numel,) float32
    """What was accepted as one vector, its tail behind."""
    coded = torch.zeros(numel - accepted.tail.numel())
    accepted.coded.add_to(coded)
    return torch.cat([coded, accepted.tail])


def test_accepted_part_and_the_rest_are_the_whole_of_every_payload() -> None:
    generator = np.random.default_rng(0)
    x = torch.from_numpy(generator.standard_normal(14).astype(np.float32))
    blocks = ((4, 2), (3, 1))
    payloads = [
        Sparse(torch.tensor([0, 5, 10]), torch.tensor([1.0, -2.0, 0.25]), 11, 5),
        Signs(torch.from_numpy(generator.random(11) < 0.5), torch.tensor([0.5, 1.0, 2.0]), blocks),
        Ternary.of(
            torch.from_numpy(generator.integers(-1, 2, 11).astype(np.int8)), torch.tensor([0.5, 1.0, 2.0]), blocks
        ),
    ]
    for payload in payloads:
        accepted = Accepted(payload, x[11:].clone())
        dense, rest = whole(accepted, 14), x.clone()
        accepted.subtract_from(rest)
        assert torch.allclose(dense + rest, x, atol=1e-6) and bool((rest[11:] == 0).all())
        total = torch.zeros(11)
        payload.add_to(total)
        assert torch.equal(total, dense[:11])


INF = float("inf")


def test_subtraction_keeps_finite_values_beside_a_broken_one() -> None:
    """int8 shows an inf as a nan of its whole chunk: the chunk's other values stay where they were."""
    x = torch.arange(1.0, 301.0)
    x[3] = INF
    codec, layout = SparseCodec("int8"), Layout.of([("w", 0, 300, True)])
    context, payload = ExchangeContext(layout, 0, ()), Sparse(torch.arange(300), x.clone(), 300, 300)
    frame = codec.encode(context, payload, torch.zeros(0), alarm=Alarm(parameter="w"))  # without, it would be refused
    back, tail, _ = codec.decode(context, frame, 300, 300, 0, x.device, "x")
    Accepted(back, tail).subtract_from(x)
    assert bool(torch.isfinite(x).all()) and x[3] == 0
    assert torch.equal(x[4:256], torch.arange(5.0, 257.0)) and float(x[256:].abs().max()) < 1.2
