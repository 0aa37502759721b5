"""Indices in frames: every coding against plain Python, its budget, and what is left out where that is too small."""

from __future__ import annotations

import numpy as np
import plain_wire as plain
import pytest
import torch
from generators import torch_generator_untouched  # noqa: F401  every test of this file
from hypothesis import given, settings
from hypothesis import strategies as st
from tensor_bytes import to_bytes, to_tensor
from torch import Tensor

from thinwire.codecs import SparseCodec
from thinwire.codecs.frame import Body
from thinwire.codecs.indices import IndexPlan, RiceSections, decode_indices, index_budget
from thinwire.engine.context import ExchangeContext
from thinwire.engine.layout import Layout
from thinwire.engine.payloads import Sparse

QUICK = settings(deadline=None, max_examples=60, derandomize=True)
CPU = torch.device("cpu")


@st.composite
def index_sets(draw: st.DrawFn) -> tuple[list[int], int]:
    numel = draw(st.sampled_from([1, 7, 1023, 4097, 65535, 65536, 65537, 200_000, 2**31 - 1]))
    starts = draw(st.lists(st.integers(0, numel - 1), max_size=40))
    lengths = draw(st.lists(st.integers(1, 20), min_size=len(starts), max_size=len(starts)))
    chosen = {i for s, n in zip(starts, lengths, strict=True) for i in range(s, min(numel, s + n))}
    edges = {0, numel - 1} if draw(st.booleans()) else set()
    return sorted(chosen | edges), numel


def written_by(section: RiceSections) -> torch.Tensor:
    """What a section writes, into memory that holds something else before."""
    out = torch.full((section.nbytes,), 0xAB, dtype=torch.uint8)
    section.write(out)
    return out


@pytest.mark.parametrize("coding", ["int32", "delta16", "rice"])
@QUICK
@given(case=index_sets())
def test_index_codings_equal_the_second_implementation(coding: str, case: tuple[list[int], int]) -> None:
    indices, numel = case
    given_ = torch.tensor(indices, dtype=torch.int64)
    plan = IndexPlan(coding, given_, numel)
    parameter = plan.parameter
    written = [section if isinstance(section, torch.Tensor) else written_by(section) for section in plan.sections()]
    content = b"".join(to_bytes(section) + bytes(-section.numel() % 4) for section in written)
    expected = plain.encode_indices(coding, indices, parameter)
    assert content == b"".join(section + bytes(-len(section) % 4) for section in expected)
    body = Body(to_tensor(content), "x")
    assert decode_indices(coding, len(indices), numel, parameter, body).tolist() == indices
    body.finish()
    # The budget is a function of (numel, k); up to 4096 entries, Rice coding fits whatever they are.
    budget = index_budget(coding, numel, len(indices))
    assert budget == plain.index_budget(coding, numel, len(indices)) and budget % 4 == 0
    assert len(content) == -(-plan.nbytes // 4) * 4
    excess = plan.excess(budget)
    assert (excess == 0) == (len(content) <= budget)
    if coding != "delta16" or numel < 8 * 65535:
        assert excess == 0


@pytest.mark.parametrize("numel", [1, 7, 1023, 4097, 10**6, 25_557_032, 2**31 - 1, 2**32 - 1])
@pytest.mark.parametrize("coding", ["int32", "delta16", "rice"])
def test_index_budgets_of_the_document(coding: str, numel: int) -> None:
    for k in {0, 1, 2, 255, 256, 4095, 4096, 4097, 25_557, numel // 1000, numel // 4, numel // 2, numel - 1, numel}:
        if 0 <= k <= numel:
            for any_ in (False, True):
                assert index_budget(coding, numel, k, any_) == plain.index_budget(coding, numel, k, any_)


@pytest.mark.parametrize("fewer", [0, 1, 100, 4000])
def test_fewer_entries_than_room_always_fit(fewer: int) -> None:
    """Sampled selection may find less than k: the budget of k holds any smaller set too."""
    generator = np.random.default_rng(fewer)
    for numel in (4096, 5000, 10**6, 2**31 - 1):
        budget = index_budget("rice", numel, 4096)
        for _ in range(3):
            indices = np.unique(generator.integers(0, numel, 4096 - fewer))
            worst = np.arange(4096 - fewer) * (numel // 4096) + numel % 4096
            for chosen in (indices, worst):
                assert IndexPlan("rice", torch.from_numpy(chosen), numel).excess(budget) == 0


# --------------------------------------------------------------------------------------------------------- over budget


def clustered(numel: int, k: int, runs: int) -> Tensor:
    """k indices in ``runs`` runs of neighbours, spread so that the gaps between them are as expensive as possible."""
    lengths = [k // runs + (i < k % runs) for i in range(runs)]
    starts = [(numel - k) * (i + 1) // runs for i in range(runs)]
    before, parts = 0, []
    for start, length in zip(starts, lengths, strict=True):
        parts.append(torch.arange(start + before, start + before + length))
        before += length
    return torch.cat(parts)


@pytest.mark.parametrize(
    ("coding", "numel", "k", "runs"),
    [("delta16", 25_557_032, 25_557, 3), ("delta16", 4_000_000, 300, 10), ("rice", 2_000_000, 20_000, 500)],
)
def test_entries_that_do_not_fit_are_the_smallest(coding: str, numel: int, k: int, runs: int) -> None:
    indices = clustered(numel, k, runs)
    assert indices.numel() == k and bool((indices[1:] > indices[:-1]).all()) and int(indices[-1]) < numel
    values = torch.from_numpy(np.random.default_rng(0).permutation(k).astype(np.float32)) - k / 3
    layout = Layout.of([("w", 0, numel, True)])
    context, codec = ExchangeContext(layout, 0, ()), SparseCodec("fp32", coding)
    frame = codec.encode(context, Sparse(indices, values, numel, k), torch.zeros(0))
    assert frame.numel() == codec.nbytes(numel, k, 0)
    back = codec.decode(context, frame, numel, k, 0, CPU, "x").content
    left_out = k - back.indices.numel()
    assert 0 < left_out < k // 2, "the case is meant to overflow, and not to lose most of it"
    kept = torch.isin(indices, back.indices)
    assert torch.equal(indices[kept], back.indices) and torch.equal(values[kept], back.values)
    assert float(values[~kept].abs().max()) <= float(values[kept].abs().min())


@pytest.mark.parametrize("coding", ["delta16", "rice"])
def test_entries_that_do_not_fit_are_the_last_of_equal_ones(coding: str) -> None:
    numel, k = 4_000_000, 20_000 if coding == "rice" else 300
    indices = clustered(numel, k, 500 if coding == "rice" else 10)
    context, codec = ExchangeContext(Layout.of([("w", 0, numel, True)]), 0, ()), SparseCodec("fp32", coding)
    frame = codec.encode(context, Sparse(indices, torch.ones(k), numel, k), torch.zeros(0))
    back = codec.decode(context, frame, numel, k, 0, CPU, "x").content
    assert torch.equal(back.indices, indices[: back.indices.numel()])
