"""What all methods have in common."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from thinwire.codecs.values import SHARED_SCALES
from thinwire.engine.layout import Layout
from thinwire.engine.outer_step import OuterRule
from thinwire.engine.protocols import Aggregator
from thinwire.methods.adviser_traits import Advised
from thinwire.methods.epochs import epochs_in, steps_in
from thinwire.methods.spec import no_option, read_options, spell
from thinwire.transport import Net

if TYPE_CHECKING:
    from typing_extensions import Self

Rows = Sequence[tuple[str, int, torch.Size]]  # parameter name, ordinal, shape


def some_names(pattern: str, names: list[str]) -> str:
    """What to add to a sentence about a pattern that matches nothing."""
    near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or names[:3]
    return f"there are for example {', '.join(near)}"


@dataclass(frozen=True, kw_only=True)
class Method:
    """A frozen description of a method; ``aggregator`` puts its parts together, which is all that one must define.

    ``name`` is the one used in method strings, given by ``@thinwire.method``. The other class attributes and the
    properties are what the engine, the adviser and the command line want to know; their defaults suit a method that
    compresses every gradient on its own. Options of these names get their meaning here: ``clip_norm``, ``dense_below``,
    ``exclude``, ``residual``, ``values`` and ``warmup`` (as of ``thinwire.DGC``).
    """

    name: ClassVar[str] = ""
    paper: ClassVar[str | None] = None  # the string of the paper's own setting, where the defaults are another
    also_called: ClassVar[Mapping[str, str]] = {}  # what people write for a setting: {"bf16": "dense:..."}
    advised: ClassVar[Advised] = Advised()
    benched: ClassVar[tuple[str, ...] | None] = None  # the settings in `thinwire bench cluster`; None: the defaults

    def __new__(cls, *_: Any, **options: Any) -> Self:
        """Refuse an unknown option with the sentence that a method string gets for it."""
        if "__dataclass_fields__" in cls.__dict__:  # a subclass that is no dataclass has an __init__ of its own
            known = [f.name for f in fields(cls)]
            for option in options:
                if option not in known:
                    raise TypeError(f"{cls.__name__} {no_option(option, known)}")
        return super().__new__(cls)

    def aggregator(self, net: Net, optimizer_is_sgd: bool) -> Aggregator:
        """Put memory, compressor and collective together around a net."""
        raise NotImplementedError(f"{type(self).__name__} must define aggregator(net, optimizer_is_sgd)")

    def assembled(self, net: Net, of_sgd: Callable[[Method], bool]) -> Aggregator:
        """The aggregator, where each of the ``members`` has parameters of torch.optim.SGD or of other optimizers."""
        return self.aggregator(net, all(of_sgd(one) for one in self.members))

    def of_sgd(self, names: Collection[str], sgd: Collection[str]) -> Callable[[Method], bool]:
        """Whether all parameters of a member are among those of torch.optim.SGD: one method treats its parameters
        alike."""
        mixed = {id(self.member_of(name)) for name in names if name not in sgd}
        return lambda member: id(member) not in mixed

    @property
    def members(self) -> tuple[Method, ...]:
        """The methods that parameters can have: this one, or those of a mixture."""
        return (self,)

    def member_of(self, name: str) -> Method:
        """The method of one parameter."""
        return self

    def in_steps(self, steps_per_epoch: int | None) -> Method:
        """The same method with its warm-up in optimizer steps, where it was given in epochs."""
        warmup: Any = getattr(self, "warmup", None)
        if epochs_in(warmup) is None:
            return self
        return replace(self, **{"warmup": steps_in(f"{self.name}: warmup", warmup, steps_per_epoch)})

    @property
    def communicates(self) -> bool:
        """False: every rank is on its own, for measurements."""
        return True

    @property
    def gives_step_gradient(self) -> bool:
        """Whether it gives the mean of this very step's gradients, which a loop may clip."""
        return False

    def takes_momentum(self, optimizer_is_sgd: bool) -> bool:
        """Whether momentum is applied in front of the compression instead of by the optimizer."""
        return False

    def takes_weight_decay(self, optimizer_is_sgd: bool) -> bool:
        """Whether weight decay is applied in front of the compression instead of by the optimizer."""
        return self.takes_momentum(optimizer_is_sgd)

    @property
    def averaging_interval(self) -> int | None:
        """Optimizer steps between two averagings of the parameters; None: they need none."""
        return None

    @property
    def replicas_drift(self) -> bool:
        """Whether ranks go different ways, so that they must be made equal when the method is left."""
        return self.averaging_interval is not None

    @property
    def outer_rule(self) -> OuterRule | None:
        """What is done with the mean of the differences, where ranks take optimizer steps alone and exchange how far
        they went; None: gradients are exchanged, at every step."""
        return None

    @property
    def applies_local_gradients(self) -> bool:
        """Whether a rank's update contains its own gradient, which a rank without inputs does not have."""
        return False

    @property
    def estimates_mean(self) -> bool:
        """Whether what it gives stands for the mean gradient, so that the mean itself may take its place. Otherwise
        updates are not on the scale of a gradient and need learning rates of their own."""
        return True

    @property
    def state_dtype(self) -> torch.dtype:
        """The type in which residuals and velocities are kept between two steps."""
        return torch.bfloat16 if getattr(self, "residual", "fp32") == "bf16" else torch.float32

    def is_coded(self, name: str, shape: torch.Size) -> bool:
        """Whether a parameter goes through the compressor; the others travel dense in the same frame.

        Those are what ``exclude`` names and, with a ``dense_below`` above 0, one-dimensional tensors and those of fewer
        elements than it says.
        """
        below: int = getattr(self, "dense_below", 0)
        small = below > 0 and (len(shape) <= 1 or shape.numel() < below)
        return not small and not any(fnmatchcase(name, pattern) for pattern in getattr(self, "exclude", ()))

    def layout(self, rows: Rows, *, model: Rows | None = None, compress: bool = True) -> Layout:
        """One exchange's layout of (name, ordinal, shape) rows under this method, part of the ``model``'s or all of
        them; without ``compress`` all travel dense, and nothing of them is kept back."""
        entries = [(name, place, shape.numel(), compress and self.is_coded(name, shape)) for name, place, shape in rows]
        if model is None:
            return Layout.of(entries)
        return Layout.of(entries, [shape.numel() for name, _, shape in model if self.is_coded(name, shape)])

    @property
    def bucket_independent(self) -> bool:
        """Whether a tensor's result is the same whichever tensors share its exchange; values of fewer than
        16 bits share scales."""
        return getattr(self, "values", "fp32") not in SHARED_SCALES

    @property
    def whole_model(self) -> bool:
        """Whether it exchanges once per step, after the whole backward pass: to clip, because the norm is the whole
        gradient's."""
        return getattr(self, "clip_norm", None) is not None

    def check_names(self, names: list[str]) -> None:
        """Raise when a pattern does not fit a model whose parameters have these names."""
        for pattern in getattr(self, "exclude", ()):
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ValueError(
                    f"{self.name}: exclude pattern {pattern!r} matches no parameter; {some_names(pattern, names)}"
                )

    @classmethod
    def read(cls, text: str) -> Method:
        """The method that the options in a string describe: what follows its name and a colon."""
        return cls(**read_options(cls, text))

    def __str__(self) -> str:
        return self._string([f.name for f in fields(self) if getattr(self, f.name) != f.default])

    @property
    def in_full(self) -> str:
        """The string with every option, which means the same whatever the defaults are by then."""
        return self._string([f.name for f in fields(self)])

    def _string(self, options: list[str]) -> str:
        given = [f"{option}={spell(getattr(self, option))}" for option in options]
        return self.name + (":" + ",".join(given) if given else "")
