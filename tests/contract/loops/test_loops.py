"""Random training loops: what plain DDP does with them, every method does that leaves nothing out, or says why not.

Lossy methods are held to what is true of them: equal ranks, finite numbers, no errors, an optimizer's usual state.
"""

from __future__ import annotations

import pytest
from cluster import Cluster
from loop_programs import LOSSY, Loop, Pass, Step, draw_loop, families_of, text_of
from loops import jobs_of, run_jobs

LOOPS, PARTS = 200, 4  # with plain DDP and three methods each, which take turns
MOMENTUM = (("lr", 0.1), ("momentum", 0.9))
LOOKING = (("find_unused_parameters", True),)

# Loops that once were not plain DDP's, made small by loop_shrinking.py.
EQUAL = {
    "unused parameters are looked for, and nothing is thrown away": Loop(ddp=LOOKING, steps=(Step(),) * 5),
    "a branch that is not used goes on by its momentum where its gradient is zero": Loop(
        model=("branch",), unused="some steps", ddp=LOOKING, options=MOMENTUM,
        steps=(Step(zero="first, zeros"),) * 5,
    ),
    "the same with weight decay, views and several passes": Loop(
        model=("branch",), unused="some steps", ddp=(*LOOKING, ("gradient_as_bucket_view", True)),
        options=(*MOMENTUM, ("nesterov", True), ("weight_decay", 0.02)),
        steps=(Step(zero="first, zeros", passes=(Pass(), Pass(sync=False), Pass())),) * 6,
    ),
    "a branch that some ranks use is of zeros elsewhere": Loop(
        model=("branch",), unused="some ranks", ddp=LOOKING, options=MOMENTUM, ranks=3,
        steps=(Step(zero="first, zeros"),) * 4,
    ),
    "two passes go on with gradients that were not cleared": Loop(
        steps=(Step(), Step(zero="not", passes=(Pass(), Pass())), Step())
    ),
    "closures clear by zeros behind the step": Loop(
        options=MOMENTUM, steps=(Step(closure=True, zero="last, zeros"),) * 4
    ),
    "SGD without momentum keeps no buffers": Loop(steps=(Step(), Step(before=(("switch", 2),)), Step())),
    "a parameter without gradients has no buffer": Loop(
        model=("branch",), unused="never", ddp=LOOKING, options=MOMENTUM, steps=(Step(),) * 3
    ),
    "a scaler passes over a late step": Loop(
        options=MOMENTUM, scaler=(("init_scale", 8.0),),
        steps=(*(Step(),) * 3, Step(overflow=True), Step(), Step(passes=(Pass(), Pass()), overflow=True), Step()),
    ),
    "several passes come late": Loop(
        options=(("lr", 0.1), ("weight_decay", 0.02)), steps=(*(Step(),) * 4, Step(passes=(Pass(), Pass())), Step())
    ),
}  # fmt: skip
TOLD = {
    # by the method before, whose momentum lies there
    "were not cleared ": Loop(
        options=MOMENTUM, steps=(Step(), Step(), Step(before=(("switch", 1),), zero="not"), Step())
    ),
    "were not cleared": Loop(options=MOMENTUM, steps=(Step(), Step(zero="not"), Step())),
    "gradients are changed": Loop(options=MOMENTUM, steps=(Step(norm="clip"),) * 5),
    # behind steps with a method that does not mind
    "gradients are changed ": Loop(
        seed=215,
        options=MOMENTUM,
        steps=(
            *(Step(norm="clip", before=(("switch", 1),)),),
            *(Step(norm="clip"),) * 3,
            Step(norm="clip", before=(("switch", 0),)),
            Step(norm="clip"),
        ),
    ),
    "was cleared after its exchange": Loop(
        options=MOMENTUM, steps=(*(Step(),) * 4, Step(passes=(Pass(dropped=True), Pass())), Step())
    ),
    "momentum correction needs dampening=0": Loop(options=(*MOMENTUM, ("dampening", 0.1))),
    "the state belongs to method .* use the state's method": Loop(
        steps=(Step(before=(("save", 1),)), Step(before=(("switch", 2), ("load", 1, ("optimizer", "wire")))))
    ),
}


@pytest.mark.parametrize("part", range(PARTS))
def test_random_loops_are_plain_ddps_or_say_why_not(cluster: Cluster, part: int) -> None:
    loops = [draw_loop(seed) for seed in range(part * LOOPS // PARTS, (part + 1) * LOOPS // PARTS)]
    some = lambda one, other, third, lossy: [one, other, lossy if third in ("gtopk", "perlayer") else third]  # noqa: E731
    rows = run_jobs(cluster, [(loop, some(*families)) for loop, families in jobs_of(loops, every=False)])
    found = [f"{row.verdict.why}, with {row.family}\n{text_of(row.loop, row.family)}" for row in rows if row.differs]
    assert not found, f"{len(found)} differ; make one small with python tests/contract/loops/loops.py\n{found[0]}"
    assert sum(row.verdict.kind == "equal" for row in rows) > 0.8 * len(rows), "most of them are compared"


def test_loops_that_once_differed_are_plain_ddps(cluster: Cluster) -> None:
    rows = run_jobs(cluster, jobs_of(list(EQUAL.values()), every=True))
    names = {id(loop): name for name, loop in EQUAL.items()}
    assert len(rows) == len(EQUAL) * (5 + len(LOSSY))
    for row in rows:
        assert row.verdict.kind == "equal", f"{names[id(row.loop)]}, with {row.family}: {row.verdict.why}"


def test_loops_that_cannot_be_plain_ddps_are_told(cluster: Cluster) -> None:
    rows = run_jobs(cluster, [(loop, ["dgc"]) for loop in TOLD.values()])
    for said, row in zip(TOLD, rows, strict=True):
        assert (row.verdict.kind, row.verdict.why) == ("told", said.strip()), row.verdict


def test_a_seed_draws_the_same_loop_and_methods_everywhere() -> None:
    for seed in range(50):
        assert draw_loop(seed) == draw_loop(seed)
        assert text_of(draw_loop(seed), "perlayer") == text_of(draw_loop(seed), "perlayer")
        assert len(families_of(draw_loop(seed))) == 4
