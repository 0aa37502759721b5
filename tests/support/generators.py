"""What a file imports whose tests must not draw from the user's generator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def torch_generator_untouched() -> Iterator[None]:
    """Every test of the file that imports this leaves torch's generator as it was."""
    before = torch.get_rng_state()
    yield
    assert torch.equal(before, torch.get_rng_state())
