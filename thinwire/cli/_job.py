"""What a training command asks for, checked before anything is started."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import thinwire
from thinwire.cli._complaints import Complaint, unknown
from thinwire.recipes import RECIPES


@dataclasses.dataclass(frozen=True)
class Job:
    """One recipe and the methods to train it with, one after the other; travels to every worker."""

    recipe: str
    specs: tuple[str, ...]
    epochs: int
    seed: int

    @classmethod
    def checked(cls, *, recipe: str, specs: Sequence[str], epochs: int | None, seed: int) -> Job:
        """A job whose names and options all exist, or a Complaint about the first that does not."""
        if recipe not in RECIPES:
            raise Complaint(unknown("recipe", recipe, RECIPES))
        for spec in specs:
            try:
                thinwire.parse_method(spec)
            except ValueError as error:
                raise Complaint(f"{error}.") from error
        return cls(recipe=recipe, specs=tuple(specs), epochs=epochs or RECIPES[recipe].epochs, seed=seed)


def split_specs(method: str, compare: str) -> list[str]:
    """The methods to run, in order and without repetition.

    Commas separate methods and options alike: a piece with an "=" and no ":" goes on with the options before
    it, so "dgc:density=0.01,warmup=72,dense" is two methods.
    """
    specs = [method.strip()]
    pieces: list[str] = []
    for piece in filter(None, (p.strip() for p in compare.split(","))):
        if pieces and "=" in piece and ":" not in piece.partition("=")[0] and ":" in pieces[-1]:
            pieces[-1] += f",{piece}"
        else:
            pieces.append(piece)
    return list(dict.fromkeys(specs + pieces))
