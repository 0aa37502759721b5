"""What the processes of the cluster run: training loops with and without thinwire, described by a Run."""

from __future__ import annotations

import copy
import gc
import hashlib
import io
import logging
import os
import random
import time
import weakref
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from oracles.problem import Problem
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire

SHAPES = {"a": (40, 30), "b": (50,), "c": (70, 60), "d": (3, 5), "e": ()}  # 5466 elements; c is cut into slices
LR = 0.1


class Dot(torch.nn.Module):
    """The sum of <p, g> over its parameters: the gradient of p is g, whatever the parameters are."""

    def __init__(self, shapes: dict[str, tuple[int, ...]] = SHAPES) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(noise(shape, 99, 99, name)))

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        return sum((getattr(self, name) * g.to(getattr(self, name).dtype)).sum() for name, g in gradients.items())


def noise(shape: tuple[int, ...], rank: int, step: int, name: str) -> Tensor:
    """Numbers that depend on their arguments alone and leave every global generator alone."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{rank}/{step}/{name}".encode()))
    return torch.randn(shape, generator=generator)


def pulls(rank: int, step: int, shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, Tensor]:
    return {name: noise(shape, rank, step, name) for name, shape in shapes.items()}


@dataclass(frozen=True)
class Run:
    """One training. task: "dot" (constant pulls) or "net" (a tanh network). events: step -> what happens before it.

    Events: ("attach", method), ("switch", method), ("detach",), ("reload",), or several of them in a list.
    """

    method: Any = None
    optimizer: str = "plain"
    steps: int = 10
    task: str = "dot"
    ddp: dict[str, Any] = field(default_factory=dict)
    hierarchy: Any = None
    events: dict[int, Any] = field(default_factory=dict)
    trajectory: bool = True
    onecycle: bool = False


def sgd(**options: Any) -> Callable[[torch.nn.Module], torch.optim.Optimizer]:
    return lambda module: torch.optim.SGD(module.parameters(), **{"lr": LR, **options})


def _groups(module: torch.nn.Module) -> torch.optim.Optimizer:
    first, second, *rest = module.parameters()
    return torch.optim.SGD(
        [
            {"params": [first], "lr": 0.05, "momentum": 0.9, "weight_decay": 0.02, "nesterov": True},
            {"params": [second], "lr": 0.2, "momentum": 0.5},
            {"params": rest, "weight_decay": 0.1, "maximize": True},
        ],
        lr=LR,
    )


OPTIMIZERS: dict[str, Callable[[torch.nn.Module], torch.optim.Optimizer]] = {
    "plain": sgd(),
    "heavy": sgd(momentum=0.9),
    "nesterov": sgd(momentum=0.9, nesterov=True),
    "decay": sgd(momentum=0.9, weight_decay=0.02),
    "nesterov-decay": sgd(momentum=0.9, nesterov=True, weight_decay=0.02),
    "maximize-plain": sgd(maximize=True),
    "maximize": sgd(lr=0.02, momentum=0.9, weight_decay=0.02, maximize=True),
    "maximize-nesterov": sgd(lr=0.02, momentum=0.9, weight_decay=0.02, maximize=True, nesterov=True),
    "groups": _groups,
    "tiny": sgd(lr=0.003, momentum=0.9),
    "adam": lambda module: torch.optim.Adam(module.parameters(), lr=0.01),
    "adamw": lambda module: torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.1),
}


def flat(module: torch.nn.Module) -> Tensor:
    """All parameters as one vector."""
    return torch.cat([p.detach().reshape(-1).to(torch.float32) for p in module.parameters()])


def digest(*tensors: Tensor) -> str:
    """The bits of tensors, as a short text."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:16]


def through_a_file(state: Any) -> Any:
    """What torch.load(weights_only=True) gives back of what torch.save wrote."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


class Training:
    """One rank of a Run."""

    def __init__(self, group: dist.ProcessGroup, run: Run) -> None:
        self.group, self.run, self.rank = group, run, dist.get_rank(group)
        self.problem = Problem()
        self.module = Dot() if run.task == "dot" else self.problem.module()
        self.optimizer = OPTIMIZERS[run.optimizer](self.module)
        self.model = DDP(self.module, process_group=group, **run.ddp)
        self.wire: thinwire.Wire | None = None
        self.leftover: dict[str, Tensor] = {}
        self.scheduler: Any = None
        if run.onecycle:
            self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=LR, total_steps=run.steps)
        if run.method is not None:
            self.happen("attach", run.method)

    def loss(self, step: int) -> Tensor:
        if self.run.task == "dot":
            return self.model(pulls(self.rank, step))
        return self.problem.loss(self.model, self.rank, step)

    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.loss(step).backward()
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()

    def happen(self, event: str, *arguments: Any) -> None:
        if event == "attach":
            self.wire = thinwire.attach(self.model, self.optimizer, *arguments, hierarchy=self.run.hierarchy)
        elif event == "switch":
            assert self.wire is not None
            self.wire.switch(*arguments)
        elif event == "detach":
            assert self.wire is not None
            self.leftover = self.wire.detach()
            self.wire = None
            self.model = DDP(self.module, process_group=self.group, **self.run.ddp)
        else:
            self.reload()

    def reload(self) -> None:
        """Save everything, and go on with a new model, optimizer, DDP and wire."""
        assert self.wire is not None
        state = {"model": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}
        saved = through_a_file({**state, "wire": self.wire.state_dict()})
        method = self.wire.method
        self.wire.detach()
        self.module = copy.deepcopy(self.module)
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.zero_()
        self.optimizer = OPTIMIZERS[self.run.optimizer](self.module)
        self.optimizer.load_state_dict(saved["optimizer"])
        self.model = DDP(self.module, process_group=self.group, **self.run.ddp)
        self.module.load_state_dict(saved["model"])  # behind DDP, which gives all ranks what rank 0 has
        self.happen("attach", method)
        self.wire.load_state_dict(saved["wire"])

    def train(self) -> dict[str, Any]:
        snapshots = []
        for step in range(self.run.steps):
            events = self.run.events.get(step, [])
            for event in events if isinstance(events, list) else [events]:
                self.happen(*event)
            self.step(step)
            if self.run.trajectory:
                snapshots.append(flat(self.module))
        result: dict[str, Any] = {"stats": self.wire.stats if self.wire is not None else None}
        if self.wire is not None:
            result["state"] = digest(*_tensors(self.wire.state_dict()))
            self.leftover = self.wire.detach()
        result["final"] = flat(self.module)
        rest = [self.leftover.get(name, torch.zeros_like(p)) for name, p in self.module.named_parameters()]
        result["leftover"] = torch.cat([r.reshape(-1) for r in rest])
        result["trajectory"] = torch.stack(snapshots) if snapshots else torch.zeros(0)
        return result


def own_part(state: dict[str, Any]) -> dict[str, Any]:
    """What a wire's state holds of its rank alone."""
    (part,) = (value for key, value in state.items() if key.startswith("rank "))
    return part


def _tensors(state: Any) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state]
    if isinstance(state, dict):
        return [tensor for key in sorted(state, key=str) for tensor in _tensors(state[key])]
    return []


def train(group: dist.ProcessGroup, runs: list[Run]) -> list[dict[str, Any]]:
    """All runs one after the other; a result each."""
    return [Training(group, run).train() for run in runs]


def generators_untouched(group: dist.ProcessGroup, methods: list[Any]) -> list[str]:
    """The methods that moved a global random generator of torch, NumPy or Python."""

    def state() -> str:
        return repr((torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()))

    touched = []
    for method in methods:
        training = Training(group, Run(None, "tiny"))
        before = state()
        training.happen("attach", method)
        for step in range(3):
            training.step(step)
        training.happen("switch", thinwire.Dense())
        if state() != before:
            touched.append(str(method))
        training.happen("detach")
    return touched


# --- forms of DDP: each function asserts on every rank -------------------------------------------

DGC = thinwire.DGC(density=0.05, dense_below=0)
EXACT = thinwire.DGC(density=1.0, factor_masking=False, dense_below=0)
DOT_NUMEL = sum(noise(shape, 0, 0, "").numel() for shape in SHAPES.values())


def close(a: Tensor, b: Tensor, what: str = "", atol: float = 3e-6) -> None:
    torch.testing.assert_close(a, b, rtol=1e-5, atol=atol, msg=lambda found: f"{what}: {found}")


def accumulate(group: dist.ProcessGroup) -> None:
    for method in (DGC, thinwire.GTopK(density=0.02), thinwire.Dense(), EXACT, thinwire.BlockSign()):
        whole, parted = Training(group, Run(method, "heavy")), Training(group, Run(method, "heavy"))
        for step in range(4):
            both = {name: g for name, g in pulls(whole.rank, step).items()}
            whole.optimizer.zero_grad()
            whole.model(both).backward()
            whole.optimizer.step()
            parted.optimizer.zero_grad()
            before = parted.wire.stats
            with parted.model.no_sync():
                for _ in range(3):
                    parted.model({name: g / 4 for name, g in both.items()}).backward()
            assert parted.wire.stats.frame_bytes == before.frame_bytes
            assert parted.wire.stats.steps == before.steps == step
            parted.model({name: g / 4 for name, g in both.items()}).backward()
            parted.optimizer.step()
        close(flat(parted.module), flat(whole.module), str(method), atol=1e-5)
        a, b = whole.wire.stats, parted.wire.stats
        assert (a.steps, a.frame_bytes, a.dense_bytes) == (b.steps, b.frame_bytes, b.dense_bytes)
        whole.wire.detach()
        parted.wire.detach()


def unused(group: dist.ProcessGroup, static_graph: bool) -> None:
    """Step 0: all used. Steps 1, 2: c on rank 0 alone, a on no rank. Step 3: all used again."""
    options = {"static_graph": True} if static_graph else {"find_unused_parameters": True}
    for form in (options, {**options, "bucket_cap_mb": 1e-5}):
        for method in (None, EXACT, DGC, thinwire.GTopK(density=0.02), thinwire.BlockSign(), thinwire.Dense()):
            training = Training(group, Run(method, "plain", ddp=form))
            module, rank = training.module, training.rank
            total = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
            start = {name: p.detach().clone() for name, p in module.named_parameters()}
            for step in range(4):
                training.optimizer.zero_grad()
                everybody = [pulls(r, step) for r in range(dist.get_world_size(group))]
                if static_graph or step in (1, 2):  # a static graph never changes: a is never used
                    for r, mine in enumerate(everybody):
                        del mine["a"]
                        if r and not static_graph:
                            del mine["c"]
                training.model(everybody[rank]).backward()
                if "a" not in everybody[0] and (not static_graph or step == 0):
                    assert module.a.grad is None, f"{method}: nobody used it, DDP leaves it alone"
                training.optimizer.step()
                for name in SHAPES:
                    total[name] += sum(m.get(name, torch.zeros(SHAPES[name])) for m in everybody) / len(everybody)
            rest = training.wire.detach() if training.wire is not None else {}
            for name, p in module.named_parameters():
                whole = p.detach() - LR * rest.get(name, torch.zeros(()))
                close(whole, start[name] - LR * total[name], f"{method} {name} {form}", atol=1e-5)
                if method is DGC and not (static_graph and name == "a"):
                    assert rest[name].abs().max() > 0 or name == "e"


def used_under_no_sync(group: dist.ProcessGroup) -> None:
    """A parameter that only the accumulating pass used counts as used, as in DDP."""
    for method in (None, EXACT):
        training = Training(group, Run(method, "plain", ddp={"find_unused_parameters": True}))
        start = training.module.a.detach().clone()
        with training.model.no_sync():
            training.model(pulls(training.rank, 0)).backward()
        later = pulls(training.rank, 1)
        del later["a"]
        training.model(later).backward()
        training.optimizer.step()
        mean = sum(pulls(r, 0)["a"] for r in range(dist.get_world_size(group))) / dist.get_world_size(group)
        close(training.module.a.detach(), start - LR * mean, str(method))
        if training.wire is not None:
            training.wire.detach()


def frozen(group: dist.ProcessGroup) -> None:
    module = Dot()
    module.b.requires_grad_(False)
    module.c.requires_grad_(False)
    model = DDP(module, process_group=group)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=LR, momentum=0.9)
    wire = thinwire.attach(model, optimizer, thinwire.BlockSign())
    start = {name: p.detach().clone() for name, p in module.named_parameters()}
    for step in range(3):
        optimizer.zero_grad()
        model(pulls(dist.get_rank(group), step)).backward()
        optimizer.step()
    moved = {name for name, p in module.named_parameters() if not torch.equal(p.detach(), start[name])}
    assert moved == {"a", "d", "e"}
    assert wire.stats.dense_bytes == 3 * 4 * (1200 + 15 + 1)
    wire.detach()


def mixed_dtypes(group: dist.ProcessGroup) -> None:
    kinds = {"a": torch.bfloat16, "c": torch.float64, "d": torch.float16}
    for dtypes in (dict.fromkeys(SHAPES, torch.bfloat16), kinds):
        finals = []
        for method in (None, EXACT, thinwire.GTopK(density=1.0), thinwire.Dense(), DGC, thinwire.BlockSign()):
            module = Dot()
            for name, dtype in dtypes.items():
                setattr(module, name, torch.nn.Parameter(getattr(module, name).detach().to(dtype)))
            model = DDP(module, process_group=group, bucket_cap_mb=0.005)
            optimizer = torch.optim.SGD(module.parameters(), lr=LR, momentum=0.9, weight_decay=0.01)
            wire = thinwire.attach(model, optimizer, method) if method is not None else None
            for step in range(4):
                optimizer.zero_grad()
                model(pulls(dist.get_rank(group), step)).backward()
                optimizer.step()
            finals.append(flat(module))
            bits = [None] * dist.get_world_size(group)
            dist.all_gather_object(bits, digest(*module.parameters()), group=group)
            assert len(set(bits)) == 1, f"{method}: replicas differ"
            if wire is not None:
                wire.detach()
                assert all(optimizer.state[p]["momentum_buffer"].dtype == p.dtype for p in module.parameters())
        reference, *exact = finals[:4]
        for other in exact:
            close(other, reference, f"{dtypes}", atol=0.05)


def batchnorm_and_user_collectives(group: dist.ProcessGroup) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    snapshots = []
    for method in (None, EXACT, thinwire.GTopK(density=1.0)):
        module = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
        with torch.no_grad():
            for name, p in module.named_parameters():
                p.copy_(noise(tuple(p.shape), 5, 5, name))
        model = DDP(module, process_group=group, bucket_cap_mb=1e-5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        wire = thinwire.attach(model, optimizer, method) if method is not None else None
        for step in range(6):
            optimizer.zero_grad()
            model(noise((8, 6), rank, step, "x")).square().mean().backward()
            optimizer.step()
            model.eval()
            with torch.no_grad():
                score = model(noise((4, 6), rank, step, "test")).sum()
            model.train()
            dist.all_reduce(score)  # on the world, from the main thread
            everybody = [None] * size
            dist.all_gather_object(everybody, float(score))
            assert len(set(everybody)) == 1
            assert wire is None or wire.stats.steps == step + 1
        snapshots.append(torch.cat([flat(module), module[1].running_mean, module[1].running_var]))
        if wire is not None:
            wire.detach()
    for other in snapshots[1:]:
        close(other, snapshots[0], atol=1e-5)


def checkpointed(group: dist.ProcessGroup, reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.tanh(checkpoint(self.first, x, use_reentrant=reentrant)))

    finals = []
    for method in (None, EXACT, thinwire.GTopK(density=1.0)):
        torch.manual_seed(1)
        module = Net()
        model = DDP(module, process_group=group, bucket_cap_mb=1e-5, static_graph=reentrant)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
        wire = thinwire.attach(model, optimizer, method) if method is not None else None
        for step in range(4):
            optimizer.zero_grad()
            x = noise((4, 6), dist.get_rank(group), step, "x").requires_grad_(reentrant)
            model(x).square().mean().backward()
            optimizer.step()
        finals.append(flat(module))
        if wire is not None:
            wire.detach()
    for other in finals[1:]:
        close(other, finals[0])


def closures(group: dist.ProcessGroup) -> None:
    finals = []
    for method in (None, EXACT, thinwire.DGC(density=1.0, factor_masking=False, clip_norm=1e9)):
        training = Training(group, Run(method, "nesterov-decay", task="net"))

        def closure(training: Training = training) -> Tensor:
            training.optimizer.zero_grad()
            loss = training.loss(training.count)
            loss.backward()
            return loss

        for step in range(6):
            training.count = step
            assert float(training.optimizer.step(closure).detach()) > 0
            assert training.optimizer.param_groups[0]["momentum"] == 0.9
        finals.append(flat(training.module))
        if training.wire is not None:
            training.wire.detach()
    for other in finals[1:]:
        close(other, finals[0])


def cycled_momentum(group: dist.ProcessGroup) -> None:
    seen: list[list[Any]] = []
    finals = []
    for method in (None, EXACT):
        training = Training(group, Run(method, "decay", 12, "net", onecycle=True))
        seen.append([])
        for step in range(12):
            training.step(step)
            one = training.optimizer.param_groups[0]
            saved = training.optimizer.state_dict()["param_groups"][0]
            assert saved["momentum"] == one["momentum"] and saved["weight_decay"] == one["weight_decay"]
            seen[-1].append((one["lr"], one["momentum"], one["weight_decay"], one["nesterov"]))
        finals.append(flat(training.module))
        if training.wire is not None:
            training.wire.detach()
    assert seen[0] == seen[1] and len({row[1] for row in seen[0]}) > 5
    close(finals[1], finals[0])


def failing_step(group: dist.ProcessGroup) -> None:
    """A user's hook raises inside step(), after momentum was switched off."""
    finals = []
    for method in (None, EXACT):
        training = Training(group, Run(method, "decay", task="net"))
        training.step(0)
        handle = training.optimizer.register_step_pre_hook(lambda *_: (_ for _ in ()).throw(KeyError("mine")))
        training.optimizer.zero_grad()
        training.loss(1).backward()
        try:
            training.optimizer.step()
        except KeyError:
            handle.remove()
        else:
            raise AssertionError("the hook did not raise")
        one = training.optimizer.state_dict()["param_groups"][0]
        assert (one["momentum"], one["weight_decay"]) == (0.9, 0.02)
        one = training.optimizer.param_groups[0]
        assert (one["momentum"], one["weight_decay"]) == (0.9, 0.02)
        training.optimizer.step()
        training.step(2)
        finals.append(flat(training.module))
        if training.wire is not None:
            training.wire.detach()
    close(finals[1], finals[0])


class _Fuse(torch.autograd.Function):
    """Identity whose backward pass fails when it is told to."""

    blown = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if _Fuse.blown:
            raise ArithmeticError("the user's backward")
        return grad


def failing_passes(group: dist.ProcessGroup) -> None:
    """On all ranks alike: an error before the first gradient, and one in the middle of the buckets."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)

        def forward(self, x: Tensor, where: str) -> Tensor:
            if where == "forward":
                raise ArithmeticError("the user's forward")
            hidden = torch.tanh(self.first(x))
            hidden = _Fuse.apply(hidden) if where == "middle" else hidden
            out = self.second(hidden)
            return _Fuse.apply(out) if where == "top" else out

    outcomes = []
    for method in (None, EXACT, thinwire.GTopK(density=1.0), thinwire.BlockSign()):
        torch.manual_seed(1)
        module = Net()
        model = DDP(module, process_group=group, bucket_cap_mb=1e-5)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        wire = thinwire.attach(model, optimizer, method) if method is not None else None
        outcome: list[str] = []
        for step, where in enumerate(["", "", "forward", "", "top", "", "middle", ""]):
            optimizer.zero_grad()
            _Fuse.blown = bool(where)
            try:
                model(noise((4, 6), dist.get_rank(group), step, "x"), where).square().mean().backward()
                optimizer.step()
                outcome.append("fine")
            except (ArithmeticError, RuntimeError) as error:
                outcome.append(str(error).split("\n")[0].split(".")[0][:60])
        outcomes.append((outcome, flat(module)))
        if wire is not None:
            wire.detach()
    _Fuse.blown = False
    for outcome, final in outcomes[1:]:
        assert outcome == outcomes[0][0], f"{outcome} instead of plain DDP's {outcomes[0][0]}"
        assert outcome[:6] == ["fine", "fine", "the user's forward", "fine", "the user's backward", "fine"]
        assert final.isfinite().all()
    for _, final in outcomes[1:3]:
        close(final, outcomes[0][1])


def learns(group: dist.ProcessGroup, pairs: list[tuple[str, Any]]) -> None:
    for optimizer, method in pairs:
        training = Training(group, Run(method, optimizer, task="net"))
        training.loss = lambda step, t=training: t.problem.loss(t.model, t.rank, 0)  # one batch: it can be learnt
        first = float(training.loss(0).detach())
        for step in range(15):
            training.step(step)
        assert float(training.loss(0).detach()) < first - 0.05, f"{method} with {optimizer}"
        training.wire.detach()


def two_models(group: dist.ProcessGroup) -> None:
    """Interleaved steps of two models give what each gives alone."""
    runs = [Run(DGC, "heavy", task="net"), Run(thinwire.GTopK(density=0.02), "adam")]
    alone = []
    for run in runs:
        training = Training(group, run)
        for step in range(5):
            training.step(step)
        alone.append(flat(training.module))
        training.wire.detach()
    trainings = [Training(group, run) for run in runs]
    for step in range(5):
        for training in trainings:
            training.optimizer.zero_grad()
        losses = [training.loss(step) for training in trainings]
        torch.autograd.backward(losses)  # both backward passes at once, buckets mixed
        for training in trainings:
            training.optimizer.step()
    for training, expected in zip(trainings, alone, strict=True):
        assert torch.equal(flat(training.module), expected)
        training.wire.detach()


def left_alive(group: dist.ProcessGroup) -> list[str]:
    """What survives of a training whose every name is gone: attached, and detached."""
    alive = []
    for detach, form in ((False, {}), (True, {}), (False, {"find_unused_parameters": True})):
        training = Training(group, Run(DGC, "heavy", ddp=form))
        training.step(0)
        if detach:
            training.wire.detach()
        watched = {
            "module": weakref.ref(training.module),
            "optimizer": weakref.ref(training.optimizer),
            "wire": weakref.ref(training.wire),
        }
        del training
        for _ in range(50):  # the worker's thread may just be letting go of its last job
            gc.collect()
            if not any(ref() for ref in watched.values()):
                break
            time.sleep(0.05)
        how = f"{'detached' if detach else 'attached'} {form}"
        alive += [f"{name}, {how}" for name, ref in watched.items() if ref()]
    return alive


# --- the wire object -----------------------------------------------------------------------------


def sentence_of(kind: type[Exception], action: Callable[[], Any]) -> str:
    """The message of the exception that action raises, which must be of exactly this kind and be one sentence."""
    try:
        action()
    except Exception as error:
        assert type(error) is kind, f"{type(error).__name__} instead of {kind.__name__}: {error}"
        text = str(error)
        assert text and "\n" not in text and not text.rstrip(".").count(". "), text
        return text
    raise AssertionError(f"nothing was raised, expected a {kind.__name__}")


def wrong_states(group: dist.ProcessGroup) -> None:
    rank = dist.get_rank(group)
    training = Training(group, Run(thinwire.BlockSign(), "heavy"))
    for step in range(3):
        training.step(step)
    wire = training.wire
    good = wire.state_dict()

    def changed(**changes: Any) -> dict[str, Any]:
        return {**copy.deepcopy(good), **changes}

    def without(key: str) -> dict[str, Any]:
        return {k: v for k, v in good.items() if k != key}

    def inside(room: str, kind: str, **vectors: Any) -> dict[str, Any]:
        state = copy.deepcopy(good)
        own_part(state)["aggregator"][room][kind].update(vectors)
        return state

    def parted(key: str, *value: Any) -> dict[str, Any]:
        state = copy.deepcopy(good)
        part = own_part(state)
        del part[key]
        if value:
            part[key] = value[0]
        return state

    other = Training(group, Run(thinwire.DGC(density=0.02), "heavy"))
    other.step(0)
    neighbour = [None] * dist.get_world_size(group)
    dist.all_gather_object(neighbour, good, group=group)
    served = next((name for name, _ in own_part(good)["aggregator"]["collective"]["residual"].items()), "a")
    cases = {
        "method": other.wire.state_dict(),
        "rank": neighbour[(rank + 1) % len(neighbour)],
        "world_size": changed(world_size=7),
        "format": changed(format=99),
        "state_dict": {},
        "'step'": without("step"),
        "'pending'": parted("pending"),
        "'aggregator'": parted("aggregator"),
        "'nowhere'": inside("memory", "residual", nowhere=torch.zeros(3)),
        "'a'": inside("memory", "velocity", a=torch.zeros(3)),
        "'b'": parted("pending", (("b", torch.zeros(3)),)),
        f"'{served}'": inside("collective", "residual", **{served: torch.zeros(99_999)}),
    }
    gone = copy.deepcopy(good)
    del own_part(gone)["aggregator"]["collective"]
    cases["'collective'"] = gone
    cases["state"] = None
    for word, state in cases.items():
        text = sentence_of(ValueError, lambda state=state: wire.load_state_dict(state))
        assert word.strip("'") in text, (word, text)
        assert digest(*_tensors(wire.state_dict())) == digest(*_tensors(good)), f"{word}: something was loaded"
        assert wire.state_dict()["step"] == 3
    wire.load_state_dict(good)
    training.step(3)
    assert wire.stats.steps == 4
    # A hierarchy keeps residuals elsewhere: its state is not a flat wire's.
    flat_state = other.wire.state_dict()
    grouped = Training(group, Run(thinwire.DGC(density=0.02), "heavy", hierarchy=[[0], [1, 2]]))
    assert "hierarchy" in sentence_of(ValueError, lambda: grouped.wire.load_state_dict(flat_state))
    for wire in (training.wire, other.wire, grouped.wire):
        wire.detach()


def counted_bytes(group: dist.ProcessGroup) -> None:
    """Model a: 1200, b: 50, c: 4200, d: 15, e: 1 elements; one bucket, or one a parameter."""
    from thinwire.codecs import FloatsCodec, LevelsCodec, SignsCodec, SparseCodec, TernaryCodec

    N, rank, steps = dist.get_world_size(group), dist.get_rank(group), 3
    last = N - 1
    numels = {name: noise(shape, 0, 0, "").numel() for name, shape in SHAPES.items()}
    whole = sum(numels.values())

    def served(r: int) -> list[int]:
        """Elements of each tensor that rank r serves: small ones whole by turns, c cut into slices."""
        parts = [numels[name] if place % N == r else 0 for place, name in enumerate(SHAPES)]
        parts[2] = 4200 * (r + 1) // N - 4200 * r // N
        return [part for part in parts if part]

    def sharded(up: Callable[[list[int]], int], down: Callable[[list[int]], int]) -> int:
        pushed = sum(up(served(r)) for r in range(N) if r != rank)
        return pushed + max(down(served(r)) for r in range(N))

    def k(density: float, *sizes: int) -> int:
        return sum(max(1, round(density * size)) for size in sizes)

    signs, ternary, levels, floats = SignsCodec(), TernaryCodec(), LevelsCodec(), FloatsCodec()
    share = -(-whole // N)
    dgc = SparseCodec("int8", "delta16").nbytes(5400, k(0.01, 1200, 4200), 66)
    expected: dict[Any, int] = {
        thinwire.DGC(density=0.01): SparseCodec().nbytes(5400, k(0.01, 1200, 4200), 66),
        thinwire.DGC(density=0.01, values="int8", indices="delta16"): dgc,
        thinwire.DGC(density=0.01, dense_below=0): SparseCodec().nbytes(whole, k(0.01, *numels.values()), 0),
        thinwire.GradientDropping(density=0.01): SparseCodec().nbytes(whole, 55, 0),
        thinwire.BlockSign(): sharded(
            lambda parts: signs.nbytes(sum(parts), len(parts), 0), lambda parts: signs.nbytes(sum(parts), len(parts), 0)
        ),
        thinwire.SignSGD(): sharded(lambda parts: signs.nbytes(sum(parts), 0, 0), lambda p: signs.nbytes(sum(p), 0, 0)),
        thinwire.TernGrad(): 4 * 5
        + sharded(lambda parts: ternary.nbytes(sum(parts), 0, 0), lambda p: levels.nbytes(sum(p), N, 0)),
        thinwire.TernGrad(share_scaler=False): sharded(
            lambda parts: ternary.nbytes(sum(parts), len(parts), 0), lambda p: floats.nbytes(sum(p), 0)
        ),
        thinwire.Dense(): 4 * whole,
        thinwire.Dense(dtype="bf16"): 2 * share * last + 2 * share,
        thinwire.Noop(): 0,
    }
    frame = SparseCodec().nbytes(whole, 55, 0)
    if N == 2:
        expected[thinwire.GTopK(density=0.01)] = frame
    else:  # rank 2 goes through rank 0, which also sends back one bit an entry; ranks 0 and 1 swap
        expected[thinwire.GTopK(density=0.01)] = [frame + frame + signs.nbytes(55, 0, 0), frame, frame][rank]
    for method, nbytes in expected.items():
        training = Training(group, Run(method, "tiny"))
        for step in range(steps):
            training.step(step)
        stats = training.wire.stats
        assert stats.frame_bytes == steps * nbytes, f"{method}: {stats.frame_bytes / steps} bytes a step, not {nbytes}"
        assert stats.dense_bytes == steps * 4 * whole and stats.steps == steps and stats.world_size == N
        assert stats.ratio == (stats.dense_bytes / stats.frame_bytes if nbytes else None)
        totals = torch.tensor([stats.bytes_sent, stats.bytes_received])
        dist.all_reduce(totals, group=group)
        assert totals[0] == totals[1], f"{method}: what is sent is received by somebody"
        training.wire.detach()


def readable_stats(group: dist.ProcessGroup) -> None:
    training = Training(group, Run(thinwire.DGC(density=0.02), "heavy"))
    empty = training.wire.stats
    assert empty.ratio is None and empty.steps == 0 and empty.residual_norm == 0 and "0 steps" in str(empty)
    for step in range(4):
        training.step(step)
    first = training.wire.stats
    text = str(first)
    for word in ("4 steps", "kB", "smaller than fp32", "s compressing", "s communicating", "residual norm"):
        assert word in text, text
    assert first.ratio > 10 and first.link_ratio > 1 and first.residual_norm > 1
    for seconds in (first.seconds_compensating, first.seconds_compressing, first.seconds_communicating):
        assert 0 < seconds < 60
    training.wire.switch(thinwire.BlockSign())
    training.step(4)
    second = training.wire.stats
    assert second.steps == 5 and second.frame_bytes > first.frame_bytes
    assert second.seconds_compressing >= first.seconds_compressing
    assert second.seconds_compensating >= first.seconds_compensating
    training.wire.detach()
    after = training.wire.stats
    assert (after.steps, after.dense_bytes) == (second.steps, second.dense_bytes)


def leaves(group: dist.ProcessGroup) -> None:
    N = dist.get_world_size(group)
    training = Training(group, Run(thinwire.DGC(density=0.02, dense_below=0), "heavy"))
    for step in range(3):
        training.step(step)
    saved = own_part(training.wire.state_dict())["aggregator"]["memory"]
    everybody = [None] * N
    dist.all_gather_object(everybody, saved, group=group)
    rest = training.wire.detach()
    for name, parameter in training.module.named_parameters():
        velocity = sum(memory["velocity"][name] for memory in everybody) / N
        residual = sum(memory["residual"][name] for memory in everybody) / N
        close(training.optimizer.state[parameter]["momentum_buffer"], velocity.view_as(parameter), name)
        close(rest[name], residual.view_as(parameter), name)
        assert rest[name].shape == parameter.shape
    assert training.wire.detach() == {}


def refused_switches(group: dist.ProcessGroup) -> None:
    rank = dist.get_rank(group)
    training = Training(group, Run(DGC, "heavy"))
    training.step(0)
    wire = training.wire
    before = digest(*_tensors(wire.state_dict()))
    refused = {
        "unknown method": "dcg:density=0.1",
        "matches no parameter": thinwire.DGC(exclude=("nope",)),
        "not 5": 5,
        "ranks differ": thinwire.DGC(density=0.1 + rank / 10),
        "density": "dgc:density=2" if rank else "dgc",
    }
    for word, method in refused.items():
        assert word in sentence_of(ValueError, lambda method=method: wire.switch(method)), word
        assert wire.method is DGC and digest(*_tensors(wire.state_dict())) == before
    wire.switch("blocksign:topology=server")
    training.step(1)
    wire.detach()
    adam = Training(group, Run(thinwire.TernGrad(), "adam"))
    text = sentence_of(ValueError, lambda: adam.wire.switch(thinwire.DGC()))
    assert "momentum_correction=False" in text and "Adam" in text
    adam.step(0)
    adam.wire.detach()


def after_detach(group: dist.ProcessGroup) -> None:
    training = Training(group, Run(DGC, "heavy"))
    training.step(0)
    wire = training.wire
    state = wire.state_dict()
    wire.detach()
    assert wire.stats.steps == 1 and "1 steps" in str(wire.stats)
    for action in (lambda: wire.switch(thinwire.Dense()), lambda: wire.load_state_dict(state), wire.state_dict):
        assert "detached" in sentence_of(thinwire.DetachedError, action)


def auto_hierarchy(group: dist.ProcessGroup) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    try:
        training = Training(group, Run(thinwire.DGC(density=0.02), "heavy", hierarchy="auto"))
        training.step(0)
        assert training.wire.stats.world_size == 2
        assert training.wire.state_dict()["hierarchy"] == ((0, 1), (2, 3))
        training.wire.detach()
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]


# --- bad input -----------------------------------------------------------------------------------


def _footprint(model: Any, optimizer: Any) -> tuple[Any, ...]:
    """Everything that attach may change, as far as it can be counted."""
    inner = getattr(model, "module", model)
    return (
        len(getattr(model, "_comm_hooks", [])),
        len(model._forward_pre_hooks),
        sum(len(p._post_accumulate_grad_hooks or ()) for p in inner.parameters()),
        *(
            len(getattr(optimizer, f"_optimizer_{name}_hooks", ()))
            for name in ("step_pre", "step_post", "state_dict_pre", "state_dict_post", "load_state_dict_pre")
        ),
        len(dist.distributed_c10d._world.pg_names),
        str(getattr(optimizer, "state_dict", dict)()),
    )


def refused_attaches(group: dist.ProcessGroup) -> None:
    def fresh(kind: str = "heavy", module: torch.nn.Module | None = None) -> tuple[DDP, torch.optim.Optimizer]:
        module = module if module is not None else Dot()
        return DDP(module, process_group=group), OPTIMIZERS[kind](module)

    def check(words: list[str], model: Any, optimizer: Any, method: Any, kind: type = ValueError, **more: Any) -> None:
        before = _footprint(model, optimizer)
        text = sentence_of(kind, lambda: thinwire.attach(model, optimizer, method, **more))
        assert all(word in text for word in words), f"{words} in {text!r}"
        assert _footprint(model, optimizer) == before, f"{words}: something was changed"

    model, optimizer = fresh()
    adam = torch.optim.Adam(model.parameters())
    damped = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, dampening=0.1)
    check(["DistributedDataParallel", "Dot", "DDP("], model.module, optimizer, DGC)
    check(["exclude", "'zz*'", "matches no parameter"], model, optimizer, thinwire.DGC(exclude=("a", "zz*")))
    check(["exclude"], model, optimizer, thinwire.TernGrad(exclude="nothing"))
    check(["unknown method", "did you mean"], model, optimizer, "dcg")
    check(["method", "thinwire.DGC()"], model, optimizer, thinwire.DGC)
    check(["method"], model, optimizer, None)
    check(["torch optimizer", "dict"], model, {}, DGC)
    for method in (thinwire.DGC(), thinwire.GTopK(momentum_correction=True), "dropping:momentum_correction=true"):
        check(["Adam", "SGD", "momentum_correction=False"], model, adam, method)
    for method in (thinwire.DGC(), thinwire.BlockSign()):
        check(["dampening"], model, damped, method)
    for hierarchy in ("far", 3, [[0]], [[0], [1, 1]], [0, 1], True):
        check(["hierarchy"], model, optimizer, DGC, hierarchy=hierarchy)

    other = torch.optim.SGD(Dot().parameters(), lr=LR)
    check(["does not own", "5 of", "'a'", "model.parameters()"], model, other, DGC)
    some = torch.optim.SGD([model.module.a, model.module.c], lr=LR)
    check(["does not own", "3 of", "'b'"], model, some, DGC)
    foreign = torch.nn.Parameter(torch.zeros(3))
    more = torch.optim.SGD([*model.parameters(), foreign], lr=LR, momentum=0.9)
    check(["1 parameters", "not the model's"], model, more, DGC)

    hooked, its = fresh()
    hooked.register_comm_hook(None, lambda state, bucket: dist.all_reduce(bucket.buffer(), async_op=True).get_future())
    check(["hook", "new"], hooked, its, DGC)

    sparse = torch.nn.Sequential(torch.nn.Embedding(9, 4, sparse=True), torch.nn.Linear(4, 2))
    check(["sparse", "'0'", "sparse=False"], *fresh(module=sparse), DGC)
    bag = torch.nn.ModuleDict({"words": torch.nn.EmbeddingBag(9, 4, sparse=True), "out": torch.nn.Linear(4, 2)})
    check(["sparse", "'words'"], *fresh(module=bag), DGC)

    wire = thinwire.attach(model, optimizer, DGC)  # after all that, the first model is as good as new
    check(["attached already", "switch", "detach"], model, optimizer, DGC)
    check(["attached already"], model, adam, thinwire.Dense())
    optimizer.zero_grad()
    model(pulls(dist.get_rank(group), 0)).backward()
    optimizer.step()
    assert wire.stats.steps == 1 and wire.stats.frame_bytes > 0
    wire.detach()
    thinwire.attach(model, more, thinwire.TernGrad()).detach()  # extra parameters are fine where momentum stays


def differing_ranks(group: dist.ProcessGroup) -> dict[str, str]:
    """The sentence of each case, which all ranks must raise; the model works afterwards."""
    rank = dist.get_rank(group)
    texts = {}

    def note(case: str, words: list[str], model: DDP, optimizer: Any, method: Any, **more: Any) -> None:
        before = _footprint(model, optimizer)
        texts[case] = sentence_of(ValueError, lambda: thinwire.attach(model, optimizer, method, **more))
        assert all(word in texts[case] for word in words), f"{case}: {texts[case]}"
        assert _footprint(model, optimizer) == before

    module = Dot()
    model, optimizer = DDP(module, process_group=group), OPTIMIZERS["heavy"](module)
    odd = rank == 1
    other = thinwire.GTopK() if odd else DGC
    note("method", ["ranks differ", "method", "rank 1", "GTopK", "DGC"], model, optimizer, other)
    note("option", ["ranks differ", "0.05", "0.06"], model, optimizer, thinwire.DGC(density=0.06 if odd else 0.05))
    note("seed", ["seed=1"], model, optimizer, thinwire.TernGrad(seed=int(odd)))
    note("hierarchy", ["hierarchy"], model, optimizer, DGC, hierarchy=[[0], [1, 2]] if odd else [[0, 1], [2]])
    note("no hierarchy", ["hierarchy"], model, optimizer, DGC, hierarchy=3 if odd else None)
    note("one rank, bad option", ["density"] if odd else ["rank 1", "density"], model, optimizer,
         "dgc:density=7" if odd else "dgc")  # fmt: skip
    note("one rank, bad hierarchy", ["hierarchy"], model, optimizer, DGC, hierarchy="x" if odd else None)
    adam = torch.optim.Adam(module.parameters())
    note("one rank, adam", ["Adam"], model, adam if odd else optimizer, DGC)
    stranger = torch.optim.SGD(Dot().parameters(), lr=LR)
    note("one rank, other optimizer", ["does not own"], model, stranger if odd else optimizer, DGC)

    renamed = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2, bias=True))
    if odd:  # the same sizes for DDP's own check, another name for ours
        renamed = torch.nn.ModuleDict({"0": renamed[0], "last": renamed[1]})
    note("model", ["ranks differ", "parameters", "1.weight", "missing", "rank 1"],
         DDP(renamed, process_group=group), OPTIMIZERS["heavy"](renamed), DGC)  # fmt: skip
    wire = thinwire.attach(model, optimizer, DGC)
    optimizer.zero_grad()
    model(pulls(rank, 0)).backward()
    optimizer.step()
    wire.detach()
    return texts


def alone(group: dist.ProcessGroup) -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("thinwire").addHandler(handler)
    try:
        for method in ("dgc:density=0.1", "gtopk", "terngrad", "blocksign", "dropping:local=sum", "signsgd", "dense"):
            records.clear()
            training = Training(group, Run(method, "tiny"))
            assert [r.levelname for r in records] == ["WARNING"] and "nothing is sent" in records[0].getMessage()
            for step in range(3):
                training.step(step)
            assert training.wire.stats.bytes_sent == 0 and training.wire.stats.ratio is None
            training.wire.detach()
    finally:
        logging.getLogger("thinwire").removeHandler(handler)


def steps_after_detach(group: dist.ProcessGroup) -> None:
    for method in (DGC, thinwire.GTopK(density=0.02)):
        training = Training(group, Run(method, "heavy"))
        training.step(0)
        training.wire.detach()
        text = sentence_of(thinwire.DetachedError, lambda training=training: training.step(1))
        assert "attach" in text and "DistributedDataParallel" in text
        with torch.no_grad():
            training.loss(1)  # evaluation
        with training.model.no_sync():
            training.loss(1).backward()  # nothing to exchange
        training.model.eval()
        training.loss(1)
        training.model.train()
        sentence_of(thinwire.DetachedError, lambda training=training: training.step(1))
        for again in (method, thinwire.BlockSign()):
            training.wire = thinwire.attach(training.model, training.optimizer, again)
            training.step(1)
            training.step(2)
            assert training.wire.stats.steps == 2
            bits = [None] * dist.get_world_size(group)
            dist.all_gather_object(bits, digest(flat(training.module)), group=group)
            assert len(set(bits)) == 1
            training.wire.detach()
        training.model.eval()  # as with frozen batch norm: the forward pass cannot know that backward follows
        try:
            training.loss(1).backward()
        except RuntimeError as error:
            assert "detached" in str(error)
        else:
            raise AssertionError("a step after detach went through")


def old_and_new_wire(group: dist.ProcessGroup) -> None:
    training = Training(group, Run(DGC, "heavy"))
    old = training.wire
    training.step(0)
    old.detach()
    training.happen("attach", thinwire.BlockSign())
    assert old.detach() == {}
    training.step(1)
    assert training.wire.stats.steps == 1 and old.stats.steps == 1
    training.wire.detach()


def attached_again_and_again(group: dist.ProcessGroup, hierarchy: Any) -> int:
    """Threads that a process has more after the last of many attach and detach than after the second."""
    rank = dist.get_rank(group)
    training = Training(group, Run(None, "heavy", hierarchy=hierarchy))
    known = 0
    for step in range(8):
        training.happen("attach", DGC if step % 2 else thinwire.GTopK(density=0.02))
        training.step(step)
        time.sleep(0.02 * ((rank + step) % 3))  # ranks leave at different times
        training.wire.detach()
        if step == 1:
            known = len(os.listdir("/proc/self/task"))
    return len(os.listdir("/proc/self/task")) - known


def crossing_wires(group: dist.ProcessGroup) -> None:
    """First and second attach, first leaves, third attaches: all on one subgroup, and the second one goes on."""
    runs = [Run(DGC, "heavy", task="net"), Run(thinwire.BlockSign(), "nesterov"), Run("gtopk:density=0.02", "adam")]
    first, second = Training(group, runs[0]), Training(group, runs[1])
    for step in range(3):
        first.step(step)
        second.step(step)
        first.happen("detach")
        second.step(step + 10)
        third = Training(group, runs[2])
        third.step(step)
        second.step(step + 20)
        first.happen("attach", DGC)
        third.wire.detach()
    bits = [None] * dist.get_world_size(group)
    dist.all_gather_object(bits, digest(flat(first.module), flat(second.module)), group=group)
    assert len(set(bits)) == 1
    first.wire.detach()
    second.wire.detach()
