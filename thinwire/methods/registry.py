"""The methods by name: this package's own, those that were registered, and those of installed plugins."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from thinwire.methods.adviser_traits import UNMEASURED
from thinwire.methods.base import Method
from thinwire.methods.spec import read_method

log = logging.getLogger("thinwire")

GROUP = "thinwire.methods"  # of entry points: name = "package.module:Class"
RESERVED = ("auto",)  # what attach understands beside the methods

K = TypeVar("K", bound=type[Method])

_known: dict[str, type[Method]] = {}
_failed: dict[EntryPoint, str] = {}  # plugins that could not be imported, and the sentence about each
_told: set[str] = set()  # of these sentences, those that are in the log


def method(name: str) -> Callable[[K], K]:
    """Register a method under a name, which makes it known to ``parse_method``, the command line and the adviser.

    Goes on top of a frozen, keyword-only dataclass that extends ``thinwire.Method`` and whose options have defaults:

        @thinwire.method("yours")
        @dataclass(frozen=True, kw_only=True)
        class Yours(thinwire.Method): ...

    An installed package is found without an import when it has an entry point ``yours = "package.module:Yours"`` in the
    group ``thinwire.methods``.
    """

    def register(kind: K) -> K:
        _check(name, kind)
        kind.name = name
        _known[name] = kind
        return kind

    return register


def _check(name: object, kind: Any) -> None:
    """Raise a ValueError where this cannot be a method of this name."""
    called = f"@thinwire.method({name!r})"
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_-]*", name) or name in RESERVED:
        raise ValueError(f"{called}: a method's name is made of small letters, digits, - and _; choose another one")
    if not isinstance(kind, type) or not issubclass(kind, Method):
        raise ValueError(f"{called} needs a class that extends thinwire.Method, not {kind!r}")
    params: Any = kind.__dict__.get("__dataclass_params__")  # its own, not those of Method
    if params is None or not params.frozen or not all(option.kw_only for option in fields(kind)):
        raise ValueError(f"{called}: put @dataclass(frozen=True, kw_only=True) above the class {kind.__name__}")
    for option in fields(kind):
        if option.default is MISSING:
            raise ValueError(f"{called}: the option {option.name!r} needs a default, so that the bare name is a method")
    taken = _known.get(name)
    if taken is not None and (taken.__module__, taken.__qualname__) != (kind.__module__, kind.__qualname__):
        raise ValueError(
            f"{called}: the name is taken by {taken.__module__}.{taken.__qualname__}; choose another one for "
            f"{kind.__module__}.{kind.__qualname__}"
        )  # a class of the same place is a notebook's cell that is run again


class _Methods(Mapping[str, type[Method]]):
    """A view of all methods by name; plugins are imported when a name is not known, or when all are listed.

    A plugin that cannot be imported is left out of a list with one line in the log, and a ValueError when asked for.
    """

    def __getitem__(self, name: str) -> type[Method]:
        if name not in _known:
            failed = _import_plugins(name)
            if name not in _known and failed:
                raise ValueError(failed[0])
        return _known[name]

    def __contains__(self, name: object) -> bool:
        return name in _known or any(point.name == name for point in entry_points(group=GROUP))

    def __iter__(self) -> Iterator[str]:
        for sentence in _import_plugins():
            if sentence not in _told:
                _told.add(sentence)
                log.warning("thinwire: %s", sentence)
        return iter(list(_known))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"<the methods {', '.join(self)}>"


METHODS: Mapping[str, type[Method]] = _Methods()


def _import_plugins(name: str | None = None) -> list[str]:
    """Import the plugins of this name, or all; return what is to be said of those that failed."""
    points = [point for point in entry_points(group=GROUP) if name in (None, point.name)]
    for point in points:
        if point in _failed:
            continue
        try:
            found = point.load()  # its decorator registers it
            if _known.get(point.name) is not found:
                raise ValueError(f"{point.value} is not registered with @thinwire.method({point.name!r})")
        except Exception as error:  # whatever a stranger's module may raise
            first_line = (str(error).splitlines() or [""])[0]
            _failed[point] = (
                f"the method {point.name!r} of the installed package {_package(point)} cannot be used "
                f"({type(error).__name__}: {first_line}); repair or uninstall that package"
            )
    return [_failed[point] for point in points if point in _failed]


def _package(point: EntryPoint) -> str:
    dist = point.dist
    return f"{dist.name} {dist.version}" if dist is not None else point.value


def parse_method(spec: str, methods: Mapping[str, type[Method]] = METHODS, others: Sequence[str] = ()) -> Method:
    """Return the method that a string such as ``dgc:density=0.01,values=fp32`` describes.

    Several patterns of one option are joined with ``+``. Anything unknown is a ValueError that names what is known:
    ``methods``, and the names in ``others``, which the caller knows itself.
    """
    return read_method(spec, methods, others)


def for_other_optimizers(asked: Method) -> str:
    """What to say to somebody whose optimizer is not torch.optim.SGD, which the method needs."""
    trained: dict[str, list[str]] = {}  # by kind of model
    unmeasured = []
    for kind in METHODS.values():
        if kind.advised.other:
            trained.setdefault(kind.advised.suits, []).extend(kind.advised.other)
        elif kind.advised.why_not_other == UNMEASURED and not kind().takes_momentum(False):
            unmeasured.append(kind.name)
    if hasattr(asked, "momentum_correction"):
        unmeasured.append(f"momentum_correction=False (as a string: {asked.name}:momentum_correction=false)")
    suited = [f"{', '.join(specs)} ({models})" for models, specs in trained.items()]
    return (
        f"with that take {' or '.join(suited)}; {', '.join(unmeasured)} work with it, too, but nobody measured how "
        "accurate they are then"
    )
