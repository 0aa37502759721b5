"""Cables pulled on emulated hosts."""

from __future__ import annotations

from typing import Any


def run_cuts(cuts: int, methods: list[str], seed: int) -> list[dict[str, Any]]:
    raise NotImplementedError
