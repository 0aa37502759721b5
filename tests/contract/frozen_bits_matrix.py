"""Which trainings test_frozen_bits.py freezes: methods, optimizers, ranks, buckets, and what happens besides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

STEPS = 5


@dataclass(frozen=True)
class Scene:
    """What happens in a training besides its steps.

    ``events``: step -> what comes before it: ("switch", method) or ("reload",). ``rates``: learning rates by step, as
    multiples. ``bad``: the (rank, step) whose gradient holds an inf. ``grows``: from this step on gradients are ten
    times those of the step before. ``unused``: (rank, step) -> parameters that take no part in it; rank None: on no
    rank. ``loads``: the ranks that saved the state from which the training goes on; see SAVED.
    """

    steps: int = STEPS
    model: str = "small"
    events: Mapping[int, tuple[Any, ...]] = field(default_factory=dict)
    rates: tuple[float, ...] = ()
    bad: tuple[int, int] | None = None
    grows: int | None = None
    unused: Mapping[tuple[int | None, int], tuple[str, ...]] = field(default_factory=dict)
    hierarchy: Any = None
    attach: Mapping[str, Any] = field(default_factory=dict)
    ddp: Mapping[str, Any] = field(default_factory=dict)
    merge: str = "none"  # measured times would decide how many frames there are
    accumulates: bool = False
    scales: bool = False
    uneven: bool = False
    loads: str = ""


_CHAIN = {2: ("switch", "blocksign:dense_below=0"), 4: ("switch", "dense"), 6: ("switch", "gtopk:density=0.05")}
_BACK = {2: ("switch", "terngrad:dense_below=0"), 4: ("switch", "dgc:density=0.05"), 6: ("switch", "signsgd")}
_LOCAL = {3: ("switch", "dropping:density=0.05,local=partial,sync_every=2"), 6: ("switch", "dense:dtype=bf16")}

_IN_TURN = {(None, step): ("d" if step % 2 else "e",) for step in range(STEPS)}  # DDP warns where all are used

SCENES: dict[str, Scene] = {
    "": Scene(),
    "rates": Scene(steps=7, rates=(1.0, 0.5, 0.0, 0.0, 0.5, 2.0, 0.0)),
    "reload": Scene(steps=6, events={3: ("reload",)}),
    "switches": Scene(steps=8, events=_CHAIN),
    "switches back": Scene(steps=8, events=_BACK),
    "switches to local": Scene(steps=8, events=_LOCAL),
    "skip": Scene(bad=(1, 2), attach={"on_nonfinite": "skip"}),
    "scaler": Scene(steps=6, bad=(0, 3), scales=True),
    "warn": Scene(attach={"guard": "warn", "guard_every": 2}),
    "densify": Scene(steps=14, grows=8, attach={"guard": "densify", "guard_every": 1}),
    "unused": Scene(
        unused={**_IN_TURN, (None, 1): ("middle", "bias"), (None, 3): ("last",)}, ddp={"find_unused_parameters": True}
    ),
    "unused by one": Scene(
        unused={**_IN_TURN, (1, 1): ("middle", "bias"), (1, 3): ("last",)}, ddp={"find_unused_parameters": True}
    ),
    "accumulates": Scene(accumulates=True),
    "views": Scene(ddp={"gradient_as_bucket_view": True}),
    "uneven": Scene(uneven=True),
    "mixed": Scene(model="mixed"),
    "large": Scene(model="large"),
    "merged": Scene(merge="all"),
    "merging": Scene(steps=8, merge="auto"),
    "2+1": Scene(hierarchy=((0, 1), (2,))),
    "2+2": Scene(hierarchy=((0, 1), (2, 3))),
    "3+2": Scene(hierarchy=((0, 1, 2), (3, 4))),
    "one machine": Scene(hierarchy=((0, 1, 2),)),
    "reload 2+1": Scene(steps=6, events={3: ("reload",)}, hierarchy=((0, 1), (2,))),
    "of 3": Scene(steps=2, loads="3"),
    "of 2+1": Scene(steps=2, loads="2+1"),
    "of 3 to 2+1": Scene(steps=2, loads="3", hierarchy=((0, 1), (2,))),
}
SAVED: dict[str, tuple[int, Any]] = {"3": (3, None), "2+1": (3, ((0, 1), (2,)))}  # ranks and hierarchy that save


@dataclass(frozen=True)
class Cell:
    """One training. ``way``: "one" bucket or "many", of DDP in processes; "threads" have none."""

    method: str
    optimizer: str
    size: int
    way: str
    scene: str = ""

    @property
    def key(self) -> str:
        way = self.way if self.way == "threads" else f"{self.way} | processes"
        return " | ".join([self.method, self.optimizer, f"N={self.size}", way, *filter(None, [self.scene])])


_ALIKE = ("gtopk", "terngrad", "blocksign", "dropping", "signsgd", "dense", "noop")
# With every tensor coded, small ones too, and more than one chunk of 256 values to send.
_CODED = (
    "gtopk:density=0.05,dense_below=1", "terngrad:dense_below=0", "blocksign:dense_below=0",
    "dropping:density=0.05,dense_below=1",
)  # fmt: skip
MAIN = {
    "sgd": ("dgc", "dgc:density=0.05,dense_below=0", *_ALIKE, *_CODED),
    "adamw": (
        "dgc:momentum_correction=false", "dgc:density=0.05,dense_below=0,momentum_correction=false", *_ALIKE, *_CODED,
    ),
}  # fmt: skip

# Other ways through the engine.
VARIANTS = {
    "sgd": (
        "dgc:density=0.05,dense_below=0,values=fp32",
        "dgc:density=0.05,dense_below=0,values=fp16",
        "dgc:density=0.05,dense_below=0,values=bf16",
        "dgc:density=0.05,dense_below=0,values=int4",
        "dgc:density=0.05,indices=delta16,values=fp32",
        "dgc:density=0.05,indices=int32,values=int8",
        "dgc:density=0.05,selection=sampled,values=fp32",
        "dgc:density=0.05,scope=tensor,values=fp32",
        "dgc:density=0.05,scope=model,dense_below=0",
        "dgc:density=0.05,factor_masking=true,values=fp32",
        "dgc:density=0.05,factor_masking=true,direct_decay=false",
        "dgc:density=0.05,lr_rescaling=true,values=fp32",
        "dgc:density=0.05,direct_decay=false",
        "dgc:density=0.05,momentum_correction=false",
        "dgc:density=0.05,clip_norm=1.0",
        "dgc:density=0.05,clip_norm=1.0,momentum_correction=false",
        "dgc:density=0.01,warmup=3",
        "dgc:density=0.05,residual=bf16,values=fp32",
        "dgc:density=0.05,residual=bf16,lr_rescaling=true,clip_norm=2.0",
        "dgc:density=0.05,exclude=mid*+last",
        "dgc:density=0.001,scope=tensor,values=fp32,factor_masking=true",
        "dgc:density=1.0,values=fp32,dense_below=0",
        "gtopk:density=0.05,values=int8",
        "gtopk:density=0.05,values=fp16,indices=delta16",
        "gtopk:density=0.05,momentum_correction=false",
        "gtopk:density=0.05,direct_decay=true",
        "gtopk:density=0.05,factor_masking=true",
        "gtopk:density=0.05,lr_rescaling=true,residual=bf16",
        "gtopk:density=0.01,warmup=3,clip_norm=1.0,exclude=last",
        "dropping:density=0.05,local=sum,sync_every=2",
        "dropping:density=0.05,local=partial,sync_every=2",
        "dropping:density=0.05,local=error,sync_every=2",
        "dropping:density=0.05,local=partial,sync_every=none,scope=tensor,values=fp32",
        "dropping:density=0.05,local=partial,sync_every=2,clip_norm=1.0,dense_below=1",
        "dropping:density=0.05,momentum_correction=true",
        "dropping:density=0.05,scope=balanced,residual=bf16,exclude=last",
        "dropping:density=0.05,warmup=3,values=fp32",
        "terngrad:scaler=model,dense_below=0",
        "terngrad:share_scaler=false,dense_below=0",
        "terngrad:topology=server,dense_below=0",
        "terngrad:share_scaler=false,topology=server",
        "terngrad:clip_sigma=none,seed=7,exclude=last",
        "blocksign:block=64,dense_below=0",
        "blocksign:two_way=false,dense_below=0",
        "blocksign:topology=server,dense_below=0",
        "blocksign:topology=server,two_way=false,block=100",
        "blocksign:clip_norm=1.0",
        "blocksign:residual=bf16,dense_below=0",
        "blocksign:exclude=last",
        "signsgd:topology=server",
        "dense:dtype=bf16",
        "dense:dtype=fp16",
    ),
    "adamw": (
        "dgc:density=0.05,values=int4,momentum_correction=false",
        "dgc:density=0.05,scope=model,values=fp32,momentum_correction=false",
        "dgc:density=0.05,residual=bf16,clip_norm=1.0,momentum_correction=false",
        "gtopk:density=0.05,values=int8",
        "gtopk:density=0.05,residual=bf16,clip_norm=1.0",
        "dropping:density=0.05,local=sum,sync_every=2",
        "dropping:density=0.05,local=partial,sync_every=2",
        "dropping:density=0.05,local=error,sync_every=2",
        "dropping:density=0.05,local=partial,sync_every=2,residual=bf16,scope=tensor",
        "terngrad:scaler=model,dense_below=0",
        "terngrad:share_scaler=false,topology=server,dense_below=0",
        "blocksign:block=64,dense_below=0",
        "blocksign:two_way=false,topology=server,dense_below=0",
        "blocksign:residual=bf16,clip_norm=1.0,dense_below=0",
        "signsgd:topology=server",
        "dense:dtype=bf16",
        "dense:dtype=fp16",
    ),
}  # fmt: skip

# One method of each kind, for what happens to all of them alike.
KINDS = (
    "dgc:density=0.05", "dgc:density=0.05,values=fp32,factor_masking=true", "gtopk:density=0.05",
    "terngrad:dense_below=0", "blocksign:dense_below=0", "dropping:density=0.05",
    "dropping:density=0.05,local=partial,sync_every=2", "signsgd", "dense:dtype=bf16", "dense",
)  # fmt: skip
KINDS_OF_ADAMW = ("dgc:density=0.05,momentum_correction=false", *KINDS[2:])
RATED = ("dgc:density=0.05,lr_rescaling=true", "gtopk:density=0.05,lr_rescaling=true", "blocksign:residual=bf16")
RESUMED = (*KINDS, *RATED, "dgc:density=0.01,warmup=4,values=int4", "gtopk:density=0.05,values=int8,residual=bf16")
WITHOUT_LOCAL = tuple(method for method in KINDS if "local" not in method)  # a join refuses it
MOVED = tuple(  # to groups of another size
    [method for method in KINDS if not method.startswith("dense")]
    + ["dgc:density=0.05,residual=bf16,lr_rescaling=true", "gtopk:density=0.05,values=int8,factor_masking=true"]
    + ["blocksign:topology=server,block=64,dense_below=0", "dropping:density=0.05,momentum_correction=true"]
)


def cells() -> Iterator[Cell]:
    for optimizer in ("sgd", "adamw"):
        for method in MAIN[optimizer]:
            for size in range(1, 6):
                for way in ("one", "many", "threads"):
                    yield Cell(method, optimizer, size, way)
    for method in VARIANTS["sgd"]:
        for size, way in ((2, "one"), (3, "many"), (3, "threads"), (5, "threads")):
            yield Cell(method, "sgd", size, way)
        if not method.startswith(("dgc", "dropping")):  # more than an all-gather
            yield Cell(method, "sgd", 4, "many")
    for method in VARIANTS["adamw"]:
        for size, way in ((3, "many"), (4, "one"), (3, "threads")):
            yield Cell(method, "adamw", size, way)
    for method in KINDS:
        for optimizer in ("momentum", "groups"):
            yield Cell(method, optimizer, 3, "many")
            yield Cell(method, optimizer, 3, "threads")
    yield from _with_scenes()


def _with_scenes() -> Iterator[Cell]:
    for method in (*KINDS, *RATED):
        yield Cell(method, "sgd", 3, "threads", "rates")
    for method in RATED:
        yield Cell(method, "sgd", 3, "many", "rates")
    for method in RESUMED:
        yield Cell(method, "sgd", 3, "many", "reload")
    for method in KINDS:
        for scene in ("skip", "scaler", "unused", "mixed", "merging", "2+1", "reload 2+1", "one machine"):
            yield Cell(method, "sgd", 3, "many", scene)
        for scene in ("accumulates", "views", "merged"):
            yield Cell(method, "sgd", 2, "many", scene)
        yield Cell(method, "sgd", 4, "many", "2+2")
        yield Cell(method, "sgd", 5, "many", "3+2")
        for way in ("one", "many", "threads"):
            yield Cell(method, "sgd", 2, way, "large")
    for method in KINDS_OF_ADAMW:
        yield Cell(method, "adamw", 3, "threads", "rates")
        for scene in ("reload", "skip", "2+1"):
            yield Cell(method, "adamw", 3, "many", scene)
    for method in ("dgc:density=0.05", "gtopk:density=0.05", "terngrad:dense_below=0", "blocksign:dense_below=0"):
        yield Cell(method, "sgd", 3, "many", "unused by one")
        yield Cell(method, "sgd", 3, "one", "2+1")
        yield Cell(method, "sgd", 3, "one", "large")
    for method in WITHOUT_LOCAL:
        yield Cell(method, "sgd", 3, "many", "uneven")
    for method in ("dgc:density=0.05", "gtopk:density=0.05", "dropping:density=0.05"):
        yield Cell(method, "sgd", 2, "many", "densify")
        yield Cell(method, "sgd", 3, "many", "warn")
    for size, way in ((2, "one"), (3, "many"), (4, "many"), (5, "many")):
        yield Cell("dgc:density=0.05", "sgd", size, way, "switches")
        yield Cell("gtopk:density=0.05", "sgd", size, way, "switches back")
        yield Cell("dgc:density=0.05,momentum_correction=false", "adamw", size, way, "switches")
        yield Cell("blocksign:dense_below=0", "sgd", size, way, "switches to local")
    for method in MOVED:
        for size, scene in ((1, "of 3"), (2, "of 3"), (5, "of 3"), (2, "of 2+1"), (3, "of 3 to 2+1")):
            yield Cell(method, "sgd", size, "many", scene)
