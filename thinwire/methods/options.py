"""The checks of a method's options: each raises ValueError with one sentence that names the method and the option."""

from __future__ import annotations

from typing import Any, get_args

from thinwire.engine.schedules import Schedule
from thinwire.methods.choices import Indices, Residual, Values
from thinwire.methods.epochs import epochs_in, steps_in

Warmup = Schedule | int | str | None  # a text is a number of epochs


def schedule_of(warmup: Warmup, paper: type) -> Schedule | None:
    """A number of steps is the length of the paper's own warm-up."""
    if isinstance(warmup, str):
        warmup = steps_in("warmup", warmup, None)
    return paper(warmup) if isinstance(warmup, int) else warmup


def require(ok: bool, sentence: str) -> None:
    if not ok:
        raise ValueError(sentence)


def one_of(method: Any, option: str, known: tuple[Any, ...]) -> None:
    value = getattr(method, option)
    require(value in known, f"{method.name}: {option} must be one of {', '.join(map(repr, known))}, not {value!r}")


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_bool(method: Any, *options: str) -> None:
    for option in options:
        value = getattr(method, option)
        require(isinstance(value, bool), f"{method.name}: {option} must be True or False, not {value!r}")


def check_density(method: Any) -> None:
    value = method.density
    require(
        is_number(value) and 0 < value <= 1,
        f"{method.name}: density is the share of elements that is sent and must lie in (0, 1], not {value!r}",
    )
    warmup = method.warmup
    require(
        warmup is None or is_count(warmup, 1) or epochs_in(warmup) is not None or hasattr(warmup, "density"),
        f'{method.name}: warmup must be None, a number of optimizer steps of at least 1, epochs such as "4 epochs", or '
        f"a schedule, not {warmup!r}",
    )


def check_clip_norm(method: Any) -> None:
    clip = method.clip_norm
    ok = clip is None or (is_number(clip) and clip > 0)
    require(ok, f"{method.name}: clip_norm must be None or above 0, not {clip!r}")


def check_exclude(method: Any) -> None:
    patterns = method.exclude
    if isinstance(patterns, str):
        object.__setattr__(method, "exclude", (patterns,))
    else:
        ok = isinstance(patterns, (list, tuple)) and all(isinstance(pattern, str) for pattern in patterns)
        require(ok, f"{method.name}: exclude must be a list of parameter name patterns, not {patterns!r}")
        object.__setattr__(method, "exclude", tuple(patterns))


def check_dense_below(method: Any) -> None:
    value = method.dense_below
    require(is_count(value, 0), f"{method.name}: dense_below must be a number of elements, not {value!r}")


def check_corrected(method: Any) -> None:
    """What acts on velocities needs them."""
    check_bool(method, "factor_masking", "lr_rescaling", "direct_decay")
    corrected = method.momentum_correction is not False
    require(
        corrected or not method.factor_masking,
        f"{method.name}: factor_masking clears velocities, which only momentum_correction keeps; leave one of them out",
    )
    require(
        corrected or not method.lr_rescaling,
        f"{method.name}: lr_rescaling needs momentum_correction, because an optimizer's own momentum would mix what "
        "comes in units of different learning rates; leave one of them out",
    )


def check_sparse(method: Any) -> None:
    """The options that all methods of sparse frames have."""
    check_density(method)
    one_of(method, "values", get_args(Values))
    one_of(method, "indices", get_args(Indices))
    one_of(method, "residual", get_args(Residual))
    check_clip_norm(method)
    check_dense_below(method)
    check_exclude(method)
