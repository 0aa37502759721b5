"""One rank of the trainings of test_frozen_bits.py, and the digests of what it ends with.

What the package calls its parts is named in four places: ``Wired`` (thinwire.attach on DDP), ``on_threads`` (ranks
that are threads), ``canonical`` (the form of a state) and ``recorded_with``. Renaming them changes these alone.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import os
import platform
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from frozen_bits_matrix import SAVED, SCENES, Cell, Scene
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire

LR = 0.125  # a power of two, so that a multiple of it is exact
MODELS: dict[str, dict[str, tuple[int, ...]]] = {
    # Servers share a tensor of 4,096 elements or more; an empty shape is a scalar. Of small buckets there are five.
    "small": {
        "first": (70, 60), "bias": (280,), "middle": (40, 30), "wide": (15, 20), "short": (50,), "last": (90, 70),
        "d": (3, 5), "e": (),
    },
    # Exchanges of more than 1 MB, frames of more than 64 KiB and of more than 4,096 entries.
    "large": {"first": (700, 1000), "bias": (1000,), "middle": (400, 1000), "last": (30, 50)},
    "mixed": {"first": (64, 8, 3, 3), "bias": (60,), "middle": (70, 60), "last": (90, 50)},
}  # fmt: skip
Digests = dict[str, str]


# --- what is trained ----------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def numbers(shape: tuple[int, ...], *of: object) -> Tensor:
    """Numbers in (-1, 1), most of them small, that depend on the arguments alone.

    Integers of PCG64 and products of two floats: the same bits with every version of torch and on every processor,
    which torch.randn does not promise.
    """
    seed = int.from_bytes(hashlib.sha256(repr(of).encode()).digest()[:8], "little")
    count = int(np.prod(shape, dtype=np.int64))
    integers = np.random.PCG64(seed).random_raw(count) >> np.uint64(40)  # 24 bits, which float32 has
    uniform = (integers.astype(np.float32) - np.float32(1 << 23)) * np.float32(2.0**-23)
    return torch.from_numpy(np.array(uniform * uniform * uniform, dtype=np.float32).reshape(shape))


def pulls(model: str, rank: int, step: int, grown: float = 1.0) -> dict[str, Tensor]:
    """The gradients of a rank at a step: some of it all ranks have in common, and all steps."""
    return {
        name: (numbers(shape, "common", name) * 0.5 + numbers(shape, rank, step, name)) * grown
        for name, shape in MODELS[model].items()
    }


class Pulled(torch.nn.Module):
    """The sum of <p, g> over its parameters: the gradient of p is g, to the bit, whatever the parameters are."""

    def __init__(self, model: str) -> None:
        super().__init__()
        for name, shape in MODELS[model].items():
            start = numbers(shape, "start", name).clone()
            if model == "mixed":
                start = start.to(memory_format=torch.channels_last) if start.dim() == 4 else start
                start = start.to({"middle": torch.bfloat16, "last": torch.float64}.get(name, torch.float32))
            self.register_parameter(name, torch.nn.Parameter(start))

    def forward(self, gradients: Mapping[str, Tensor]) -> Tensor:
        return sum((getattr(self, name) * g.to(getattr(self, name).dtype)).sum() for name, g in gradients.items())


def _groups(module: torch.nn.Module) -> torch.optim.Optimizer:
    first, second, *rest = module.parameters()
    return torch.optim.SGD(
        [
            {"params": [first], "lr": LR / 2, "momentum": 0.9, "weight_decay": 0.02, "nesterov": True},
            {"params": [second], "lr": 2 * LR, "momentum": 0.5},
            {"params": rest, "weight_decay": 0.1, "maximize": True},
        ],
        lr=LR,
    )


OPTIMIZERS: dict[str, Callable[[torch.nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=LR, momentum=0.9, nesterov=True, weight_decay=0.02),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=LR, momentum=0.9),
    "groups": _groups,
    # fused: the others take their square roots from MKL, which rounds otherwise on processors of other makers.
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=LR / 8, weight_decay=0.1, fused=True),
}


# --- what is frozen -----------------------------------------------------------------------------------------------


def short(parts: Iterator[bytes] | list[bytes], digits: int) -> str:
    sha = hashlib.sha256()
    for part in parts:
        sha.update(len(part).to_bytes(8, "little") + part)
    return sha.hexdigest()[:digits]


def raw(tensor: Tensor) -> bytes:
    """Type and bits, the elements in the order of their indices."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return str(tensor.dtype).encode() + flat.view(torch.uint8).numpy().tobytes()


def canonical(state: Mapping[str, Any]) -> list[tuple[str, str, str, bytes]]:
    """A rank's state as sorted rows (room, kind, name, bytes), whatever container it came in.

    Tensors of zeros and numbers that are 0 are left out: a state may have them, or not have them yet. The method's
    string, the group and the format's number are no part of it.
    """
    part = next(value for key, value in state.items() if key.startswith("rank"))
    counters = [(key, state[key]) for key in ("step", "optimizer_steps", "density_factor")]
    rooms = {**part["aggregator"], "": {"pending": part.get("pending", {}), "counter": counters}}
    rows = []
    for room, kinds in rooms.items():
        for kind, named in kinds.items():
            for name, value in dict(named).items():
                if isinstance(value, Tensor):
                    rows += [(room, kind, name, raw(value))] if bool(value.any()) else []
                elif value:
                    rows.append((room, kind, name, repr(value).encode()))
    return sorted(rows)


def of_parameters(module: torch.nn.Module) -> str:
    return short([raw(p) for p in module.parameters()], 6)


def of_state(state: Mapping[str, Any]) -> str:
    return short([text for *names, bits in canonical(state) for text in ("/".join(names).encode(), bits)], 12)


def of_the_end(module: torch.nn.Module, optimizer: torch.optim.Optimizer, leftover: Mapping[str, Tensor]) -> bytes:
    """Parameters, what the optimizer keeps, and what was not sent, behind detach()."""
    parts = [raw(p) for p in module.parameters()]
    for name, parameter in module.named_parameters():
        kept = {**optimizer.state.get(parameter, {}), "leftover": leftover.get(name)}
        for kind, value in sorted(kept.items()):
            if isinstance(value, Tensor) and bool(value.any()):
                parts += [f"{name}/{kind}".encode(), raw(value)]
    return b"".join(parts)


# --- how it is trained --------------------------------------------------------------------------------------------


class Wired:
    """A DDP model behind thinwire.attach."""

    def __init__(self, group: dist.ProcessGroup, cell: Cell, scene: Scene, folder: str) -> None:
        self.group, self.cell, self.scene, self.folder = group, cell, scene, folder
        self.module = Pulled(scene.model)
        self.optimizer = OPTIMIZERS[cell.optimizer](self.module)
        self.method = cell.method
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) if scene.scales else None
        self._attach()

    def _attach(self) -> None:
        cap = 0.001 if self.cell.way == "many" else 25
        self.model = DDP(self.module, process_group=self.group, bucket_cap_mb=cap, **self.scene.ddp)
        options = {**self.scene.attach, **({"scaler": self.scaler} if self.scaler is not None else {})}
        hierarchy = self.scene.hierarchy and [list(machine) for machine in self.scene.hierarchy]
        self.wire = thinwire.attach(self.model, self.optimizer, self.method, hierarchy=hierarchy, **options)

    def backward(self, gradients: Mapping[str, Tensor], last: bool) -> None:
        with nullcontext() if last else self.model.no_sync():
            loss = self.model(gradients)
            (self.scaler.scale(loss) if self.scaler is not None else loss).backward()

    def step(self) -> None:
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def happen(self, event: str, *arguments: str) -> None:
        if event == "switch":
            (self.method,) = arguments
            self.wire.switch(self.method)
        else:
            assert event == "reload"
            self._reload()

    def _reload(self) -> None:
        """Save everything, and go on with a new model, optimizer, DDP and wire."""
        path = Path(self.folder) / f"reload {dist.get_rank(self.group)}"
        self.save(path)
        self.wire.detach()
        self.module = copy.deepcopy(self.module)
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.zero_()
        self.optimizer = OPTIMIZERS[self.cell.optimizer](self.module)
        self._attach()
        self.load([path], path)

    def save(self, path: Path) -> None:
        states = {"model": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save({**states, "wire": self.wire.state_dict()}, path)

    def load(self, wires: list[Path], others: Path) -> None:
        """Take a state up: the wire's of the rank, or of all ranks that saved; model and optimizer from one of them."""
        saved = [torch.load(path, weights_only=True) for path in wires]
        rest = torch.load(others, weights_only=True)
        self.module.load_state_dict(rest["model"])
        self.optimizer.load_state_dict(rest["optimizer"])
        self.wire.load_state_dict(saved[0]["wire"] if len(saved) == 1 else [one["wire"] for one in saved])

    def finish(self) -> Digests:
        stats, state = self.wire.stats, of_state(self.wire.state_dict())
        assert stats.steps_skipped == (self.scene.bad is not None), "the bad step was not passed over"
        assert bool(stats.runaways) == (self.scene.grows is not None), "the guard did not see what it should"
        with self.wire.averaged():
            averaged = of_parameters(self.module)
        leftover = self.wire.detach()
        counted = f"{stats.frame_bytes} {stats.bytes_sent}" if self.scene.merge != "auto" else ""
        end = short([averaged.encode(), of_the_end(self.module, self.optimizer, leftover)], 12)
        return {"state": state, "end": end, "bytes": counted}


def on_threads(cell: Cell) -> list[Digests]:
    """Train a cell on ranks that are threads; the digests of every rank.

    Whatever takes named tensors and a group of threads fits here: the same four calls, the same bits.
    """
    from thinwire.transport import ThreadNet, ThreadWorld

    scene = SCENES[cell.scene]

    class Threaded:
        def __init__(self, net: ThreadNet) -> None:
            self.module = Pulled(scene.model)
            self.optimizer = OPTIMIZERS[cell.optimizer](self.module)
            method = thinwire.parse_method(cell.method)
            self.wire = thinwire.Reducer(self.module.named_parameters(), method, net, self.optimizer)

        def backward(self, gradients: Mapping[str, Tensor], last: bool) -> None:
            self.module(gradients).backward()
            self.wire.reduce({name: p.grad for name, p in self.module.named_parameters()})

        def step(self) -> None:
            self.optimizer.step()

        def finish(self) -> Digests:
            stats, state = self.wire.snapshot(), of_state(self.wire.state_dict())
            end = short([of_the_end(self.module, self.optimizer, {})], 12)
            self.wire.abandon()
            return {"state": state, "end": end, "bytes": f"{stats.frame_bytes} {stats.bytes_sent}"}

    def work(net: ThreadNet) -> Digests:
        return train(Threaded(net), cell, net.rank)

    return ThreadWorld(cell.size, one_at_a_time=True).run(work)


def train(rank: Any, cell: Cell, number: int) -> Digests:
    """All steps of one rank (a Wired or a Threaded), and the digests of what it ends with."""
    scene = SCENES[cell.scene]
    first = SAVED_AFTER if scene.loads else 0
    steps = scene.steps - (2 if scene.uneven and number == cell.size - 1 else 0)
    rates = [group["lr"] for group in rank.optimizer.param_groups]
    found = []
    with rank.model.join() if scene.uneven else nullcontext():
        for step in range(first, first + steps):
            if step in scene.events:
                rank.happen(*scene.events[step])
            if scene.rates:
                for group, rate in zip(rank.optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate * scene.rates[step]
            rank.optimizer.zero_grad()
            if scene.accumulates:
                rank.backward(pulls(scene.model, number, 1000 + step), False)
            rank.backward(_gradients(scene, number, step), True)
            rank.step()
            found.append(of_parameters(rank.module))
    return {"parameters": " ".join(found), **rank.finish()}


def _gradients(scene: Scene, number: int, step: int) -> dict[str, Tensor]:
    grown = 10.0 ** max(0, step - scene.grows + 1) if scene.grows is not None else 1.0
    given = pulls(scene.model, number, step, grown)
    if scene.bad == (number, step):
        given["middle"][3, 4] = float("inf")
    unused = {*scene.unused.get((None, step), ()), *scene.unused.get((number, step), ())}
    return {name: gradient for name, gradient in given.items() if name not in unused}


# --- what the processes of the cluster run ------------------------------------------------------------------------

SAVED_AFTER = 3  # steps


@contextmanager
def _quiet(merge: str) -> Iterator[None]:
    """No warnings, and buckets merged as the cell says."""
    log, before = logging.getLogger("thinwire"), os.environ.get("THINWIRE_MERGE")
    level = log.level
    log.setLevel(logging.ERROR)
    os.environ["THINWIRE_MERGE"] = merge
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
        del os.environ["THINWIRE_MERGE"]
        if before is not None:
            os.environ["THINWIRE_MERGE"] = before


def in_processes(group: dist.ProcessGroup, cells: list[Cell], folder: str) -> list[Digests]:
    """This rank's digests of all cells of a group's size."""
    found = []
    for cell in cells:
        scene = SCENES[cell.scene]
        with _quiet(scene.merge):
            rank = Wired(group, cell, scene, folder)
            if scene.loads:
                paths = [_saved(folder, cell, number) for number in range(SAVED[scene.loads][0])]
                rank.load(paths, paths[0])
            found.append(train(rank, cell, dist.get_rank(group)))
    return found


def save(group: dist.ProcessGroup, cells: list[Cell], folder: str) -> None:
    """Train the cells' methods on the ranks that save, for the cells that load."""
    number = dist.get_rank(group)
    for cell in cells:
        size, hierarchy = SAVED[SCENES[cell.scene].loads]
        assert dist.get_world_size(group) == size
        with _quiet("none"):
            scene = Scene(hierarchy=hierarchy)
            rank = Wired(group, Cell(cell.method, cell.optimizer, size, "many"), scene, folder)
            for step in range(SAVED_AFTER):
                rank.optimizer.zero_grad()
                rank.backward(_gradients(scene, number, step), True)
                rank.step()
            rank.save(_saved(folder, cell, number))
            rank.wire.detach()


def _saved(folder: str, cell: Cell, number: int) -> Path:
    return Path(folder) / short([repr((cell.method, cell.optimizer, SCENES[cell.scene].loads, number)).encode()], 16)


def in_threads(group: dist.ProcessGroup, cells: list[Cell]) -> dict[str, list[Digests]]:
    """All ranks' digests of this process's share of the cells."""
    own = cells[dist.get_rank(group) :: dist.get_world_size(group)]
    with _quiet("none"):
        return {cell.key: on_threads(cell) for cell in own}


def recorded_with(group: dist.ProcessGroup) -> dict[str, str]:
    """What the bits may depend on besides this package."""
    from thinwire.kernels import describe

    return {
        "kernels": describe().partition(";")[0].removeprefix("kernels: on the CPU ").removeprefix("kernels: "),
        "torch": torch.__version__,
        "torch's loops": torch.backends.cpu.get_cpu_capability(),
        "machine": f"{platform.system()} {platform.machine()}",
    }
