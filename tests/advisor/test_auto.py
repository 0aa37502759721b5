"""The method "auto": it begins dense, chooses for all ranks alike, and says what it did not look at."""

from __future__ import annotations

import logging
from typing import Any

import torch
from cluster import Cluster
from heard import heard
from small_model import small
from workers import Run

import thinwire
from thinwire.advisor import auto
from thinwire.advisor.link import Link


def trains_auto(group: Any, with_adam: bool = False) -> tuple[str, int, list[str]]:
    """With "auto" a link is made to look thin, so that something is chosen; the training itself is real."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("thinwire").addHandler(handler)
    measured = auto.measure_link
    auto.measure_link = lambda net: Link(measured(net).alpha_s, 8 / 1e4)  # type: ignore[attr-defined]
    try:
        model, optimizer, step = small(group)
        if with_adam:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
        wire = thinwire.attach(model, optimizer, "auto")
        assert str(wire.method) == "dense"
        for _ in range(auto.WARMUP + auto.WATCHED + 3):
            optimizer.zero_grad()
            step()
            optimizer.step()
        chosen, steps = str(wire.method), wire.stats.steps
        wire.detach()
    finally:
        auto.measure_link = measured  # type: ignore[attr-defined]
        logging.getLogger("thinwire").removeHandler(handler)
    return chosen, steps, messages


def test_auto_starts_dense_and_changes_on_all_ranks_alike(cluster: Cluster) -> None:
    (first, steps, said), (second, _, silent) = cluster.run(trains_auto, 2)
    assert first == second and first in ("dgc", "gtopk", "blocksign", "terngrad") and steps == 10
    assert len(said) == 1 and said[0].startswith(f"thinwire: auto chose {first}") and not silent
    (with_adam, _, _), (other, _, _) = cluster.run(trains_auto, 2, True)
    assert with_adam == other == "terngrad"  # bf16 is slower here, and nothing else was trained with Adam


def refuses(group: Any) -> None:
    model, optimizer, _ = small(group)
    thinwire.attach(model, optimizer, "auto", hierarchy=1)


def test_auto_refuses_what_it_does_not_know(cluster: Cluster) -> None:
    for raised in cluster.run(refuses, 2, expect_errors=True):
        assert raised.type == "ValueError" and "flat groups only" in raised.message


def test_auto_says_that_speed_alone_decided(cluster: Cluster) -> None:
    first, second = cluster.run(heard, 2, Run("auto", "heavy"), 8)
    (chose,) = [sentence for sentence in first if "auto chose" in sentence]
    assert ("Speed alone decides" in chose) == ("auto chose dense: " not in chose) and second == []
