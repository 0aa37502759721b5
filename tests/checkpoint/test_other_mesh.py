"""States in shards, put together and cut: every element comes to its place, and none is there twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from thinwire.checkpoint.other_mesh import cut, joined
from thinwire.engine.shards import span_of

FORMS = (("a", (5, 3), (0, 1)), ("b", (2,), (0,)), ("c", (8, 1, 2), (0, 1, 2)))


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 9])
@pytest.mark.parametrize("of", [1, 2, 3, 4, 7])
def test_spans_are_those_of_torch_chunk(rows: int, of: int) -> None:
    whole = torch.arange(rows * 6).view(rows, 3, 2)
    chunks = [chunk.flatten() for chunk in torch.chunk(whole, of)]
    for place in range(of):
        start, stop = span_of(whole.shape, place, of)
        expected = chunks[place] if place < len(chunks) else torch.zeros(0, dtype=torch.int64)
        assert torch.equal(whole.flatten()[start:stop], expected)


def vector(name: str, rank: int) -> Tensor:
    """All elements of a replica's vector are known by their values."""
    numel = next(torch.Size(shape).numel() for own, shape, _ in FORMS if own == name)
    return torch.arange(numel, dtype=torch.float32) + 100 * rank + 1000 * ord(name)


def states(replicas: int, shards: int) -> list[dict[str, Any]]:
    """What all ranks of a mesh would have saved: a residual each, and what they serve of an error, in stretches."""
    found = []
    for rank in range(replicas):
        for shard in range(shards):
            spans = {name: span_of(shape, shard, shards) for name, shape, _ in FORMS}
            residual = {name: vector(name, rank)[slice(*span)].clone() for name, span in spans.items()}
            served, starts = {}, {}
            for name, (start, stop) in spans.items():
                first, last = span_of((stop - start,), rank, replicas) if replicas > 1 else (0, stop - start)
                if last > first:
                    served[name], starts[name] = vector(name, 7)[start + first : start + last].clone(), first
            found.append({
                "rank": rank, "shard": shard, "shards": shards, "world_size": replicas, "parameters": FORMS,
                "pending": {"b": residual["b"]} if rank == 0 else {},
                "aggregator": {
                    "memory": {"residual": residual, "rates": dict.fromkeys(spans, 0.1)},
                    "collective": {"residual": served, "rates": dict.fromkeys(served, 0.1), "starts": starts},
                },
            })  # fmt: skip
    return found


@pytest.mark.parametrize("before", [(2, 2), (1, 4), (4, 1), (2, 3)])
@pytest.mark.parametrize("of", [1, 2, 4, 5])
def test_what_was_joined_and_cut_is_the_replicas_vector(before: tuple[int, int], of: int) -> None:
    together = joined(states(*before)[::-1])  # in any order
    assert len(together) == before[0]
    for place in range(of):
        for rank, state in enumerate(cut(together, place, of)):
            memory, served = state["aggregator"]["memory"], state["aggregator"]["collective"]
            for name, shape, _ in FORMS:
                span = slice(*span_of(shape, place, of))
                assert torch.equal(memory["residual"][name], vector(name, rank)[span]), (name, place)
                assert memory["rates"][name] == 0.1
                if rank == 0:
                    assert torch.equal(served["residual"][name], vector(name, 7)[span]), (name, place)
                    assert served["starts"][name] == 0 and served["rates"][name] == 0.1
            assert rank == 0 or not any(served.values())
            pending = {"b": vector("b", 0)[slice(*span_of((2,), place, of))]} if rank == 0 else {}
            assert state["pending"].keys() == pending.keys()
            assert all(torch.equal(state["pending"][name], pending[name]) for name in pending)
