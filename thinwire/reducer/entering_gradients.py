"""What an edge knows of gradients that enter an exchange, where not all of them is new."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from thinwire.engine.context import Hyper
from thinwire.engine.layout import Layout


class Entering(Protocol):
    """What an edge knows of gradients that enter an exchange, where not all of them is new."""

    def new_only(self, layout: Layout, parts: Sequence[Tensor]) -> None:
        """Take what is not new out of the gradients."""
        ...

    def enter(
        self, layout: Layout, parts: Sequence[Tensor], hypers: tuple[Hyper, ...], weights: tuple[Tensor, ...]
    ) -> tuple[tuple[Hyper, ...], tuple[Tensor, ...]]:
        """Put what is to be exchanged into the parts; return the hyper-parameters, and the weights that decay."""
        ...

    def leave(self, layout: Layout, parts: Sequence[Tensor]) -> None:
        """Add what lay in the gradients to the mean."""
        ...

    def written(self, layout: Layout, gradients: Sequence[Tensor]) -> None:
        """The mean is in the gradients."""
        ...
