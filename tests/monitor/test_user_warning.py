"""Warnings name the line of the user's script, however deep inside torch the hook is called."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire
from thinwire.monitor import user_warning

INSIDE_TORCH = str(Path(torch.__file__).parent / "nn" / "modules" / "module.py")
INSIDE_THINWIRE = str(Path(thinwire.__file__).parent / "stepping.py")


def called_from(file: str, inner: Any) -> Any:
    """A function that calls another one, as if it stood in that file."""
    names: dict[str, Any] = {"inner": inner}
    exec(compile("def outer():\n    inner()", file, "exec"), names)
    return names["outer"]


def told(act: Any) -> warnings.WarningMessage:
    with pytest.warns(RuntimeWarning, match="a sentence") as caught:
        act()
    (one,) = caught
    return one


def _hook() -> None:
    user_warning.warn_user("a sentence")


def test_warning_names_the_nearest_line_outside_of_torch_and_thinwire() -> None:
    in_torch = called_from(INSIDE_TORCH, called_from(INSIDE_TORCH, called_from(INSIDE_THINWIRE, _hook)))
    one = told(in_torch)
    assert one.filename == __file__
    lines = Path(__file__).read_text().splitlines()
    assert lines[one.lineno - 1].strip() == "act()", "the call that led into torch"


def test_warning_without_such_a_line_names_the_hook_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a backward pass that torch runs in a thread of its own."""
    monkeypatch.setattr(user_warning, "_NOT_THE_USERS", ("",))
    assert told(called_from(INSIDE_TORCH, called_from(INSIDE_THINWIRE, _hook))).filename == __file__
