"""Whether a method's run of a loop is plain DDP's, or one sentence said why it is not."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from loop_programs import Loop
from loop_runner import Outcome

# Relative to how far the parameters moved. Sums are taken in another order than DDP takes them, which is some 1e-7 of
# a gradient; optimizers divide by roots of it, so it grows to some 1e-5 in seven steps. bfloat16 rounds to 4e-3, and a
# last bit that differs before a rounding is a whole one behind it.
EXACT, ROUNDED = 2e-4, 6e-2
FLOOR, ROUNDED_FLOOR = 2e-6, 1e-2  # of parameters and losses of size 1
DIVERGED = 1e3  # parameters that moved further; rounding is all there is then


@dataclass(frozen=True)
class Verdict:
    kind: str  # "equal", "told", "refused by both" or "differs"
    why: str = ""


def _clips(loop: Loop) -> bool:
    return any(step.norm == "clip" for step in loop.steps)


def _leaves_gradients(loop: Loop) -> bool:
    """Whether a pass may begin with gradients that an optimizer step has used."""
    first = ("first, None", "first, zeros", "by hand", "after forward")
    return loop.has_momentum_or_decay and any(step.zero not in first for step in loop.steps)


def _throws_away(loop: Loop) -> bool:
    """Whether a gradient is cleared between its exchange and an optimizer step."""
    return any(not step.steps or any(one.dropped for one in step.passes) for step in loop.steps)


def _loads(loop: Loop) -> bool:
    names = [event[0] for event in loop.events()]
    return "load" in names and ("switch" in names or "reattach" in names)


# What may be raised instead of training, and where. Anything else that is raised is a difference.
SENTENCES: tuple[tuple[str, Callable[[Loop], bool]], ...] = (
    (r"momentum correction needs dampening=0", lambda loop: "dampening" in dict(loop.options)),
    (r"the state belongs to method .* use the state's method", _loads),
)
# What may be logged or warned of in a loop that is right, and where. Anything else is a false alarm.
REMARKS: tuple[tuple[str, Callable[[Loop], bool]], ...] = (
    (r"times as much as dense training would here: the model is too small", lambda loop: True),
    (r"gradients are changed between backward and optimizer.step\(\)", _clips),
    (r"a gradient was cleared after its exchange and before optimizer.step\(\)", _throws_away),
    (r"gradients of an earlier optimizer step were not cleared", _leaves_gradients),
)
EXPLAINS = (
    "gradients are changed",
    "were not cleared",
    "was cleared after its exchange",
)  # why numbers are not plain DDP's


def is_sentence(text: str) -> bool:
    return bool(text) and "\n" not in text and not text.rstrip(".").count(". ")


def judge(loop: Loop, plain: Sequence[Outcome], wired: Sequence[Outcome]) -> Verdict:
    """``plain`` and ``wired`` are all ranks' outcomes of one loop."""
    if plain[0].error is not None:
        if all(one.error is not None for one in wired):
            return Verdict("refused by both", plain[0].error[1].splitlines()[0][:100])
        return Verdict("refused by plain DDP alone", plain[0].error[1].splitlines()[0][:100])
    errors = {one.error for one in wired}
    if errors != {None}:
        return _judge_errors(loop, plain, wired, errors)
    lossy = wired[0].family is not None and wired[0].family.startswith("lossy")
    told = ""
    for mine, theirs in zip(wired, plain, strict=True):
        for text in mine.said:
            if text in theirs.said:
                continue
            if not any(re.search(pattern, text) and fits(loop) for pattern, fits in REMARKS):
                return Verdict("differs", f"false alarm: {text}")
            told = next((words for words in EXPLAINS if words in text), told)
    if len({one.bits for one in plain}) == 1 and len({one.bits for one in wired}) > 1:
        return Verdict("differs", "the ranks' parameters differ")
    if not all(np.isfinite(one.trajectory[-1]).all() for one in wired) and np.isfinite(plain[0].trajectory[-1]).all():
        return Verdict("differs", "not finite")
    found = _keys_differ(plain, wired)
    if found or lossy:
        return Verdict("differs", found) if found else Verdict("equal")
    found = next((f for p, w in zip(plain, wired, strict=True) if (f := _numbers_differ(loop, p, w))), "")
    if found and told:
        return Verdict("told", told)
    return Verdict("differs", found) if found else Verdict("equal")


def _judge_errors(
    loop: Loop, plain: Sequence[Outcome], wired: Sequence[Outcome], errors: set[tuple[str, str] | None]
) -> Verdict:
    first = next(one for one in wired if one.error is not None)
    assert first.error is not None
    kind, text = first.error
    what = f"{kind} at {first.where}: {text}"
    if kind == "NonFiniteError" and not _stays_small(plain[0]):  # each rank names what it found
        return Verdict("told", "holds an inf or a nan")
    if len(errors) > 1 or len({one.where for one in wired}) > 1:
        return Verdict("differs", f"not the same on all ranks: {what}")
    if not first.from_thinwire or kind != "ValueError" or not is_sentence(text):
        return Verdict("differs", f"not a sentence of thinwire's: {what}")
    for pattern, fits in SENTENCES:
        if re.search(pattern, text) and fits(loop):
            return Verdict("told", pattern)
    return Verdict("differs", f"refused without need: {what}")


def _stays_small(one: Outcome) -> bool:
    return bool(np.abs(np.nan_to_num(np.array(one.trajectory), nan=np.inf)).max() <= DIVERGED)


def _keys_differ(plain: Sequence[Outcome], wired: Sequence[Outcome]) -> str:
    mine, theirs = wired[0].state, plain[0].state
    for name in sorted(mine.keys() | theirs.keys()):
        a, b = (_that_say_something(state.get(name, {})) for state in (mine, theirs))
        if a != b:
            return f"optimizer.state of {name}: {a}, not {b}"
    return ""


def _that_say_something(state: dict[str, Any]) -> list[str]:
    """An optimizer's keys for a parameter; without buffers of zeros, which are as good as none."""
    zeros = {key for key, value in state.items() if key == "momentum_buffer" and value is not None and not value.any()}
    return sorted(state.keys() - zeros)


def tolerance(loop: Loop) -> tuple[float, float]:
    """Relative and absolute."""
    rounds = loop.autocast or "bf16 layer" in loop.model
    return (ROUNDED, ROUNDED_FLOOR) if rounds else (EXACT, FLOOR)


def _numbers_differ(loop: Loop, plain: Outcome, wired: Outcome) -> str:
    limit, floor = tolerance(loop)
    first = plain.trajectory[0]
    moved = max(float(np.abs(now - first).max()) for now in plain.trajectory)
    for number, (mine, theirs) in enumerate(zip(wired.trajectory, plain.trajectory, strict=True)):
        if not np.isfinite(theirs).all() or np.abs(theirs).max() > DIVERGED:
            return ""  # nothing can be said of what follows
        off = float(np.abs(mine - theirs).max())
        if off > limit * moved + floor * max(1.0, float(np.abs(theirs).max())):
            return f"parameters behind step {number - 1} differ by {off:.2g}, having moved by {moved:.2g}"
    if len(wired.losses) != len(plain.losses):
        return "not as many losses"
    mine_, theirs_ = np.array(wired.losses), np.array(plain.losses)
    span = float(np.abs(theirs_).max(initial=0.0))
    if np.abs(mine_ - theirs_).max(initial=0.0) > 3 * limit * span + floor:
        return f"losses differ by {np.abs(mine_ - theirs_).max():.2g} of {span:.2g}"
    if wired.leftover > limit * moved + floor:
        return f"{wired.leftover:.2g} was not sent"
    never_cleared = any(step.zero == "not" for step in loop.steps)  # momentum lies in .grad as well
    return "" if never_cleared else _states_differ(limit, floor, plain, wired)


def _states_differ(limit: float, floor: float, plain: Outcome, wired: Outcome) -> str:
    for name, state in plain.state.items():
        for key, theirs in state.items():
            mine = wired.state.get(name, {}).get(key, theirs)  # where it is not there it is of zeros
            if (mine is None) != (theirs is None):
                return f"optimizer.state[{name}][{key}] is {mine}, not {theirs}"
            if mine is None:
                continue
            sizes = (np.abs(one[key]).max(initial=0.0) for one in plain.state.values() if one.get(key) is not None)
            off = np.abs(np.asarray(mine) - np.asarray(theirs)).max(initial=0.0)
            if off > 5 * limit * max(sizes, default=0.0) + floor:
                return f"optimizer.state[{name}][{key}] differs by {off:.2g}"
    return ""


def error_of(plain: Outcome, wired: Outcome) -> float:
    """How far apart two runs are, relative to how far the parameters moved."""
    moved = max(float(np.abs(now - plain.trajectory[0]).max()) for now in plain.trajectory)
    rows = zip(wired.trajectory, plain.trajectory, strict=False)
    return max(float(np.abs(a - b).max()) for a, b in rows) / max(moved, 1e-9)
