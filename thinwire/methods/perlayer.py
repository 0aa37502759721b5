"""A method for each parameter, by the pattern that its name matches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch

from thinwire.engine.layout import Layout
from thinwire.engine.protocols import Aggregator
from thinwire.engine.several_aggregators import Mixture
from thinwire.methods.adviser_traits import Advised
from thinwire.methods.base import Method, Rows, some_names
from thinwire.methods.dgc import DGC
from thinwire.methods.options import require
from thinwire.methods.registry import method, parse_method
from thinwire.methods.spec import split_items
from thinwire.transport import Net

Pairs = tuple[tuple[str, Method], ...]

_DEFAULT: Pairs = (("*", DGC()),)
_SIGNS = ",=()"  # have a meaning of their own in a method string
_MIXES = "it mixes the others as you say"


@method("perlayer")
@dataclass(frozen=True, kw_only=True, init=False)
class PerLayer(Method):
    """Different methods for different parameters: ``PerLayer({"embed*": "dense:dtype=bf16", "*": thinwire.DGC()})``.

    methods  a method, or its string, by the pattern of its parameters' names (with * and ?); the first match counts

    Names are those of ``model.named_parameters()``. Every parameter must match a pattern. As a string, in quotes in a
    shell: ``perlayer:embed*=(dense:dtype=bf16),*=dgc``.

    Every method works as if the model were its own parameters alone: ``clip_norm`` is of their gradient's norm, and a
    ``density`` a share of them. Momentum and weight decay of ``torch.optim.SGD`` act in front of the compression where
    a parameter's method takes them, and in the optimizer elsewhere; where parameters have several optimizers each
    method asks its own. One method that waits for the end of backward
    makes all of them wait.
    """

    benched: ClassVar[tuple[str, ...]] = ()
    advised: ClassVar[Advised] = Advised(why_not_sgd=_MIXES, why_not_other=_MIXES)

    methods: Pairs = _DEFAULT

    def __init__(self, methods: Mapping[str, Method | str] | Iterable[tuple[str, Method | str]] = _DEFAULT) -> None:
        try:
            pairs = [(pattern, one) for pattern, one in dict(methods).items()]
        except (TypeError, ValueError):
            raise TypeError(
                f"perlayer takes methods by pattern, such as {{'embed*': 'dense', '*': 'dgc'}}, not {methods!r}"
            ) from None
        require(bool(pairs), "perlayer: give at least one pattern with a method, such as {'*': 'dgc'}")
        object.__setattr__(self, "methods", tuple((pattern, _member(pattern, one)) for pattern, one in pairs))
        _check_averaging(self.members)

    # ---------------------------------------------------------------------------------------------------- who has what

    @property
    def members(self) -> tuple[Method, ...]:
        return tuple(one for _, one in self.methods)

    def place_of(self, name: str) -> int:
        """The place of the pattern that a parameter's name matches first."""
        place = next((place for place, (pattern, _) in enumerate(self.methods) if fnmatchcase(name, pattern)), None)
        if place is None:
            raise ValueError(f"perlayer: no pattern matches the parameter {name!r}; end with '*' for all others")
        return place

    def member_of(self, name: str) -> Method:
        return self.methods[self.place_of(name)][1]

    def in_steps(self, steps_per_epoch: int | None) -> Method:
        inner = {id(one): one.in_steps(steps_per_epoch) for one in self.members}
        return PerLayer([(pattern, inner[id(one)]) for pattern, one in self.methods])

    def check_names(self, names: list[str]) -> None:
        places = [self.place_of(name) for name in names]
        for place, (pattern, one) in enumerate(self.methods):
            own = [name for name, which in zip(names, places, strict=True) if which == place]
            if own:
                one.check_names(own)
            elif pattern != "*":  # all others, of which there may be none
                first = next((places[i] for i, name in enumerate(names) if fnmatchcase(name, pattern)), None)
                require(first is not None, f"perlayer: {pattern!r} matches no parameter; {some_names(pattern, names)}")
                before = self.methods[first or 0][0]
                raise ValueError(
                    f"perlayer: all that {pattern!r} matches is matched by {before!r} before it; put {pattern!r} first"
                )

    # ------------------------------------------------------------------------------------------------ what they say

    def takes_momentum(self, optimizer_is_sgd: bool) -> bool:
        return any(one.takes_momentum(optimizer_is_sgd) for one in self.members)

    def takes_weight_decay(self, optimizer_is_sgd: bool) -> bool:
        return any(one.takes_weight_decay(optimizer_is_sgd) for one in self.members)

    @property
    def communicates(self) -> bool:
        return any(one.communicates for one in self.members)

    @property
    def gives_step_gradient(self) -> bool:
        return all(one.gives_step_gradient for one in self.members)

    @property
    def averaging_interval(self) -> int | None:
        return next((one.averaging_interval for one in self.members if one.replicas_drift), None)

    @property
    def replicas_drift(self) -> bool:
        return any(one.replicas_drift for one in self.members)

    @property
    def applies_local_gradients(self) -> bool:
        return any(one.applies_local_gradients for one in self.members)

    @property
    def estimates_mean(self) -> bool:
        return any(one.estimates_mean for one in self.members)

    @property
    def bucket_independent(self) -> bool:
        return all(one.bucket_independent for one in self.members)

    @property
    def whole_model(self) -> bool:
        return any(one.whole_model for one in self.members)

    # ------------------------------------------------------------------------------------------------- an exchange

    def is_coded(self, name: str, shape: torch.Size) -> bool:
        return self.member_of(name).is_coded(name, shape)

    def layout(self, rows: Rows, *, model: Rows | None = None, compress: bool = True) -> Layout:
        own, whole = self._by_member(rows), self._by_member(rows if model is None else model)
        of_methods = tuple(
            # One that gives no mean has work to do also where the mean is there without it.
            one.layout(own[place], model=whole[place], compress=compress or not one.estimates_mean)
            for place, one in enumerate(self.members)
        )
        coded = {segment.ordinal for layout in of_methods for segment in layout.coded}
        together = Layout.of([(name, place, shape.numel(), place in coded) for name, place, shape in rows])
        return Layout(together.segments, together.coded_sizes, of_methods)

    def _by_member(self, rows: Rows) -> list[Rows]:
        places = [self.place_of(name) for name, _, _ in rows]
        return [
            [row for row, which in zip(rows, places, strict=True) if which == place]
            for place in range(len(self.methods))
        ]

    def aggregator(self, net: Net, optimizer_is_sgd: bool) -> Aggregator:
        return self.assembled(net, lambda _: optimizer_is_sgd)

    def assembled(self, net: Net, of_sgd: Callable[[Method], bool]) -> Aggregator:
        try:
            return Mixture([one.aggregator(net, of_sgd(one)) for one in self.members], self.place_of)
        except ValueError as problem:
            raise ValueError(f"perlayer: {problem}") from None

    # --------------------------------------------------------------------------------------------------- as a string

    @classmethod
    def read(cls, text: str) -> Method:
        items = [tuple(piece.strip() for piece in item.partition("=")) for item in split_items(text)]
        given: dict[str, str] = {}
        for pattern, equals, spec in items:
            require(bool(equals), f"method 'perlayer': {pattern!r} is not of the form pattern=method")
            require(pattern not in given, f"method 'perlayer': the pattern {pattern!r} is given twice")
            given[pattern] = spec[1:-1] if spec.startswith("(") and spec.endswith(")") else spec
        return cls(given) if given else cls()

    def __str__(self) -> str:
        return self.name if self.methods == _DEFAULT else self._spelled(str(one) for one in self.members)

    @property
    def in_full(self) -> str:
        return self._spelled(one.in_full for one in self.members)

    def _spelled(self, specs: Iterable[str]) -> str:
        rows = zip(self.methods, specs, strict=True)
        return f"{self.name}:" + ",".join(f"{p}=({spec})" if ":" in spec else f"{p}={spec}" for (p, _), spec in rows)


def _member(pattern: Any, one: Any) -> Method:
    """One method of a mixture; a ValueError that names its pattern where it can be none."""
    require(
        isinstance(pattern, str) and bool(pattern.strip()) and not any(sign in pattern for sign in _SIGNS),
        f"perlayer: a pattern is a part of a name with * and ?, without any of {' '.join(_SIGNS)}, not {pattern!r}",
    )
    if isinstance(one, str):
        try:
            one = parse_method(one)
        except ValueError as problem:
            hint = "; a method's options stand in brackets: *=(dgc:density=0.01,values=fp32)"
            unknown = str(problem).startswith("unknown method")
            raise ValueError(f"method 'perlayer': {pattern!r}: {problem}{hint if unknown else ''}") from None
    if isinstance(one, type) and issubclass(one, Method):
        raise ValueError(f"perlayer: {pattern!r} has the class {one.__name__}; make one of it: {one.__name__}()")
    require(isinstance(one, Method), f"perlayer: {pattern!r} must have a method or its string form, not {one!r}")
    require(
        len(one.members) == 1 and one.members[0] is one,
        f"perlayer: {pattern!r} has a perlayer inside of this one; put all patterns into one",
    )
    require(
        one.outer_rule is None,
        f"perlayer: {pattern!r} has {one.name}, whose steps are those of the whole model; put the perlayer inside: "
        "local:method=(perlayer:...)",
    )
    member: Method = one
    return member


def _check_averaging(members: Iterable[Method]) -> None:
    """Replicas are equal behind an averaging only where all that drifts is averaged then."""
    drifting = {one.averaging_interval: one for one in members if one.replicas_drift}
    if len(drifting) > 1:
        said = " and ".join(f"{one} {f'every {n} steps' if n else 'never'}" for n, one in drifting.items())
        raise ValueError(f"perlayer: parameters are averaged at the same steps, but by {said}; give one sync_every")
