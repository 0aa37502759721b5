"""Random training loops: what a seed draws, as data, and as text that reads like the loop it is.

A ``Loop`` is a model, an optimizer, a form of DDP and a list of steps. Each of its parts has a plain default, so that a
loop that fails can be made smaller by taking parts away (``loop_shrinking``).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

Event = tuple[Any, ...]  # a name and its arguments

EXACT = "density=1.0,values=fp32"  # leaves nothing out, so the training is plain DDP's
LOSSY = ("terngrad:dense_below=0", "blocksign:dense_below=1", "signsgd", "blocksign:dense_below=1,topology=server")
SGDS: tuple[dict[str, Any], ...] = (
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "weight_decay": 0.02},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.02},
    {"momentum": 0.5, "nesterov": True},
    {"weight_decay": 0.05},
    {"momentum": 0.9, "maximize": True, "weight_decay": 0.02, "lr": 0.02},
    {"momentum": 0.9, "maximize": True, "nesterov": True, "lr": 0.02},
    {"momentum": 0.9, "dampening": 0.1},
)
# A larger eps than the default: where a gradient is all rounding these optimizers would make whole steps of it.
OTHERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("Adam", {"lr": 0.02, "eps": 1e-2}),
    ("Adam", {"lr": 0.02, "eps": 1e-2, "amsgrad": True, "weight_decay": 0.01}),
    ("AdamW", {"lr": 0.02, "eps": 1e-2, "weight_decay": 0.1}),
    ("AdamW", {"lr": 0.02, "eps": 1e-2, "maximize": True}),
    ("RMSprop", {"lr": 0.01, "eps": 1e-2, "momentum": 0.9, "centered": True}),
    ("RMSprop", {"lr": 0.01, "eps": 1e-2, "weight_decay": 0.01}),
    ("Adagrad", {"lr": 0.02, "eps": 1e-2}),
    ("NAdam", {"lr": 0.02, "eps": 1e-2}),
    ("RAdam", {"lr": 0.02, "eps": 1e-2}),
    ("Adamax", {"lr": 0.02, "eps": 1e-2}),
    ("Adadelta", {"lr": 0.5, "eps": 1e-2}),
    ("ASGD", {"lr": 0.05}),
    ("Adafactor", {"lr": 0.02, "eps": (1e-2, 1e-3)}),
    ("LBFGS", {"lr": 0.1, "max_iter": 2, "history_size": 3}),
)
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")  # have fused=True on a CPU
NOT_FOREACH = ("LBFGS", "Adafactor")


@dataclass(frozen=True)
class Pass:
    """One backward pass of a step."""

    loss: str = "main"  # "main", "other", "both" (two forward passes) or "own" (without the model's forward)
    sync: bool = True  # False: under no_sync()
    dropped: bool = False  # its gradient is cleared before the next pass


@dataclass(frozen=True)
class Step:
    """One turn of the loop."""

    before: tuple[Event, ...] = ()
    passes: tuple[Pass, ...] = (Pass(),)
    zero: str = "first, None"  # when gradients are cleared, and by what
    closure: bool = False
    norm: str = ""  # "log": clip_grad_norm_(parameters, inf); "clip": at a norm that it may pass
    between: tuple[Event, ...] = ()  # between the backward passes and the optimizer's step
    overflow: bool = False  # rank 0's loss is infinite; with a scaler alone
    steps: bool = True  # False: optimizer.step() is left out


@dataclass(frozen=True)
class Loop:
    """A whole training."""

    seed: int = 0
    ranks: int = 2
    model: tuple[str, ...] = ()
    ddp: tuple[tuple[str, Any], ...] = ()
    optimizer: str = "SGD"
    options: tuple[tuple[str, Any], ...] = (("lr", 0.1),)
    groups: int = 1
    schedule: str = ""
    autocast: bool = False
    scaler: tuple[tuple[str, Any], ...] = ()
    default_dtype: str = ""  # float64 "before" or "after" attach
    unused: str = ""  # what uses the branch: "some ranks", "some steps" or "never"
    attach_at: int = 0  # steps of plain DDP before attach
    steps: tuple[Step, ...] = (Step(),)

    @property
    def is_sgd(self) -> bool:
        return self.optimizer == "SGD"

    @property
    def has_momentum(self) -> bool:
        return self.is_sgd and (bool(dict(self.options).get("momentum")) or self.schedule == "one cycle")

    @property
    def has_momentum_or_decay(self) -> bool:
        return self.has_momentum or (self.is_sgd and bool(dict(self.options).get("weight_decay")))

    def events(self) -> list[Event]:
        return [event for step in self.steps for event in (*step.before, *step.between)]


def exact_methods(loop: Loop) -> dict[str, list[str]]:
    """By family, strings of methods that leave nothing out with this loop's optimizer; the first is the one it uses."""
    draw = random.Random(f"methods of {loop.seed}")
    corrected = loop.is_sgd and draw.random() < 0.8
    decay, own = draw.choice(["", ",direct_decay=false"]), "" if corrected else ",momentum_correction=false"
    clip = draw.choice(["", "", ",clip_norm=1e6"])
    scope = draw.choice(["", ",scope=tensor", ",scope=model", ",scope=chunk"])
    small = draw.choice([0, 0, 8, 50])
    rescaling = ",lr_rescaling=true" if corrected and draw.random() < 0.2 else ""
    dgc = f"dgc:{EXACT},dense_below={small}{scope}{own}{clip}{decay if corrected else ''}{rescaling}"
    gtopk = f"gtopk:{EXACT}{own}{clip}" + draw.choice(["", ",direct_decay=true"] if corrected else [""])
    dropping = f"dropping:{EXACT}{scope}{',momentum_correction=true' if corrected and draw.random() < 0.5 else ''}"
    layered = draw.choice(
        [
            f"perlayer:head*=dense,*=({dgc})",
            f"perlayer:*.bias=({gtopk}),*=({dgc})",
            f"perlayer:head*=({dropping}),*.weight=({dgc}),*=dense",
            f"perlayer:*.weight=({gtopk}),*=dense",
        ]
    )
    return {"dense": ["dense"], "dgc": [dgc], "gtopk": [gtopk], "dropping": [dropping], "perlayer": [layered]}


def method_at(loop: Loop, family: str, place: int) -> str:
    """The method of a place: the family's own at 0, and behind it those that the loop switches to."""
    exact = exact_methods(loop)
    own = exact[family] if family in exact else [LOSSY[int(family.removeprefix("lossy "))]]
    all_of = [*own, *(one for name in ("dgc", "dense", "gtopk", "dropping") if name != family for one in exact[name])]
    return all_of[place % len(all_of)]


def families_of(loop: Loop, every: bool = False) -> list[str]:
    """Dense, two of the four other families that are exact, and a lossy method, in turns; or all of them."""
    others = ["dgc", "gtopk", "dropping", "perlayer"]
    lossy = [f"lossy {place}" for place in range(len(LOSSY))]
    if every:
        return ["dense", *others, *lossy]
    at = loop.seed
    pair = [(0, 1), (0, 3), (1, 2), (0, 2), (1, 3), (2, 3)][at % 6]
    return ["dense", *(others[place] for place in pair), lossy[at % len(lossy)]]


# ------------------------------------------------------------------------------------------------------- drawing


def draw_loop(seed: int) -> Loop:
    draw = random.Random(seed)
    chance = lambda p: draw.random() < p  # noqa: E731
    model = [
        name
        for name, p in (
            ("batch norm", 0.2), ("conv", 0.2), ("bf16 layer", 0.15), ("tied", 0.15), ("frozen", 0.2),
            ("scalar", 0.2), ("branch", 0.3),
        ) if chance(p)
    ]  # fmt: skip
    if "conv" in model and chance(0.6):
        model.append("channels last")
    ddp: dict[str, Any] = {}
    unused = ""
    if "branch" in model:
        unused = draw.choice(["some ranks", "some steps", "never", ""])
    if unused or chance(0.1):
        ddp["find_unused_parameters"] = True
    elif chance(0.15):
        ddp["static_graph"] = True
    if unused == "never" and chance(0.4):
        ddp.pop("find_unused_parameters")
        ddp["static_graph"] = True
    if chance(0.3):
        ddp["gradient_as_bucket_view"] = True
    if chance(0.4):
        ddp["bucket_cap_mb"] = draw.choice([1e-5, 5e-4])
    if chance(0.1):
        ddp["broadcast_buffers"] = False

    name, options = "SGD", dict(draw.choice(SGDS[:8] if chance(0.95) else SGDS[8:]))
    if chance(0.4):
        name, given = draw.choice(OTHERS)
        options = dict(given)
    options.setdefault("lr", 0.1)
    if name in FUSED and chance(0.2):
        options["fused"] = True
    elif name not in NOT_FOREACH and chance(0.25):
        options["foreach"] = draw.choice([True, False])
    closes = name == "LBFGS" or chance(0.1)
    scaler: dict[str, Any] = {}
    if not closes and chance(0.2):
        scaler = {"init_scale": draw.choice([8.0, 1024.0]), "growth_interval": draw.choice([2, 100])}
    if name == "SGD" and ("bf16 layer" in model or scaler):
        # In torch 2.13 fused SGD leaves anything in its buffers where a scaler passes over its first step, and on a CPU
        # where parameters are bfloat16, which it does not change.
        options.pop("fused", None)
    loop = Loop(
        seed=seed,
        ranks=3 if chance(0.15) else 2,
        model=tuple(model),
        ddp=tuple(sorted(ddp.items())),
        optimizer=name,
        options=tuple(sorted(options.items())),
        groups=2 if name != "LBFGS" and chance(0.3) else 1,
        schedule=draw.choice(["from 0", "steps", "cosine", "one cycle"])
        if chance(0.35) and name not in ("LBFGS", "Adafactor")
        else "",
        autocast=chance(0.15),
        scaler=tuple(sorted(scaler.items())),
        default_dtype=draw.choice(["before", "after"]) if chance(0.15) else "",
        unused=unused,
        attach_at=draw.choice([1, 2, 3]) if chance(0.2) else 0,
    )
    count = draw.randint(4, 6)
    kind = draw.choice(["plain", "plain", "accumulates", "accumulates", "several losses", "mixed"])
    zeros = draw.choice(ZEROS) if chance(0.95) else "not"
    clips = chance(0.05)  # in every step, as loops do
    steps, saved = [], set[int]()
    for number in range(count):
        events = tuple(_events(draw, loop, number, saved))
        if zeros == "not":  # momentum is then spread over .grad and what a method keeps, and cannot be handed over
            events = tuple(event for event in events if event[0] in ("evaluate", "copy", "stats", "state"))
        zero = draw.choice(ZEROS) if zeros != "not" and chance(0.1) else zeros
        steps.append(_step(draw, loop, kind, closes, clips, events, zero))
    return replace(loop, steps=tuple(_step_where_handed_over(steps)))


def _step_where_handed_over(steps: list[Step]) -> Iterator[Step]:
    """A gradient that is never used must not be the last one before a method hands over what it keeps: until another
    pass clears it nothing says that it was not meant."""
    for number, step in enumerate(steps):
        following = steps[number + 1].before if number + 1 < len(steps) else [("detach",)]
        hands_over = any(event[0] not in ("evaluate", "copy", "stats", "state") for event in following)
        yield replace(step, steps=True) if hands_over else step


ZEROS = ["first, None", "first, None", "first, zeros", "last, None", "last, zeros", "by hand", "after forward"]


def _step(
    draw: random.Random, loop: Loop, kind: str, closes: bool, clips: bool, events: tuple[Event, ...], zero: str
) -> Step:
    chance = lambda p: draw.random() < p  # noqa: E731
    static = dict(loop.ddp).get("static_graph")
    if kind == "mixed":
        kind = draw.choice(["plain", "accumulates", "several losses"])
    passes = [Pass("both" if chance(0.05) and not static else "main")]
    if kind == "accumulates":
        syncs = static or chance(0.4)
        passes = [*(Pass(sync=bool(syncs)) for _ in range(draw.choice([1, 1, 2]))), *passes]
        if not syncs and chance(0.2):
            passes.append(Pass(sync=False))  # then what the ranks step by is not the same
            passes.append(Pass())
    elif kind == "several losses":
        passes.append(Pass("other" if not static else "main"))
        if chance(0.2):
            passes.append(Pass("main"))
    if not closes and chance(0.06):
        passes.insert(0, Pass(dropped=True))
    if not static and not loop.scaler and chance(0.04):
        passes.insert(draw.randrange(len(passes)), Pass("own"))
    norm = ""
    if not closes:
        norm = "clip" if clips else "log" if chance(0.12) else ""
    between = tuple(_evaluation(draw) for _ in range(1) if chance(0.08))
    return Step(
        before=events,
        passes=tuple(passes),
        zero=zero,
        closure=closes,
        norm=norm,
        between=between,
        overflow=bool(loop.scaler) and chance(0.15),
        steps=closes or bool(loop.scaler) or not chance(0.04),
    )


def _evaluation(draw: random.Random) -> Event:
    return ("evaluate", draw.choice(["model", "module", "averaged", "rank 0", "training mode"]))


def _events(draw: random.Random, loop: Loop, number: int, saved: set[int]) -> list[Event]:
    """What happens before a step; ``saved`` are the slots with a state of the time behind attach."""
    chance = lambda p: draw.random() < p  # noqa: E731
    events: list[Event] = []
    if chance(0.2):
        events.append(_evaluation(draw))
    if chance(0.1):
        events.append(("copy",))
    if chance(0.15):
        events.append(("stats",))
    if chance(0.05):
        events.append(("state", draw.choice([True, False])))
    if number >= loop.attach_at and chance(0.1):
        events.append(("switch", draw.randrange(5)))
    if number >= loop.attach_at and number and chance(0.06):
        events.append(("reattach", draw.randrange(5), chance(0.5)))
    if 0 < number < loop.attach_at and chance(0.5):  # behind a step, so that there is momentum in it
        events.append(("save", 0))
        saved.add(0)
    elif number >= loop.attach_at and chance(0.12):
        events.append(("save", 1 + number % 2))
        saved.add(1 + number % 2)
    if saved and chance(0.15):
        slot = draw.choice(sorted(saved))
        parts = ["optimizer"] if slot == 0 else ["optimizer", "wire"]
        if chance(0.5):
            parts.append("model")
        draw.shuffle(parts)
        if slot and chance(0.1):
            parts = ["model"]
        if "wire" in parts and "model" in parts:  # the wire's state behind the model's, as documented
            parts.remove("wire")
            parts.append("wire")
        events.append(("load", slot, tuple(parts)))
    if chance(0.06):
        events.append(("reload optimizer",))
    if not loop.schedule and loop.optimizer != "LBFGS":
        if chance(0.06):
            events.append(("move", draw.choice(["head.weight", "hidden.weight", "first.bias", "head.bias"]), 0.05))
        if chance(0.04):
            events.append(("beside",))
        if chance(0.06):
            events.append(("set", "lr", draw.choice([0.0, 0.01, 0.05, 0.2])))
    if loop.has_momentum and chance(0.05):
        events.append(("set", "momentum", draw.choice([0.5, 0.8])))
    if "weight_decay" in dict(loop.options) and chance(0.04):
        events.append(("set", "weight_decay", draw.choice([0.0, 0.05])))
    draw.shuffle(events)
    return events


# ---------------------------------------------------------------------------------------------------------- text


def _call(name: str, options: Any) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in dict(options).items())})"


def text_of(loop: Loop, family: str = "dense") -> str:
    """The loop as text like Python."""
    lines = [f"# seed {loop.seed}, {loop.ranks} ranks"]
    lines.append(f"model = DDP(Net({', '.join(map(repr, loop.model))}){''.join(f', {k}={v}' for k, v in loop.ddp)})")
    if loop.unused:
        lines.append(f"# the branch is used: {loop.unused}")
    lines.append(f"optimizer = {_call(loop.optimizer, loop.options)}  # {loop.groups} groups")
    if loop.schedule:
        lines.append(f"scheduler = {loop.schedule!r}")
    if loop.scaler:
        lines.append(f"scaler = {_call('GradScaler', loop.scaler)}")
    if loop.default_dtype:
        lines.append(f"torch.set_default_dtype(float64)  # {loop.default_dtype} attach")
    for number, step in enumerate(loop.steps):
        if number == loop.attach_at:
            given = ", scaler=scaler" if loop.scaler else ""
            lines.append(f"wire = attach(model, optimizer, {method_at(loop, family, 0)!r}{given})")
        lines += _step_text(loop, family, number, step)
    return "\n".join(lines)


def _step_text(loop: Loop, family: str, number: int, step: Step) -> list[str]:
    lines = [f"# step {number}", *(_event_text(loop, family, event) for event in step.before)]
    body, at = [], ""
    if step.zero.startswith("first"):
        body.append(f"optimizer.zero_grad(set_to_none={step.zero.endswith('None')})")
    elif step.zero == "by hand":
        body.append("for p in model.parameters(): p.grad = None")
    for one in step.passes:
        at = "with autocast(bfloat16): " if loop.autocast else ""
        at += "" if one.sync else "with model.no_sync(): "
        loss = {"main": "loss(model(x))", "other": "other_loss(model(x))", "own": "penalty(model.parameters())"}
        forward = loss.get(one.loss, "(loss(model(x)) + loss(model(y)))")
        if step.zero == "after forward" and one is step.passes[0]:
            forward += "  # zero_grad() between forward and backward"
        scaled = "scaler.scale" if loop.scaler else ""
        overflow = " * inf on rank 0" if step.overflow and one is step.passes[0] else ""
        body.append(f"{at}{scaled}({forward}{overflow}).backward()")
        if one.dropped:
            body.append("optimizer.zero_grad()")
    if step.closure:
        lines += ["def closure():", *(f"    {line}" for line in body)]
        body = []
    body += [_event_text(loop, family, event) for event in step.between]
    if step.norm:
        scaled = "scaler.unscale_(optimizer); " if loop.scaler else ""
        body.append(f"{scaled}clip_grad_norm_(model.parameters(), {'inf' if step.norm == 'log' else '0.05'})")
    if step.steps:
        used = "scaler.step(optimizer); scaler.update()" if loop.scaler else "optimizer.step()"
        body.append("optimizer.step(closure)" if step.closure else used)
    if loop.schedule:
        body.append("scheduler.step()")
    if step.zero.startswith("last"):
        body.append(f"optimizer.zero_grad(set_to_none={step.zero.endswith('None')})")
    return lines + body


def _event_text(loop: Loop, family: str, event: Event) -> str:
    name, *rest = event
    if name == "switch":
        return f"wire.switch({method_at(loop, family, rest[0])!r})"
    if name == "reattach":
        again = "; model = DDP(module)" if rest[1] else ""
        method = method_at(loop, family, rest[0])
        return f"wire.detach(); optimizer.zero_grad(){again}; wire = attach(model, optimizer, {method!r})"
    if name == "load":
        return "; ".join(f"{part}.load_state_dict(saved[{rest[0]}][{part!r}])" for part in rest[1])
    texts = {
        "evaluate": "evaluate({0!r})",
        "copy": "copy.deepcopy(module) and one step of the copy",
        "stats": "wire.stats",
        "state": "wire.state_dict(all_ranks={0})",
        "save": "saved[{0}] = all state_dict()s",
        "reload optimizer": "optimizer.load_state_dict(optimizer.state_dict())",
        "move": "move {0!r} to a group of its own with lr={1}",
        "beside": "optimizer.add_param_group(a parameter that is not the model's)",
        "set": "for g in optimizer.param_groups: g[{0!r}] = {1!r}",
    }
    return texts[name].format(*rest)
