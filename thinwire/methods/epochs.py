"""Lengths in epochs, such as a warm-up's, and what they are in optimizer steps."""

from __future__ import annotations

import re

_EPOCHS = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*epochs?\s*", re.IGNORECASE)


def epochs_in(text: object) -> float | None:
    """The number in "4 epochs"; None where a text says no length above 0."""
    match = _EPOCHS.fullmatch(text) if isinstance(text, str) else None
    epochs = float(match[1]) if match else 0.0
    return epochs if epochs > 0 else None


def steps_in(whose: str, text: str, steps_per_epoch: int | None) -> int:
    """A length in epochs as optimizer steps; ``whose`` says what has it."""
    epochs = epochs_in(text)
    assert epochs is not None, "the method checks it when it is made"
    if steps_per_epoch is None:
        raise ValueError(
            f'{whose}="{text}" needs the length of an epoch: give steps_per_epoch=len(loader) as well, or a number of '
            "optimizer steps"
        )
    steps = round(epochs * steps_per_epoch)
    if steps < 1:
        raise ValueError(
            f'{whose}="{text}" is less than one of {steps_per_epoch} steps per epoch; give more, or leave it out'
        )
    return steps


def check_steps_per_epoch(value: object) -> None:
    """Raise where this is no number of optimizer steps."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(
            f"steps_per_epoch must be the number of optimizer steps in an epoch, at least 1, not {value!r}"
        )
