"""Fixtures for all tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path[:0] = [p for p in (str(Path(__file__).parent), str(Path(__file__).parents[1])) if p not in sys.path]

from cluster import Cluster  # noqa: E402


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Five Gloo processes for the whole session; they start with the first cluster.run()."""
    pool = Cluster()
    yield pool
    pool.stop()
