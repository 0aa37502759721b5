"""A method as one string, ``dgc:density=0.01,values=fp32``: how values are spelled and read, and what is refused."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire.methods.base import Method


def spell(value: Any) -> str:
    """An option's value as ``read_value`` reads it back."""
    if isinstance(value, tuple):
        return "+".join(value)
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def nearest(word: str, known: list[str]) -> str:
    """What to add to a sentence about an unknown word: the most similar one that is known, or nothing."""
    near = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def nearest_method(name: str, methods: Mapping[str, type[Method]], known: list[str]) -> str:
    """The same for a method, of which some settings are known by other names."""
    meant = next((kind.also_called[name] for kind in methods.values() if name in kind.also_called), None)
    return f" (did you mean {meant!r}?)" if meant else nearest(name, known)


def no_option(option: str, known: list[str]) -> str:
    """What to say behind the name of a method that was given an option that it does not have."""
    return f"has no option {option!r}{nearest(option, known)}; known options: {', '.join(known) or 'none'}"


def read_value(text: str, annotation: Any) -> Any:
    """Read an option's value by its declared type; what cannot be read stays text and is refused by the method."""
    is_union = typing.get_origin(annotation) in (types.UnionType, typing.Union)
    kinds = set(typing.get_args(annotation)) if is_union else {annotation}
    if text.lower() in ("none", "null") and type(None) in kinds:
        return None
    if bool in kinds and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if any(typing.get_origin(kind) is tuple for kind in kinds):
        return tuple(text.split("+")) if text else ()
    for kind in (int, float):
        if kind in kinds:
            try:
                return kind(text)
            except ValueError:
                continue
    return text


def split_items(text: str) -> list[str]:
    """What commas separate, without those inside of brackets."""
    items, depth = [""], 0
    for sign in text:
        depth += (sign == "(") - (sign == ")")
        if sign == "," and depth <= 0:
            items.append("")
        else:
            items[-1] += sign
    return [item.strip() for item in items if item.strip()]


def _joined(given: Mapping[str, Any], item: str) -> str:
    """What to add where ``item`` looks like a further pattern of the option before it."""
    option, value = list(given.items())[-1] if given else ("", None)
    if not isinstance(value, tuple):
        return ""
    return f"; several patterns of {option} are joined with +: {option}={'+'.join([*value, item])}"


def read_method(spec: str, methods: Mapping[str, type[Method]], others: Sequence[str] = ()) -> Method:
    """Read ``name:option=value,option=value`` as one of ``methods``, by name; see parse_method."""
    name, _, rest = spec.strip().partition(":")
    name = name.strip().lower()
    if name not in methods:
        known = [*methods, *others]
        near = nearest_method(name, methods, known)
        raise ValueError(f"unknown method {name!r}{near}; known methods: {', '.join(known)}")
    return methods[name].read(rest)


def read_options(kind: type[Method], text: str) -> dict[str, Any]:
    """The values of ``option=value,option=value`` by option."""
    hints = typing.get_type_hints(kind)
    options = [f.name for f in fields(kind)]
    given: dict[str, Any] = {}
    for item in split_items(text):
        option, equals, value = (piece.strip() for piece in item.partition("="))
        if not equals:
            raise ValueError(f"method {kind.name!r}: {item!r} is not of the form option=value{_joined(given, item)}")
        if option not in options:
            raise ValueError(f"method {kind.name!r} {no_option(option, options)}")
        if option in given:
            raise ValueError(f"method {kind.name!r}: option {option!r} is given twice")
        given[option] = read_value(value, hints[option])
    return given
