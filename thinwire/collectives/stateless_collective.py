"""What a collective without memory of its own answers when asked for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from torch import Tensor

from thinwire.engine.named_state import StateKind


class StatelessCollective:
    """A collective that keeps nothing between two exchanges."""

    kinds: ClassVar[tuple[StateKind, ...]] = ()  # of vectors that a server keeps
    frames_grow: ClassVar[bool] = False

    def copy_of(self, name: str) -> Any:
        return None

    def put_back(self, name: str, copies: Any) -> None:
        return

    def served(self, numels: Mapping[str, int], rank: int, size: int) -> dict[str, tuple[int, int]]:
        return {}

    def residual_square_sum(self) -> float:
        return 0.0

    def leftover(self, rates: dict[str, float]) -> Iterable[tuple[str, int, Tensor]]:
        return ()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        return
