"""Takes parts away from a loop as long as it still fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace

from loop_programs import Loop, Pass, Step

MOST = 150  # loops to try
LOOKS = ("find_unused_parameters", "static_graph")  # without them plain DDP waits for unused parameters


def shrunk(loop: Loop, fails: Callable[[Loop], bool]) -> Loop:
    """The smallest loop found that still fails."""
    tried, again = 0, True
    while again:
        again = False
        for candidate in _smaller(loop):
            tried += 1
            if tried > MOST:
                return loop
            if fails(candidate):
                loop, again = candidate, True
                break
    return loop


def _smaller(loop: Loop) -> Iterator[Loop]:
    """Loops with one thing less, those that lose most first."""
    for number in reversed(range(len(loop.steps))):
        if len(loop.steps) > loop.attach_at + 1 and number >= loop.attach_at:
            yield replace(loop, steps=loop.steps[:number] + loop.steps[number + 1 :])
    plain = Loop(seed=loop.seed)
    for one in fields(Loop):
        if one.name == "attach_at" and ("save", 0) in loop.events():  # a state of the time before attach
            continue
        kept = one.name in ("seed", "steps", "model", "ddp", "options", "optimizer")
        if not kept and getattr(loop, one.name) != getattr(plain, one.name):
            yield replace(loop, **{one.name: getattr(plain, one.name)})
    if loop.optimizer != "SGD":
        yield replace(loop, optimizer="SGD", options=(("lr", 0.1),))
    for name in ("model", "ddp", "options"):
        own = getattr(loop, name)
        for place in range(len(own)):
            if own[place][0] != "lr" and not (loop.unused and own[place][0] in LOOKS):
                yield replace(loop, **{name: own[:place] + own[place + 1 :]})
    for number, step in enumerate(loop.steps):
        for lesser in _smaller_steps(step):
            yield replace(loop, steps=(*loop.steps[:number], lesser, *loop.steps[number + 1 :]))


def _smaller_steps(step: Step) -> Iterator[Step]:
    for place in range(len(step.before)):
        yield replace(step, before=step.before[:place] + step.before[place + 1 :])
    for place in range(len(step.passes)):
        if len(step.passes) > 1:
            yield replace(step, passes=step.passes[:place] + step.passes[place + 1 :])
        if step.passes[place] != Pass():
            yield replace(step, passes=(*step.passes[:place], Pass(), *step.passes[place + 1 :]))
    plain = Step()
    for name in ("zero", "closure", "norm", "between", "overflow", "steps"):
        if getattr(step, name) != getattr(plain, name):
            yield replace(step, **{name: getattr(plain, name)})
