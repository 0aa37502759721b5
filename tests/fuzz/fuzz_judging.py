"""Decodes mutants in every kernel backend and judges what came out; see fuzz_frames.py."""

from __future__ import annotations

import re
import resource
import struct
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch
from fuzz_mutations import Mutator, checksum
from fuzz_targets import ORIGIN, Target, make_targets
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from thinwire.codecs import frame as frame_module
from thinwire.errors import FrameError
from thinwire.kernels import reference
from thinwire.kernels.dispatch import CHOSEN, NATIVE, REFERENCE
from thinwire.kernels.native import library

# Torch may make this much of a frame: plain torch turns every bit of a Rice code into an int64, twice.
ALLOCATION_FACTOR, ALLOCATION_FLOOR = 256, 16384
MOST_SEEDS, MOST_FINDINGS = 100, 20
HOST = torch.device("cpu")


class Edges:
    """Pairs of consecutive lines that ran in the codecs and the plain-torch kernels."""

    def __init__(self) -> None:
        codecs = str(Path(frame_module.__file__).parent)
        self._watched = (codecs, *reference.__path__)
        self._codes: dict[CodeType, bool] = {}
        self._last = 0
        self.seen: set[object] = set()

    def _call(self, frame: FrameType, event: str, arg: object) -> Any:
        code = frame.f_code
        watched = self._codes.get(code)
        if watched is None:
            watched = self._codes[code] = code.co_filename.startswith(self._watched)
        return self._line if watched else None

    def _line(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line":
            self.seen.add((frame.f_code, self._last, frame.f_lineno))
            self._last = frame.f_lineno
        return self._line

    @contextmanager
    def watching(self) -> Iterator[set[object]]:
        self.seen, self._last, before = set(), 0, sys.gettrace()
        sys.settrace(self._call)
        try:
            yield self.seen
        finally:
            sys.settrace(before)


class Allocations(TorchDispatchMode):
    """The largest piece of memory behind any tensor that an operator returned."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return result


def backends() -> list[str]:
    return [REFERENCE, NATIVE] if library.handle() is not None else [REFERENCE]


@contextmanager
def backend(name: str) -> Iterator[None]:
    """All host kernels from this backend."""
    before = CHOSEN[HOST]
    CHOSEN[HOST] = name
    try:
        yield
    finally:
        CHOSEN[HOST] = before


@dataclass
class Tally:
    frames: int = 0
    refused: int = 0
    read: int = 0


@dataclass
class Report:
    """What a run saw; ``findings`` is empty when everything held."""

    tallies: dict[str, Tally] = field(default_factory=dict)
    mutations: Counter[str] = field(default_factory=Counter)
    sealed: int = 0
    features: int = 0
    seeds_kept: int = 0
    sentences: set[str] = field(default_factory=set)
    largest_ratio: float = 0.0  # largest single allocation, in lengths of its frame, of frames of 1 KiB and more
    largest_allocation: int = 0
    findings: list[dict[str, Any]] = field(default_factory=list)
    cpu_seconds: float = 0.0
    grown_kib: int = 0

    @property
    def frames(self) -> int:
        return sum(tally.frames for tally in self.tallies.values())

    def add(self, other: Report) -> None:
        for kind, tally in other.tallies.items():
            mine = self.tallies.setdefault(kind, Tally())
            mine.frames, mine.refused, mine.read = (
                mine.frames + tally.frames, mine.refused + tally.refused, mine.read + tally.read,
            )  # fmt: skip
        self.mutations += other.mutations
        self.sealed += other.sealed
        self.features = max(self.features, other.features)
        self.seeds_kept += other.seeds_kept
        self.sentences |= other.sentences
        self.largest_ratio = max(self.largest_ratio, other.largest_ratio)
        self.largest_allocation = max(self.largest_allocation, other.largest_allocation)
        self.findings += other.findings
        self.cpu_seconds += other.cpu_seconds
        self.grown_kib = max(self.grown_kib, other.grown_kib)


_NUMBERS = re.compile(r"\d+|b'.*'|b\".*\"")


class Fuzzer:
    """Mutates, decodes in every backend, and judges; ``note`` is told about every frame before it is decoded."""

    def __init__(self, seed: int | str, note: Callable[[int, str, bytes], None] | None = None) -> None:
        self.mutator, self.targets, self.note = Mutator(seed), make_targets(), note
        self.edges, self.backends, self.report = Edges(), backends(), Report()
        self.started_seeds = sum(len(target.seeds) for target in self.targets)

    def run(self, frames: int, seconds: float = float("inf")) -> Report:
        begin, cpu_begin, report = time.monotonic(), time.process_time(), self.report
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for target in self.targets:  # what is known before anything was changed
            for seed in target.seeds:
                self._attempt(target, seed, self.backends[0], trace=True)
        for number in range(frames):
            if number % 64 == 0 and (time.monotonic() - begin > seconds or len(report.findings) >= MOST_FINDINGS):
                break
            self._one(number)
        report.cpu_seconds = time.process_time() - cpu_begin
        report.grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
        report.features = len(set().union(*(target.features for target in self.targets)))
        report.seeds_kept = sum(len(target.seeds) for target in self.targets) - self.started_seeds
        return report

    def _one(self, number: int) -> None:
        numbers, report = self.mutator.random, self.report
        target = self.targets[number % len(self.targets)]
        parent, other = numbers.choice(target.seeds), numbers.choice(numbers.choice(self.targets).seeds)
        data, changes, sealed = self.mutator(parent, other)
        if self.note is not None:
            self.note(number, target.kind, data)
        report.mutations.update(changes)
        report.sealed += sealed
        tally = report.tallies.setdefault(target.kind, Tally())
        tally.frames += 1
        outcomes = [
            self._attempt(target, data, name, trace=name == REFERENCE, weigh=number % 16 == 0) for name in self.backends
        ]
        if any(outcome is None for outcome in outcomes):
            return
        first = outcomes[0]
        assert first is not None
        if isinstance(first, str):
            tally.refused += 1
        else:
            tally.read += 1
            if checksum(data) != struct.unpack_from("<I", data, 32)[0]:
                self._finding(target, data, self.backends[0], "a frame with a wrong checksum was read")
        for name, outcome in zip(self.backends[1:], outcomes[1:], strict=True):
            if not _same(first, outcome):
                self._finding(target, data, name, f"the backends differ: {_brief(first)} and {_brief(outcome)}")

    def _attempt(
        self, target: Target, data: bytes, name: str, *, trace: bool = False, weigh: bool = False
    ) -> str | list[Tensor] | None:
        """The sentence of a refusal or what was read; None after a finding."""
        frame = self._tensor(data)
        weight = Allocations()
        outcome: str | list[Tensor]
        seen: set[object] = set()
        try:
            with backend(name):
                try:
                    if weigh:
                        with weight:
                            payload, tail, alarm = target.decode(frame)
                    elif trace:
                        with self.edges.watching() as seen:
                            payload, tail, alarm = target.decode(frame)
                    else:
                        payload, tail, alarm = target.decode(frame)
                    target.use(payload, tail)
                    outcome = [*_tensors(payload), tail, torch.tensor(alarm)]
                except FrameError as error:
                    outcome = str(error)
        except Exception:
            self._finding(target, data, name, traceback.format_exc(limit=-3))
            return None
        if isinstance(outcome, str):
            head, _, what = outcome.partition(": ")
            if head != f"bad frame from {ORIGIN}" or not what or "\n" in what or ". " in what or len(what) > 160:
                self._finding(target, data, name, f"not one sentence: {outcome!r}")
            kind = _NUMBERS.sub("#", what)
            self.report.sentences.add(kind)
            seen.add(kind)
        if weigh:
            self._weigh(target, data, name, weight.largest)
        if bytes(frame.numpy()) != data:
            self._finding(target, data, name, "decoding changed the frame")
        if trace and not seen <= target.features:
            target.features |= seen
            if data not in target.seeds and len(data) < 8192:
                if len(target.seeds) >= MOST_SEEDS:
                    target.seeds.pop(self.mutator.random.randrange(1, len(target.seeds)))
                target.seeds.append(data)
        return outcome

    def _tensor(self, data: bytes) -> Tensor:
        """A block of exactly this length; sometimes, as in a gathered buffer, anywhere inside a larger one."""
        frame = torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy()).clone()
        words, shift = divmod(len(data) // 4, 4)
        if words % 4 == 1:  # a view
            larger = torch.full((len(data) + shift,), 0xAA, dtype=torch.uint8)
            larger[shift:] = frame
            return larger[shift:]
        if words % 4 == 2:  # memory that somebody else's allocator aligned
            foreign = np.full(len(data) + shift, 0xAA, dtype=np.uint8)
            foreign[shift:] = frame.numpy()
            return torch.from_numpy(foreign[shift:])
        return frame

    def _weigh(self, target: Target, data: bytes, name: str, largest: int) -> None:
        self.report.largest_allocation = max(self.report.largest_allocation, largest)
        if len(data) >= 1024:
            self.report.largest_ratio = max(self.report.largest_ratio, largest / len(data))
        if largest > ALLOCATION_FLOOR + ALLOCATION_FACTOR * len(data):
            self._finding(target, data, name, f"{largest} bytes were allocated for a frame of {len(data)}")

    def _finding(self, target: Target, data: bytes, name: str, what: str) -> None:
        self.report.findings.append(
            {"decoder": target.kind, "numel": target.numel, "backend": name, "what": what, "frame": data.hex()}
        )


def _tensors(payload: Any) -> list[Tensor]:
    if isinstance(payload, Tensor):
        return [payload]
    return [value for value in vars(payload).values() if isinstance(value, Tensor)]


def _same(a: str | list[Tensor] | None, b: str | list[Tensor] | None) -> bool:
    if isinstance(a, str) or isinstance(b, str) or a is None or b is None:
        return isinstance(a, str) and a == b
    return all(
        x.shape == y.shape and x.dtype == y.dtype and x.numpy().tobytes() == y.numpy().tobytes()
        for x, y in zip(a, b, strict=True)
    )


def _brief(outcome: str | list[Tensor] | None) -> str:
    return outcome if isinstance(outcome, str) else "read"
