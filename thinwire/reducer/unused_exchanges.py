"""Exchanges of gradients that no optimizer used, where another one has stepped since: they leave no trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thinwire.reducer.reducer import Reducer


def take_back(reducer: Reducer) -> None:
    """Take them back: another method follows, or none."""
    for name, before in reducer.unused().items():
        reducer.put_back(name, before)


@contextmanager
def taken_back(reducer: Reducer) -> Iterator[None]:
    """They are taken back for the time of the block: a state has no gradients, so who loads it has cleared them."""
    unused = reducer.unused()
    now, pending = {name: reducer.copy_of(name) for name in unused}, dict(reducer.pending)
    take_back(reducer)
    try:
        yield
    finally:
        for name, copies in now.items():
            reducer.put_back(name, copies)
        reducer.pending = pending
