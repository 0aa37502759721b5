"""Hooks that stay with the model they were registered on: a copy of that model is a plain one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class OwnHook:
    """Calls a function. A copy of the model, also one through a file, has a hook in its place that does nothing."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __reduce__(self) -> Any:
        return _in_a_copy, ()


def _in_a_copy() -> Callable[..., None]:
    return _nothing


def _nothing(*_: Any) -> None:
    return
