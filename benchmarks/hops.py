"""Counts the function calls that a gradient's exchange takes inside thinwire, in one real DDP step.

    python benchmarks/hops.py [--root CHECKOUT]

Two Gloo ranks train a small model, one bucket, with DGC's defaults on SGD with momentum and weight decay. Rank 0's
fourth backward pass is traced with a profile function in the thread of DDP's hook and in those that touch the gradient.

- A hop is a call of a Python function or lambda whose code lies in thinwire/, the hook's own among them. Properties are
  counted apart, comprehensions and imports not at all, a generator once however often it is resumed.
- The order is that of the path: all of the hook, then the other threads, then the rest of the hook's thread. It is the
  order of time without the accidents of which thread ran first.
- The first arithmetic is the first torch operation on the gradient's memory, or on a copy of it, that is no view, no
  copy and no allocation; or the first address (``Tensor.data_ptr``) that is taken of it for a native kernel. Inside
  ``kernels`` the hop that counts is the call that went in there, not the dispatch behind it.
- The end is where backward() returns: DDP has waited for the means, and the optimizer's step comes next.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[1]
STEPS = 4  # DDP makes its buckets anew before the second, and thresholds are carried over from then on
DRAIN_S = 0.3  # for what a worker still does behind the last future
NO_HOPS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "<module>")
COPIES = ("clone", "copy_", "_to_copy", "cat", "stack")


def count(root: Path = ROOT, timeout_s: float = 240) -> dict[str, Any]:
    """Trace the step with the code of a checkout, in processes of its own."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("THINWIRE_")}
    environment["PYTHONPATH"] = str(root)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--root", str(root), "--meet", folder, "--rank"]
        ranks = [
            subprocess.Popen([*command, str(rank)], cwd=root, env=environment, stderr=subprocess.PIPE, text=True)
            for rank in range(2)
        ]
        try:
            errors = [rank.communicate(timeout=timeout_s)[1] for rank in ranks]
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"the traced step in {root} did not end within {timeout_s:g} s") from None
        finally:
            for rank in ranks:
                rank.kill()
        if any(rank.returncode for rank in ranks):
            raise RuntimeError(f"the traced step failed in {root}:\n" + "\n".join(errors))
        return json.loads((Path(folder) / "hops.json").read_text())


def _storages(value: Any) -> Iterator[int]:
    """The memory of all tensors in a value."""
    if isinstance(value, Tensor):
        yield value.untyped_storage().data_ptr()
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _storages(item)


class Tracer:
    """Remembers the calls inside one package between the hook's entry and the end of its backward pass."""

    def __init__(self, package: Path) -> None:
        self.package = str(package) + os.sep
        self.hook: CodeType | None = None  # set where DDP is given it
        self.armed = False
        self.gradient: set[int] = set()  # where the gradient and its copies lie; empty until the hook is entered
        self.returned_at: int | None = None  # how many calls the hook's thread had made when the hook returned
        self.calls: dict[int, list[FrameType]] = {}  # by thread
        self.touching: set[int] = set()  # threads that had the gradient in their hands
        self.first: tuple[int, int] | None = None  # thread and number of the call that holds the first arithmetic

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if not self.armed or not frame.f_code.co_filename.startswith(self.package):
            return
        if event == "c_call":
            if arg.__name__ == "data_ptr" and self.gradient.intersection(_storages(arg.__self__)):
                self.arithmetic(frame)
        elif event == "return":
            if frame.f_code is self.hook:
                self.returned_at = len(self.calls[threading.get_ident()])
        elif event == "call":
            if frame.f_code is self.hook:
                self.enter(frame)
            if self.gradient:
                self.remember(frame)

    def enter(self, frame: FrameType) -> None:
        if self.gradient:
            raise RuntimeError("more than one bucket came: the model must fit into one")
        bucket = next(value for value in frame.f_locals.values() if isinstance(value, dist.GradBucket))
        self.gradient = set(_storages(bucket.buffer()))

    def remember(self, frame: FrameType) -> None:
        thread = threading.get_ident()
        if thread not in self.calls:
            self.calls[thread] = []
            Operations(self).__enter__()  # for good: the process ends with the step
        if frame.f_code.co_name not in NO_HOPS and not any(frame is other for other in self.calls[thread]):
            self.calls[thread].append(frame)

    def arithmetic(self, frame: FrameType | None) -> None:
        """Called where arithmetic on the gradient begins."""
        thread = threading.get_ident()
        calls = self.calls.get(thread, [])
        stack = []  # from the inside
        while frame is not None:
            if any(frame is call for call in calls):
                stack.append(frame)
            frame = frame.f_back
        if not stack:
            return  # torch's own
        self.touching.add(thread)
        if self.first is None:
            in_kernels = [call for call in stack if "kernels" in re.split(r"[/\\.]", self._name(call).split(":")[0])]
            last = in_kernels[-1] if in_kernels else calls[-1]
            self.first = thread, next(place for place, call in enumerate(calls) if call is last)

    def report(self, hooks_thread: int) -> dict[str, Any]:
        if self.first is None or self.returned_at is None:
            raise RuntimeError("no hook of DDP, or no arithmetic on its gradient, was seen")
        own = self.calls[hooks_thread]
        others = [call for thread in self.touching - {hooks_thread} for call in self.calls[thread]]
        path = [*own[: self.returned_at], *others, *own[self.returned_at :]]
        first = self.calls[self.first[0]][self.first[1]]
        until_first = path[: next(place for place, call in enumerate(path) if call is first) + 1]
        return {
            "to_first_arithmetic": self._counts(until_first),
            "first_arithmetic": self._name(first),
            "to_end": self._counts(path),
            "native_kernels": any(Path(self.package).rglob("*.so")),
            "files": sorted({self._name(call).split(":")[0] for call in path}),
            "path": [self._name(call) + (" (property)" if _is_property(call) else "") for call in path],
        }

    def _counts(self, path: list[FrameType]) -> dict[str, int]:
        hops = [call for call in path if not _is_property(call)]
        return {
            "calls": len(hops),
            "distinct_functions": len({call.f_code for call in hops}),
            "properties": len(path) - len(hops),
        }

    def _name(self, call: FrameType) -> str:
        code = call.f_code
        name = getattr(code, "co_qualname", code.co_name)  # Python 3.10 has the short one alone
        return f"{code.co_filename.removeprefix(self.package)}:{name}"


def _is_property(call: FrameType) -> bool:
    member = inspect.getattr_static(type(call.f_locals.get("self")), call.f_code.co_name, None)
    return isinstance(member, (property, functools.cached_property))


class Operations(TorchDispatchMode):
    """Tells a tracer of torch operations on the gradient, and follows its copies."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gradient = self.tracer.gradient
        touched = bool(gradient.intersection(_storages([*args, *(kwargs or {}).values()])))
        result = func(*args, **(kwargs or {}))
        if not touched:
            return result
        name = func._schema.name.split("::")[-1]
        is_view = not func._schema.is_mutable and gradient.issuperset(_storages(result))
        if name in COPIES or name.startswith("new_") or name.endswith("_like"):
            gradient.update(_storages(result))
        elif not is_view:
            self.tracer.arithmetic(sys._getframe())
        return result


def _train(root: Path, meet: Path, rank: int) -> None:
    """One of the two ranks."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tracer = Tracer(root / "thinwire")
    register = DistributedDataParallel.register_comm_hook

    def registered(self: DistributedDataParallel, state: object, hook: Callable[..., Any]) -> None:
        tracer.hook = getattr(hook, "__func__", hook).__code__
        register(self, state, hook)

    DistributedDataParallel.register_comm_hook = registered  # type: ignore[method-assign]
    threading.setprofile(tracer)  # threads that are started from here on
    import thinwire

    if Path(thinwire.__file__).resolve().parent != root / "thinwire":
        raise RuntimeError(f"thinwire was imported from {thinwire.__file__}, not from {root}")
    dist.init_process_group("gloo", init_method=f"file://{meet / 'store'}", rank=rank, world_size=2)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    thinwire.attach(model, optimizer, thinwire.DGC())
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 32)).square().mean()
        tracer.armed = step == STEPS
        sys.setprofile(tracer if tracer.armed else None)
        loss.backward()
        sys.setprofile(None)
        if step < STEPS:
            optimizer.step()
    time.sleep(DRAIN_S)
    tracer.armed = False
    if rank == 0:
        (meet / "hops.json").write_text(json.dumps(tracer.report(threading.get_ident())))
    dist.barrier()
    os._exit(0)  # the traced frames hold on to everything


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout whose code runs")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meet", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    root = options.root.resolve()
    if options.rank is not None:
        _train(root, options.meet, options.rank)
    else:
        print(json.dumps(count(root), indent=1))


if __name__ == "__main__":
    main()
