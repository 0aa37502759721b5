"""Fixtures for all tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path[:0] = [p for p in (str(Path(__file__).parent), str(Path(__file__).parents[1])) if p not in sys.path]

from cluster import Cluster  # noqa: E402

_LONGEST = ("test_train.py", "test_train_more.py", "test_faults.py", "test_oracles.py", "test_conservation.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first: with two test processes neither waits for the other at the end."""
    items.sort(key=lambda item: _LONGEST.index(item.path.name) if item.path.name in _LONGEST else len(_LONGEST))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Five Gloo processes for the whole session; they start with the first cluster.run()."""
    pool = Cluster()
    yield pool
    pool.stop()
