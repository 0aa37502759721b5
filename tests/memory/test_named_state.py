"""State by parameter name, in flat vectors, in float32 or bfloat16."""

from __future__ import annotations

import torch
import workers

from thinwire.engine.bfloat16_rounding import round_by_chance
from thinwire.engine.context import ExchangeContext, Hyper
from thinwire.engine.layout import Layout
from thinwire.engine.named_state import RESIDUAL, NamedState


def test_round_by_chance_goes_to_a_neighbour_and_its_mean_is_the_number_itself() -> None:
    x = workers.noise((4096,), 0, 0, "x") * torch.logspace(-20, 20, 4096)
    down = (x.view(torch.int32) & -65536).view(torch.float32)  # towards zero
    up = (down.view(torch.int32) + 65536).view(torch.float32)
    total = torch.zeros(4096, dtype=torch.float64)
    for key in range(400):
        rounded = round_by_chance(x, key)
        assert rounded.dtype == torch.bfloat16
        assert bool(((rounded.float() == down) | (rounded.float() == up)).all())
        total += rounded.double()
    # 400 draws of a step between two neighbours: five standard errors of the mean.
    assert bool(((total / 400 - x).abs() <= 5 * (up - down).abs().double() / 2 / 20).all())
    exact = x.to(torch.bfloat16)
    assert torch.equal(round_by_chance(exact.float(), 7), exact), "what bfloat16 can say is kept"
    assert torch.equal(round_by_chance(x, 3), round_by_chance(x, 3)), "the same key, the same bits"
    largest = torch.tensor([torch.finfo(torch.float32).max, -torch.finfo(torch.float32).max])
    assert not round_by_chance(largest * 0.99, 1).isnan().any()


def test_named_state_in_bf16_adds_up_what_is_small_beside_it() -> None:
    """1/1024 of the residual per step: to the nearest all of it would be lost, at every step."""
    layout = Layout.of([("w", 0, 2000, True)])
    state, steps = NamedState(RESIDUAL, dtype=torch.bfloat16), 512
    nearest = torch.ones(2000, dtype=torch.bfloat16)
    state.flat("residual", layout, torch.device("cpu")).fill_(1.0)
    state.commit(ExchangeContext(layout, 0, (Hyper(),)), 0)
    for step in range(1, steps + 1):
        state.flat("residual", layout, torch.device("cpu")).add_(1 / 1024)
        state.commit(ExchangeContext(layout, step, (Hyper(),)), 0)
        nearest += 1 / 1024
    kept = state.named["residual"]["w"]
    assert kept.dtype == torch.bfloat16 and torch.equal(nearest, torch.ones_like(nearest))
    assert abs(float(kept.double().mean()) - 1.5) < 0.01  # one element's deviation is 0.06, the mean's 0.0014


CPU = torch.device("cpu")


def test_named_state_of_parameters_that_fall_out_of_use_keeps_no_whole_vectors() -> None:
    rows = [(f"p{i}", i, 1000, True) for i in range(20)]
    state = NamedState(RESIDUAL)
    for first in range(20):
        layout = Layout.of(rows[first:])
        state.flat("residual", layout, CPU).add_(1.0)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in state.named["residual"].values()}
    assert sum(storages.values()) == 20 * 4000
    for i in range(20):
        assert torch.equal(state.named["residual"][f"p{i}"], torch.full((1000,), i + 1.0))
    whole = state.flat("residual", Layout.of(rows), CPU)
    assert torch.equal(whole.view(20, 1000)[:, 0], torch.arange(1.0, 21.0))
