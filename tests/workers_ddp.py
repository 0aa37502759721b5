"""Forms of DDP, run by the processes of the cluster: each function asserts on every rank."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP
from workers import DGC, EXACT, LR, SHAPES, Dot, Run, Training, close, digest, flat, noise, pulls

import thinwire


def accumulate(group: dist.ProcessGroup) -> None:
    for method in (DGC, thinwire.GTopK(density=0.02), thinwire.Dense(), EXACT, thinwire.BlockSign(dense_below=1)):
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
        for method in (
            None,
            EXACT,
            DGC,
            thinwire.GTopK(density=0.02),
            thinwire.BlockSign(dense_below=1),
            thinwire.Dense(),
        ):
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
    wire = thinwire.attach(model, optimizer, thinwire.BlockSign(dense_below=1))
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
        for method in (
            None,
            EXACT,
            thinwire.GTopK(density=1.0),
            thinwire.Dense(),
            DGC,
            thinwire.BlockSign(dense_below=1),
        ):
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
    for method in (None, EXACT, thinwire.DGC(density=1.0, factor_masking=False, clip_norm=1e9, values="fp32")):
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
    for method in (None, EXACT, thinwire.GTopK(density=1.0), thinwire.BlockSign(dense_below=1)):
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
