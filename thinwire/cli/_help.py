"""Commands whose help shows switches as switches, not as options with a value of type <bool>, and names all methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from typer.core import TyperCommand, TyperGroup

from thinwire.advisor.advice import compared
from thinwire.lab.bench.cluster import benched
from thinwire.methods import METHODS

# What stands for these words in a help text. Looked up when help is shown, because that imports plugins.
LISTS: Mapping[str, Callable[[], str]] = {
    "{methods}": lambda: ", ".join(METHODS),
    "{compared}": lambda: ", ".join(compared(True)[1:]),
    "{compared_without_sgd}": lambda: ", ".join(compared(False)[1:]),
    "{benched}": lambda: ", ".join(spec.replace(",", ", ") for spec in benched()),
}


def _filled(text: Any) -> Any:
    for word, names in LISTS.items():
        if isinstance(text, str) and word in text:
            text = text.replace(word, names())
    return text


def _without_types(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if getattr(parameter, "is_flag", False) and parameter.metavar is None:
            parameter.metavar = ""
    return parameters


class Command(TyperCommand):
    """A command of this program."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        for parameter in self.params:
            for where in ("help", "show_default"):
                setattr(parameter, where, _filled(getattr(parameter, where, None)))
        super().format_help(ctx, formatter)


class Group(TyperGroup):
    """A command that has commands."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))
