"""Runs a loop on one rank, with plain DDP or with a method, and says what came of it."""

from __future__ import annotations

import copy
import logging
import time
import traceback
import warnings
import zlib
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from loop_programs import Event, Loop, Pass, Step, method_at
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from workers import digest, flat

import thinwire

OWN = Path(thinwire.__file__).parent


@dataclass
class Outcome:
    """What came of a run on one rank; numbers as lists of arrays, so that they travel cheaply."""

    family: str | None = None
    losses: list[float] = field(default_factory=list)
    trajectory: list[Any] = field(default_factory=list)  # a flat array of the parameters a step, the first before all
    state: dict[str, Any] = field(default_factory=dict)  # of the optimizer, behind detach
    bits: str = ""  # of the parameters
    leftover: float = 0.0  # the largest number that detach gave back
    error: tuple[str, str] | None = None  # type and text
    where: str = ""  # the step and what it did when it was raised
    from_thinwire: bool = False  # whether thinwire's own code raised it
    trace: str = ""
    said: list[str] = field(default_factory=list)  # warnings, and the lines of thinwire's log
    seconds: float = 0.0  # of a processor


class Net(nn.Module):
    """A few small layers; ``parts`` says which."""

    def __init__(self, parts: tuple[str, ...]) -> None:
        super().__init__()
        self.parts, exact = set(parts), {"dtype": torch.float32}
        if "conv" in parts:
            self.conv = nn.Conv2d(2, 3, 2, **exact)
        self.first = nn.Linear(12 if "conv" in parts else 6, 8, **exact)
        if "batch norm" in parts:
            self.norm = nn.BatchNorm1d(8, **exact)
        self.hidden = nn.Linear(8, 8, dtype=torch.bfloat16 if "bf16 layer" in parts else torch.float32)
        if "branch" in parts:
            self.branch = nn.Linear(8, 8, **exact)
        self.head = nn.Linear(8, 3, **exact)
        if "scalar" in parts:
            self.scale = nn.Parameter(torch.ones((), **exact))
        with torch.no_grad():
            for name, p in self.named_parameters():
                if p.dim() > 0 and not name.startswith("norm"):
                    p.copy_(0.5 * noise(tuple(p.shape), 9, 9, name))
        if "frozen" in parts:
            self.first.requires_grad_(False)
        if "channels last" in parts:
            self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor, branch: bool) -> Tensor:
        if "conv" in self.parts:
            x = torch.tanh(self.conv(x)).flatten(1)
        x = self.first(x)
        if "batch norm" in self.parts:
            x = self.norm(x)
        x = torch.tanh(x)
        for _ in range(2 if "tied" in self.parts else 1):
            x = torch.tanh(self.hidden(x.to(self.hidden.weight.dtype)).to(torch.float32))
        if "branch" in self.parts and branch:
            x = x + torch.tanh(self.branch(x))
        return self.head(x) * self.scale if "scalar" in self.parts else self.head(x)


def noise(shape: tuple[int, ...], rank: int, step: int, name: str) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{rank}/{step}/{name}".encode()))
    return torch.randn(shape, generator=generator, dtype=torch.float32)


class _Heard(logging.Handler):
    def __init__(self, said: list[str]) -> None:
        super().__init__()
        self.said = said

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


class Running:
    """One rank of a loop. ``family`` None: plain DDP."""

    def __init__(self, group: dist.ProcessGroup, loop: Loop, family: str | None) -> None:
        self.group, self.loop, self.family, self.rank = group, loop, family, dist.get_rank(group)
        self.outcome = Outcome(family)
        self.wire: thinwire.Wire | None = None
        self.saved: dict[int, dict[str, Any]] = {}
        self.forwards = 0
        self.now = "making the model"

    # ------------------------------------------------------------------------------------------------- assembling

    def make(self) -> None:
        loop = self.loop
        self.module = Net(loop.model)
        options = dict(loop.options)
        parameters: list[Any] = list(self.module.parameters())
        if loop.groups == 2:
            half = len(parameters) // 2
            parameters = [{"params": parameters[:half]}, {"params": parameters[half:], "lr": options["lr"] / 2}]
        self.optimizer: torch.optim.Optimizer = getattr(torch.optim, loop.optimizer)(parameters, **options)
        self.scaler = torch.amp.GradScaler("cpu", **dict(loop.scaler)) if loop.scaler else None
        self.wrap()
        self.scheduler = self._scheduler(options["lr"])

    def wrap(self) -> None:
        self.model = DDP(self.module, process_group=self.group, **dict(self.loop.ddp))

    def _scheduler(self, lr: float) -> Any:
        kinds, own, count = torch.optim.lr_scheduler, self.optimizer, len(self.loop.steps)
        if self.loop.schedule == "from 0":
            return kinds.LambdaLR(own, lambda step: min(1.0, step / 3))
        if self.loop.schedule == "steps":
            return kinds.StepLR(own, 2, 0.5)
        if self.loop.schedule == "cosine":
            return kinds.CosineAnnealingLR(own, count)
        if self.loop.schedule == "one cycle":
            cycles = "momentum" in own.defaults or "betas" in own.defaults
            return kinds.OneCycleLR(own, max_lr=lr, total_steps=count + 1, cycle_momentum=cycles)
        return None

    def attach(self, place: int) -> None:
        if self.family is not None:
            method = method_at(self.loop, self.family, place)
            self.wire = thinwire.attach(self.model, self.optimizer, method, scaler=self.scaler)

    # -------------------------------------------------------------------------------------------------- the loop

    def run(self) -> Outcome:
        outcome, begin_s = self.outcome, time.process_time()
        log, handler, default = logging.getLogger("thinwire"), _Heard(outcome.said), torch.get_default_dtype()
        log.addHandler(handler)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                self._train()
            except Exception as error:
                frames = traceback.extract_tb(error.__traceback__)
                outcome.error = type(error).__name__, str(error)
                outcome.where, outcome.trace = self.now, traceback.format_exc()
                outcome.from_thinwire = OWN in Path(frames[-1].filename).parents
                if self.wire is not None:
                    self.wire.abandon()
            finally:
                torch.set_default_dtype(default)
                log.removeHandler(handler)
        outcome.said += [f"{one.category.__name__}: {one.message}" for one in caught]
        outcome.bits = digest(*self.module.parameters())
        outcome.seconds = time.process_time() - begin_s
        return outcome

    def _train(self) -> None:
        loop, outcome = self.loop, self.outcome
        self.make()
        outcome.trajectory.append(flat(self.module).numpy().copy())
        for number, step in enumerate(loop.steps):
            if number == loop.attach_at:
                self.now = "attach"
                if loop.default_dtype == "before":
                    torch.set_default_dtype(torch.float64)
                self.attach(0)
                if loop.default_dtype == "after":
                    torch.set_default_dtype(torch.float64)
            for event in step.before:
                self.now = f"step {number}: {event}"
                self.happen(event)
            self.now = f"step {number}"
            self.step(number, step)
            outcome.trajectory.append(flat(self.module).numpy().copy())
        if self.wire is not None:
            self.now = "detach"
            rest = self.wire.detach()
            outcome.leftover = max((float(t.abs().max()) for t in rest.values()), default=0.0)
        names = {id(p): name for name, p in self.module.named_parameters()}
        for parameter, state in self.optimizer.state.items():
            if id(parameter) in names:
                outcome.state[names[id(parameter)]] = {k: _plain(v) for k, v in state.items() if _comparable(v)}

    def step(self, number: int, step: Step) -> None:
        if step.closure:

            def closure() -> Tensor:
                return self.passes(number, step)

            for event in step.between:
                self.happen(event)
            self.optimizer.step(closure)
        else:
            self.passes(number, step)
            for event in step.between:
                self.happen(event)
            if self.scaler is not None and step.norm:
                self.scaler.unscale_(self.optimizer)
            if step.norm:
                limit = float("inf") if step.norm == "log" else 0.05
                torch.nn.utils.clip_grad_norm_(self.module.parameters(), limit)
            if not step.steps:
                pass
            elif self.scaler is not None:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            else:
                self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        if step.zero.startswith("last"):
            self.zero(step)

    def zero(self, step: Step) -> None:
        if step.zero == "by hand":
            for parameter in self.module.parameters():
                parameter.grad = None
        else:
            self.optimizer.zero_grad(set_to_none=not step.zero.endswith("zeros"))

    def passes(self, number: int, step: Step) -> Tensor:
        if step.zero.startswith("first") or step.zero == "by hand":
            self.zero(step)
        loss = torch.zeros(())
        for place, one in enumerate(step.passes):
            with nullcontext() if one.sync else self.model.no_sync():
                loss = self.loss(number, place, one)
                if step.zero == "after forward" and not place:
                    self.zero(step)
                self.outcome.losses.append(float(loss.detach()))
                if step.overflow and not place and self.rank == 0:
                    loss = loss * float("inf")
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            if one.dropped:
                self.zero(step)
        return loss

    def uses_branch(self, number: int) -> bool:
        kind = self.loop.unused
        if kind == "some ranks":
            return (self.rank + number) % 2 == 0
        return not kind or (kind == "some steps" and number % 2 == 0)

    def input(self, number: int, name: str) -> Tensor:
        return noise((4, 2, 3, 3) if "conv" in self.loop.model else (4, 6), self.rank, number, name)

    def loss(self, number: int, place: int, one: Pass) -> Tensor:
        if one.loss == "own":
            return sum(0.02 * p.float().square().sum() for p in self.module.parameters() if p.requires_grad)
        used = self.uses_branch(number)
        with torch.autocast("cpu", torch.bfloat16) if self.loop.autocast else nullcontext():
            out = self.model(self.input(number, f"x{place}"), used).float()
            if one.loss == "both":
                out = torch.cat([out, self.model(self.input(number, f"y{place}"), used).float()])
        target = noise(tuple(out.shape), self.rank, number, f"t{place}")
        off = (out - target).square()
        return (off + 1).sqrt().mean() if one.loss == "other" else off.mean()

    # ---------------------------------------------------------------------------------------------- what happens

    def happen(self, event: Event) -> None:
        name, *arguments = event
        getattr(self, f"on_{name.replace(' ', '_')}")(*arguments)

    def on_evaluate(self, how: str) -> None:
        x = self.input(0, "evaluation")
        with ExitStack() as stack:
            if how == "averaged" and self.wire is not None:
                stack.enter_context(self.wire.averaged())
            stack.enter_context(torch.no_grad())
            if how != "training mode":
                self.model.eval()
                stack.callback(self.model.train)
            if how == "rank 0" and self.rank:
                return
            out = (self.model if how in ("model", "training mode") else self.module)(x, True)
            self.outcome.losses.append(float(out.square().mean()))

    def on_copy(self) -> None:
        copied = copy.deepcopy(self.module)
        optimizer = torch.optim.SGD(copied.parameters(), lr=0.1, momentum=0.9)
        copied(self.input(0, "copy"), True).square().mean().backward()
        optimizer.step()
        self.outcome.losses.append(float(copied(self.input(0, "copy"), True).square().mean().detach()))

    def on_stats(self) -> None:
        if self.wire is not None:
            stats = self.wire.stats
            assert stats.steps >= 0 and repr(stats)

    def on_state(self, all_ranks: bool) -> None:
        if self.wire is not None:
            self.wire.state_dict(all_ranks=all_ranks)

    def on_switch(self, place: int) -> None:
        if self.wire is not None and self.family is not None:
            self.wire.switch(method_at(self.loop, self.family, place))

    def on_reattach(self, place: int, wraps: bool) -> None:
        if self.wire is not None:
            rest = self.wire.detach()
            self.outcome.leftover = max([self.outcome.leftover, *(float(t.abs().max()) for t in rest.values())])
        if wraps:
            self.wrap()
        self.optimizer.zero_grad()  # what lies in .grad may hold momentum that the wire has given back
        self.attach(place)

    def on_save(self, slot: int) -> None:
        state = {"model": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}
        self.saved[slot] = copy.deepcopy(state)
        if self.wire is not None:
            self.saved[slot]["wire"] = self.wire.state_dict()

    def on_load(self, slot: int, parts: tuple[str, ...]) -> None:
        state = self.saved.get(slot)
        sizes = lambda groups: [len(group["params"]) for group in groups]  # noqa: E731
        if state is None or sizes(state["optimizer"]["param_groups"]) != sizes(self.optimizer.param_groups):
            return
        for part in parts:
            if part == "model":
                self.module.load_state_dict(state[part])
            elif part == "optimizer":
                self.optimizer.load_state_dict(copy.deepcopy(state[part]))
            elif self.wire is not None:
                self.wire.load_state_dict(state[part])

    def on_reload_optimizer(self) -> None:
        self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))

    def on_move(self, name: str, lr: float) -> None:
        parameter = dict(self.module.named_parameters())[name]
        groups = self.optimizer.param_groups
        for group in groups:
            if any(p is parameter for p in group["params"]) and len(group["params"]) > 1:
                group["params"] = [p for p in group["params"] if p is not parameter]
                self.optimizer.add_param_group({"params": [parameter], "lr": lr})
                return

    def on_beside(self) -> None:
        own = nn.Parameter(torch.ones(3, dtype=torch.float32))
        own.grad = torch.ones(3, dtype=torch.float32)
        self.optimizer.add_param_group({"params": [own]})

    def on_set(self, option: str, value: float) -> None:
        for group in self.optimizer.param_groups:
            group[option] = value


def _comparable(value: Any) -> bool:
    return isinstance(value, (Tensor, float, int, type(None)))


def _plain(value: Any) -> Any:
    return value.detach().float().numpy().copy() if isinstance(value, Tensor) else value


def run_all(group: dist.ProcessGroup, jobs: list[tuple[Loop, list[str]]]) -> list[list[Outcome]]:
    """For each loop the outcome with plain DDP and with each of its families."""
    return [[Running(group, loop, family).run() for family in (None, *families)] for loop, families in jobs]
