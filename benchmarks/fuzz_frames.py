"""Mutated frames against every decoder, in both kernel homes; native kernels under sanitizers; the checksum's cost.

    python benchmarks/fuzz_frames.py --frames 1000000 --json benchmarks/results/fuzz_frames.json
    python benchmarks/fuzz_frames.py --native --frames 1000000
    python benchmarks/fuzz_frames.py --sanitize --frames 1000000
    python benchmarks/fuzz_frames.py --checksum

A mutated frame must either be refused with one FrameError of one sentence, or be read as something whose invariants
hold; both homes must say the same. Any other exception, a crash, a hang, an allocation far beyond the frame's length or
a changed input is a finding: it is printed with the frame and the exit status is 1. Mutants that reach a new pair of
consecutive lines of the codecs, or a new sentence, become seeds. The same seed gives the same frames.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import multiprocessing
import os
import random
import re
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)] if str(ROOT) not in sys.path else []

from thinwire import kernels  # noqa: E402
from thinwire.bench.rows import commit, hardware, percentiles, today  # noqa: E402
from thinwire.codecs import FloatsCodec, LevelsCodec, SignsCodec, SparseCodec, TernaryCodec  # noqa: E402
from thinwire.codecs import frame as frame_module  # noqa: E402
from thinwire.codecs.indices import INDEX_CODES  # noqa: E402
from thinwire.codecs.values import VALUE_CODES  # noqa: E402
from thinwire.errors import FrameError  # noqa: E402
from thinwire.kernels import cpu, reference  # noqa: E402
from thinwire.layout import Hyper, Layout, Turn  # noqa: E402
from thinwire.payloads import Signs, Sparse, Ternary  # noqa: E402

CPU = torch.device("cpu")
STEP, ORIGIN = 7, "rank 3"
START = frame_module.HEADER_NBYTES
FIELDS = {  # offset and length in the header
    "magic": (0, 2), "version": (2, 1), "kind": (3, 1), "numel": (4, 4), "count": (8, 4), "index": (12, 1),
    "value": (13, 1), "parameter": (14, 1), "flags": (15, 1), "tail": (16, 4), "layout": (20, 4), "step": (24, 4),
    "body": (28, 4), "checksum": (32, 4),
}  # fmt: skip
FREE_FIELDS = (
    "count",
    "index",
    "value",
    "parameter",
    "flags",
    "body",
)  # the receiver has no number of its own to compare
# Torch may make this much of a frame: plain torch turns every bit of a Rice code into an int64, twice.
ALLOCATION_FACTOR, ALLOCATION_FLOOR = 256, 16384
ADDRESS_SPACE_SLACK = 256 << 20
HANG_SECONDS = 120
MOST_SEEDS, MOST_FINDINGS = 100, 20


# ------------------------------------------------------------------------------------------------------------- targets


@dataclass
class Target:
    """One decoder with what its receiver expects; ``use`` checks whatever was read and lets the kernels loose on it."""

    kind: str
    numel: int
    decode: Callable[[Tensor], tuple[Any, Tensor]]
    use: Callable[[Any, Tensor], None]
    seeds: list[bytes]
    features: set[object] = field(default_factory=set)


def _turn(numel: int, tail: int) -> Turn:
    return Turn(Layout.of([("w", 0, numel, True), ("b", 1, tail, False)]), STEP, (Hyper(), Hyper()))


def _must(ok: bool, what: str) -> None:
    if not ok:
        raise AssertionError(what)


def _sparse_target(values: str, indices: str, numel: int, k: int, tail: int) -> Target:
    codec, turn, generator = SparseCodec(values, indices), _turn(numel, tail), torch.Generator().manual_seed(numel)
    seeds = []
    for count in {0, k // 2, k}:
        chosen = torch.randint(0, numel, (count,), generator=generator).unique()
        payload = Sparse(chosen, torch.randn(chosen.numel(), generator=generator), numel, k)
        seeds.append(bytes(codec.encode(turn, payload, torch.randn(tail, generator=generator)).tolist()))
    parts = [torch.zeros(n) for n in (numel // 3, 0, numel - numel // 3)] if numel <= 1 << 20 else []
    starts = [0, numel // 3, numel // 3]

    def use(payload: Sparse, rest: Tensor) -> None:
        chosen, count = payload.indices, payload.indices.numel()
        _must(chosen.dtype == torch.int64 and payload.values.dtype == torch.float32, "types of a sparse payload")
        _must(payload.values.shape == (count,) and count <= k, f"{count} indices, {payload.values.shape} values")
        _must(bool((chosen[1:] > chosen[:-1]).all()), "indices that do not rise")
        _must(count == 0 or (int(chosen[0]) >= 0 and int(chosen[-1]) < numel), "indices out of range")
        _must(rest.shape == (tail,), f"a tail of {rest.shape}")
        if parts:
            kernels.scatter_add(parts, starts, [(chosen, payload.values)], 0.5)

    return Target(
        f"sparse {values} {indices}", numel,
        lambda frame: codec.decode(turn, frame, numel, k, tail, CPU, ORIGIN), use, seeds,
    )  # fmt: skip


def _other_targets(blocks: kernels.Runs, tail: int, ranks: int) -> Iterator[Target]:
    numel = sum(length * count for length, count in blocks)
    num_blocks = sum(count for _, count in blocks)
    turn, generator = _turn(numel, tail), torch.Generator().manual_seed(numel)
    negative = torch.rand(numel, generator=generator) < 0.5
    trits = torch.randint(-1, 2, (numel,), generator=generator).to(torch.int8)
    levels = torch.randint(-ranks, ranks + 1, (numel,), generator=generator)
    floats, rest = torch.randn(numel, generator=generator), torch.randn(tail, generator=generator)
    scales, none = torch.rand(num_blocks, generator=generator), torch.zeros(0)
    out = torch.zeros(numel)

    def is_signs(payload: Signs, rest: Tensor) -> None:
        _must(payload.negative.shape == (numel,) and payload.negative.dtype == torch.bool, "sign bits")
        _must(rest.shape == (tail,), f"a tail of {rest.shape}")
        if payload.scales.numel():
            _must(payload.scales.shape == (num_blocks,), f"scales of {payload.scales.shape}")
            payload.add_to(out)

    def is_trits(payload: Ternary, rest: Tensor) -> None:
        _must(payload.trits.shape == (numel,) and payload.trits.dtype == torch.int8, "trits")
        _must(not numel or int(payload.trits.abs().max()) <= 1, "a trit that is none")
        _must(payload.scales.shape == (num_blocks,) and rest.shape == (tail,), "scales or tail")
        payload.add_to(out)

    def is_levels(payload: Tensor, rest: Tensor) -> None:
        _must(payload.shape == (numel,) and rest.shape == (tail,), f"levels of {payload.shape}")
        _must(not numel or float(payload.abs().max()) <= ranks, "a level out of range")

    def is_floats(payload: Tensor, rest: Tensor) -> None:
        _must(payload.shape == (numel,) and payload.dtype == torch.float32, f"values of {payload.shape}")
        _must(rest.shape == (tail,), f"a tail of {rest.shape}")

    signs, ternary, level, dense = SignsCodec(), TernaryCodec(), LevelsCodec(), FloatsCodec()
    nbytes = level.nbytes(numel, ranks, tail) + 8  # answers of shards are as long as the longest
    summed = [kernels.pack_trits((levels.sign() * (levels.abs() > rank)).to(torch.int8)) for rank in range(ranks)]

    def read_levels(frame: Tensor) -> tuple[Tensor, Tensor]:  # with a scale of N the mean is the sum, exactly
        part = torch.empty(numel)
        return part, level.decode_mean(turn, frame, ranks, tail, [part], torch.tensor([float(ranks)]), ORIGIN)

    given = Ternary.of(trits, scales, blocks)
    for kind, decode, use, seed in (
        ("signs", lambda frame: signs.decode(turn, frame, blocks, num_blocks, tail, CPU, ORIGIN), is_signs,
         signs.encode(turn, Signs(negative, scales, blocks), rest)),
        ("votes", lambda frame: signs.decode(turn, frame, blocks, 0, tail, CPU, ORIGIN), is_signs,
         signs.encode(turn, Signs(negative, none, blocks), rest)),
        ("ternary", lambda frame: ternary.decode(turn, frame, blocks, None, tail, CPU, ORIGIN), is_trits,
         ternary.encode(turn, given, rest, with_scales=True)),
        ("ternary shared", lambda frame: ternary.decode(turn, frame, blocks, scales, tail, CPU, ORIGIN), is_trits,
         ternary.encode(turn, given, rest, with_scales=False)),
        ("levels", read_levels, is_levels, level.encode_sums(turn, summed, numel, rest, nbytes)),
        ("dense", lambda frame: dense.decode(turn, frame, numel, tail, CPU, ORIGIN), is_floats,
         dense.encode(turn, floats, rest)),
    ):  # fmt: skip
        yield Target(kind, numel, decode, use, [bytes(seed.tolist())])


def make_targets() -> list[Target]:
    """Every decoder in a few sizes: none, one, a few, more than one int8 chunk, and numbers near the format's ends."""
    shapes = [(1, 1, 0), (70_000, 4, 1), (200_000, 40, 3), (3000, 300, 0), (2**31 - 1, 3, 1)]
    targets = [
        _sparse_target(values, indices, *shape) for shape in shapes for values in VALUE_CODES for indices in INDEX_CODES
    ]
    for blocks, tail, ranks in (
        (((8, 1), (3, 1)), 1, 3), (((64, 15), (43, 1)), 0, 100), (((1, 1),), 2, 1), ((), 3, 2), (((5, 8),), 0, 8),
    ):  # fmt: skip
        targets += _other_targets(blocks, tail, ranks)
    return targets


# ----------------------------------------------------------------------------------------------------------- mutations

_WORDS = [0, 1, 2, 3, 4, 7, 8, 255, 256, 257, 65534, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1]
_POSITIONS = np.arange(1 << 16, dtype=np.uint32)


def _mix(x: np.ndarray) -> np.ndarray:  # (n,) uint32
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)


_MIXED = _mix(_POSITIONS)


def checksum(data: bytes | bytearray) -> int:
    """The checksum of a frame of a multiple of four bytes, from docs/wire-format.md alone."""
    words = np.frombuffer(data, dtype="<u4")
    words = np.concatenate([words[:8], words[9:]])
    return int(_mix(words ^ _MIXED[: words.size]).sum(dtype=np.uint32))


class Mutator:
    """Makes a bad frame of a good one."""

    def __init__(self, seed: int | str) -> None:
        self.random = random.Random(seed)
        self.changes: dict[str, Callable[[bytearray, bytes], None]] = {
            "bits": self._flip,
            "bytes": self._bytes,
            "words": self._words,
            "header": self._header,
            "cut": self._cut,
            "longer": self._longer,
            "splice": self._splice,
            "swap": self._swap,
            "random body": self._random_body,
        }
        self.names = list(self.changes)

    def __call__(self, parent: bytes, other: bytes) -> tuple[bytes, list[str], bool]:
        """Return the mutant, what was done to it, and whether its checksum was made right again."""
        numbers, out, done = self.random, bytearray(parent), []
        for _ in range(numbers.choice((1, 1, 1, 2, 2, 3, 5))):
            name = numbers.choice(self.names)
            self.changes[name](out, other)
            done.append(name)
        if numbers.random() < 0.9:  # otherwise the length alone would end most of them
            out += bytes(-len(out) % 4)
        if len(out) >= START and numbers.random() < 0.5:  # a body that fits: the sections are reached
            body = struct.unpack_from("<I", out, 28)[0]
            if body > len(out) - START or numbers.random() < 0.2:
                struct.pack_into("<I", out, 28, len(out) - START & ~3)
        seal = len(out) >= START and len(out) % 4 == 0 and numbers.random() < 0.85
        if seal:
            struct.pack_into("<I", out, 32, checksum(out))
        return bytes(out), done, seal

    def _place(self, out: bytearray) -> int:
        """Mostly in the body: nearly every change of the header is refused by its first comparison."""
        if len(out) > START and self.random.random() < 0.9:
            return self.random.randrange(START, len(out))
        return self.random.randrange(len(out)) if out else 0

    def _flip(self, out: bytearray, other: bytes) -> None:
        for _ in range(self.random.choice((1, 1, 2, 8))):
            if out:
                out[self._place(out)] ^= 1 << self.random.randrange(8)

    def _bytes(self, out: bytearray, other: bytes) -> None:
        for _ in range(self.random.choice((1, 1, 2, 4))):
            if out:
                out[self._place(out)] = self.random.choice((0, 1, 127, 128, 242, 243, 255, self.random.randrange(256)))

    def _words(self, out: bytearray, other: bytes) -> None:
        at, size = self._place(out) & ~1, self.random.choice((2, 4, 4))
        word = self.random.choice(_WORDS) if self.random.random() < 0.7 else self.random.getrandbits(32)
        if len(out) >= at + size:
            out[at : at + size] = (word & (1 << 8 * size) - 1).to_bytes(size, "little")

    def _header(self, out: bytearray, other: bytes) -> None:
        names = FREE_FIELDS if self.random.random() < 0.8 else tuple(FIELDS)
        at, size = FIELDS[self.random.choice(names)]
        if len(out) < at + size:
            return
        old = int.from_bytes(out[at : at + size], "little")
        new = self.random.choice(
            (old + 1, old - 1, old + 4, old - 4, old // 2, self.random.choice(_WORDS), self.random.randrange(40),
             self.random.getrandbits(8 * size))
        )  # fmt: skip
        out[at : at + size] = (new & (1 << 8 * size) - 1).to_bytes(size, "little")

    def _cut(self, out: bytearray, other: bytes) -> None:
        del out[self._place(out) & (~3 if self.random.random() < 0.8 else ~0) :]

    def _longer(self, out: bytearray, other: bytes) -> None:
        nbytes = self.random.choice((1, 4, 4, 8, 64, 512))
        out += bytes(nbytes) if self.random.random() < 0.5 else self.random.randbytes(nbytes)

    def _splice(self, out: bytearray, other: bytes) -> None:
        """A stretch of another frame over or between the bytes of this one, at boundaries of sections."""
        if len(other) <= START or not out:
            return
        begin = self.random.randrange(START, len(other)) & ~3
        piece = other[begin : begin + 4 * self.random.randrange(1, 33)]
        at = self._place(out) & ~3
        out[at : at + (len(piece) if self.random.random() < 0.7 else 0)] = piece

    def _swap(self, out: bytearray, other: bytes) -> None:
        a, b = self._place(out) & ~3, self._place(out) & ~3
        if len(out) >= max(a, b) + 4:
            out[a : a + 4], out[b : b + 4] = out[b : b + 4], out[a : a + 4]

    def _random_body(self, out: bytearray, other: bytes) -> None:
        del out[START:]
        nbytes = 4 * self.random.randrange(self.random.choice((4, 32, 128)))
        out += self.random.randbytes(nbytes) if self.random.random() < 0.7 else self._sparse_bits(nbytes)
        if len(out) >= START:
            struct.pack_into("<I", out, 28, nbytes)

    def _sparse_bits(self, nbytes: int) -> bytes:
        """Mostly zeros: long runs in unary codes, small numbers elsewhere."""
        body = bytearray(nbytes)
        for _ in range(self.random.randrange(1, 9) if nbytes else 0):
            body[self.random.randrange(nbytes)] |= 1 << self.random.randrange(8)
        return bytes(body)


# ------------------------------------------------------------------------------------------------------------- judging


class Edges:
    """Pairs of consecutive lines that ran in the codecs and the plain-torch kernels."""

    def __init__(self) -> None:
        folder = str(Path(frame_module.__file__).parent)
        self._watched = (folder, str(reference.__file__))
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


def homes() -> list[ModuleType]:
    return [reference, cpu] if cpu.library() is not None else [reference]


@contextmanager
def home(module: ModuleType) -> Iterator[None]:
    """All host kernels from this home."""
    before = kernels._kernels
    kernels._kernels = lambda device_type: module  # type: ignore[assignment]
    try:
        yield
    finally:
        kernels._kernels = before


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
    """Mutates, decodes in every home, and judges; ``note`` is told about every frame before it is decoded."""

    def __init__(self, seed: int | str, note: Callable[[int, str, bytes], None] | None = None) -> None:
        self.mutator, self.targets, self.note = Mutator(seed), make_targets(), note
        self.edges, self.homes, self.report = Edges(), homes(), Report()
        self.started_seeds = sum(len(target.seeds) for target in self.targets)

    def run(self, frames: int, seconds: float = float("inf")) -> Report:
        begin, cpu_begin, report = time.monotonic(), time.process_time(), self.report
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for target in self.targets:  # what is known before anything was changed
            for seed in target.seeds:
                self._attempt(target, seed, self.homes[0], trace=True)
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
            self._attempt(target, data, module, trace=module is reference, weigh=number % 16 == 0)
            for module in self.homes
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
                self._finding(target, data, self.homes[0], "a frame with a wrong checksum was read")
        for module, outcome in zip(self.homes[1:], outcomes[1:], strict=True):
            if not _same(first, outcome):
                self._finding(target, data, module, f"the homes differ: {_brief(first)} and {_brief(outcome)}")

    def _attempt(
        self, target: Target, data: bytes, module: ModuleType, *, trace: bool = False, weigh: bool = False
    ) -> str | list[Tensor] | None:
        """The sentence of a refusal or what was read; None after a finding."""
        frame = self._tensor(data)
        weight = Allocations()
        outcome: str | list[Tensor]
        seen: set[object] = set()
        try:
            with home(module):
                try:
                    if weigh:
                        with weight:
                            payload, tail = target.decode(frame)
                    elif trace:
                        with self.edges.watching() as seen:
                            payload, tail = target.decode(frame)
                    else:
                        payload, tail = target.decode(frame)
                    target.use(payload, tail)
                    outcome = [*_tensors(payload), tail]
                except FrameError as error:
                    outcome = str(error)
        except Exception:
            self._finding(target, data, module, traceback.format_exc(limit=-3))
            return None
        if isinstance(outcome, str):
            head, _, what = outcome.partition(": ")
            if head != f"bad frame from {ORIGIN}" or not what or "\n" in what or ". " in what or len(what) > 160:
                self._finding(target, data, module, f"not one sentence: {outcome!r}")
            kind = _NUMBERS.sub("#", what)
            self.report.sentences.add(kind)
            seen.add(kind)
        if weigh:
            self._weigh(target, data, module, weight.largest)
        if bytes(frame.numpy()) != data:
            self._finding(target, data, module, "decoding changed the frame")
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

    def _weigh(self, target: Target, data: bytes, module: ModuleType, largest: int) -> None:
        self.report.largest_allocation = max(self.report.largest_allocation, largest)
        if len(data) >= 1024:
            self.report.largest_ratio = max(self.report.largest_ratio, largest / len(data))
        if largest > ALLOCATION_FLOOR + ALLOCATION_FACTOR * len(data):
            self._finding(target, data, module, f"{largest} bytes were allocated for a frame of {len(data)}")

    def _finding(self, target: Target, data: bytes, module: ModuleType, what: str) -> None:
        where = module.__name__.rpartition(".")[2]
        self.report.findings.append(
            {"decoder": target.kind, "numel": target.numel, "home": where, "what": what, "frame": data.hex()}
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


# ------------------------------------------------------------------------------------------------------------- workers

_NOTE = struct.Struct("<Q32sI")


def _work(worker: int, seed: int, frames: int, seconds: float, notes: str, library: str, out: Connection) -> None:
    torch.set_num_threads(1)
    with open(notes, "r+b") as file:
        shared = mmap.mmap(file.fileno(), 0)

    def note(number: int, kind: str, data: bytes) -> None:
        shared[: _NOTE.size] = _NOTE.pack(number, kind.encode(), len(data))
        shared[_NOTE.size : _NOTE.size + len(data)] = data

    if library:
        _load(library)
    fuzzer = Fuzzer(f"{seed}/{worker}", note)
    fuzzer.run(min(frames, 256))  # everything is loaded and warm before the limit
    if not library:  # AddressSanitizer reserves terabytes of addresses
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + ADDRESS_SPACE_SLACK
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    out.send(fuzzer.run(frames - min(frames, 256), seconds))


def _load(path: str) -> None:
    """Use this build of the native library."""
    loaded = ctypes.CDLL(path)
    for name, (result, arguments) in cpu._SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    cpu.library = lambda: loaded  # type: ignore[assignment]


def _watch(process: Any, notes: Path, inbox: Connection) -> Report:
    """Wait for one worker; a crash or a hang becomes a finding with the frame that was being decoded."""
    last, since = b"", time.monotonic()
    while not inbox.poll(1.0):
        current = notes.read_bytes()
        if current != last:
            last, since = current, time.monotonic()
        if time.monotonic() - since > HANG_SECONDS:
            process.kill()
            process.join()
            return _accident(notes, f"no progress for {HANG_SECONDS} s")
    try:
        report: Report = inbox.recv()
    except EOFError:
        process.join()
        return _accident(notes, f"the process ended with status {process.exitcode}")
    process.join()
    return report


def _accident(notes: Path, what: str) -> Report:
    written = notes.read_bytes()
    number, kind, nbytes = _NOTE.unpack_from(written)
    name, frame = kind.rstrip(b"\0").decode(), written[_NOTE.size : _NOTE.size + nbytes].hex()
    finding = {"decoder": name, "home": "?", "what": f"{what} at frame {number}", "frame": frame}
    return Report({name: Tally(number, 0, 0)}, findings=[finding])


def fuzz(frames: int, seed: int, seconds: float, workers: int, library: str = "") -> Report:
    """Spread the frames over processes and add up what they saw."""
    context, total, running = multiprocessing.get_context("spawn"), Report(), []
    with tempfile.TemporaryDirectory(prefix="thinwire-fuzz-") as folder:
        for worker in range(workers):
            notes = Path(folder) / f"{worker}"
            notes.write_bytes(bytes(1 << 16))
            inbox, outbox = context.Pipe(duplex=False)
            share = frames // workers + (worker < frames % workers)
            process = context.Process(target=_work, args=(worker, seed, share, seconds, str(notes), library, outbox))
            process.start()
            outbox.close()
            running.append((process, notes, inbox))
        for process, notes, inbox in running:
            total.add(_watch(process, notes, inbox))
    return total


# -------------------------------------------------------------------------------------------------- native, sanitizers

SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
COMMON = ("-O1", "-g1", "-std=c++17", "-ffp-contract=off", "-Wall", "-Wextra")
SOURCES = ("pack", "accumulate", "quantize", "select", "ternary", "lists", "server")


def compiler() -> str | None:
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")


def _compile(arguments: Sequence[str]) -> None:
    done = subprocess.run([compiler() or "c++", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip())


def why_no_sanitizers(folder: Path) -> str | None:
    """One sentence when programs with sanitizers cannot be built or run here."""
    if compiler() is None:
        return "there is no C++ compiler"
    source, program = folder / "probe.cpp", folder / "probe"
    source.write_text("int main() { return 0; }\n")
    try:
        _compile([*SANITIZERS, str(source), "-o", str(program)])
        subprocess.run([program], check=True, capture_output=True)
    except (RuntimeError, subprocess.CalledProcessError) as error:
        return f"the compiler has no AddressSanitizer and UBSan runtime ({str(error).splitlines()[0]})"
    return None


def build_native(folder: Path) -> Path:
    """native/fuzz.cpp and the library's sources with sanitizers; the latter also tell which edges they took."""
    objects = []
    for name in SOURCES:
        objects.append(str(folder / f"{name}.o"))
        coverage = ["-fsanitize-coverage=trace-pc", "-c", str(ROOT / "native" / f"{name}.cpp"), "-o", objects[-1]]
        _compile([*COMMON, *SANITIZERS, "-fno-pie", *coverage])
    program = folder / "fuzz"
    fuzz_source = str(ROOT / "native" / "fuzz.cpp")
    _compile([*COMMON, *SANITIZERS, "-fno-pie", "-no-pie", fuzz_source, *objects, "-pthread", "-o", str(program)])
    return program


def run_native(program: Path, inputs: int, seed: int, seconds: float) -> dict[str, Any]:
    """Run it; what a sanitizer or a comparison found is raised."""
    limit = str(min(seconds, 1e9))
    done = subprocess.run([program, str(inputs), str(seed), limit], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"native/fuzz.cpp, seed {seed}, ended with {done.returncode}:\n{done.stderr}")
    return dict(json.loads(done.stdout))


def build_sanitized_library(folder: Path) -> tuple[Path, str]:
    """The native library with sanitizers, and the runtime that must be loaded before it."""
    library = folder / "_native.so"
    sources = [str(ROOT / "native" / f"{name}.cpp") for name in SOURCES]
    _compile([*COMMON, *SANITIZERS, "-fPIC", "-shared", *sources, "-pthread", "-o", str(library)])
    where = [
        subprocess.run([compiler() or "c++", f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    return library, ":".join(where)


# ------------------------------------------------------------------------------------------------------------ checksum

RESNET50 = 25_557_032


def checksum_costs(numel: int, repeats: int) -> list[dict[str, Any]]:
    """Milliseconds of the checksum beside those of choosing, encoding and decoding, for a DGC and a BlockSign frame.

    Processor time of one thread: with two, on a machine that others use, torch's threads wait for each other, and that
    (up to 200 ms a call) is all that one sees.
    """
    x, none, k = torch.randn(numel, generator=torch.Generator().manual_seed(0)), torch.zeros(0), round(numel / 1000)
    turn, blocks = Turn(Layout.of([("w", 0, numel, True)]), STEP, (Hyper(),)), ((numel, 1),)
    sparse, signs, rows = SparseCodec(), SignsCodec(), []

    def chosen() -> Sparse:
        indices = kernels.select_topk(x, k)
        return Sparse(indices, x[indices], numel, k)

    def signed() -> Signs:
        return Signs(*kernels.blockwise_sign(x, blocks), blocks)

    def decode_sparse(frame: Tensor) -> object:
        return sparse.decode(turn, frame, numel, k, 0, CPU, ORIGIN)

    def decode_signs(frame: Tensor) -> object:
        return signs.decode(turn, frame, blocks, 1, 0, CPU, ORIGIN)

    works: list[tuple[str, Callable[[], Any], Callable[[Any], Tensor], Callable[[Tensor], object]]] = [
        ("DGC 0.1 %, fp32 rice", chosen, lambda payload: sparse.encode(turn, payload, none), decode_sparse),
        ("BlockSign", signed, lambda payload: signs.encode(turn, payload, none), decode_signs),
    ]
    for module in homes():
        with home(module):
            for name, choose, encode, decode in works:
                rows.append(_cost(name, module, repeats, choose, encode, decode))
    return rows


def _cost(
    name: str,
    module: ModuleType,
    repeats: int,
    choose: Callable[[], Any],
    encode: Callable[[Any], Tensor],
    decode: Callable[[Tensor], object],
) -> dict[str, Any]:
    payload = choose()
    frame = encode(payload)
    works: dict[str, Callable[[], object]] = {
        "checksum": lambda: frame_module._frame_checksum(frame),
        "choose": choose,
        "encode": lambda: encode(payload),
        "decode": lambda: decode(frame),
    }
    seconds: dict[str, list[float]] = {what: [] for what in works}
    for turn in range(repeats + 2):  # by turns: what else the machine does meets all of them alike
        for what, work in works.items():
            begin = time.thread_time()
            work()
            if turn >= 2:
                seconds[what].append(time.thread_time() - begin)
    row: dict[str, Any] = {"frame": name, "home": module.__name__.rpartition(".")[2], "bytes": frame.numel()}
    for what, times in seconds.items():
        row |= {f"{what}_{p}_ms": round(ms, 4) for p, ms in zip(("p20", "p50", "p80"), percentiles(times), strict=True)}
    # Encoding contains the checksum: where it seems faster, something else was measured.
    row["consistent"] = all(row[f"checksum_{p}_ms"] <= row[f"encode_{p}_ms"] for p in ("p20", "p50"))
    return row


def _print_costs(rows: list[dict[str, Any]]) -> None:
    names = ("checksum", "choose", "encode", "decode")
    print(
        f"{'frame':22} {'home':10} {'bytes':>10} " + " ".join(f"{name:>10}" for name in names) + "  (ms of one thread)"
    )
    for row in rows:
        times = [row[f"{name}_p50_ms"] for name in names]
        doubt = "" if row["consistent"] else "  disturbed: measure again"
        print(
            f"{row['frame']:22} {row['home']:10} {row['bytes']:>10,} " + " ".join(f"{t:>10.3f}" for t in times) + doubt
        )


# ----------------------------------------------------------------------------------------------------------------- main


def _table(report: Report) -> str:
    lines = [f"{'decoder':22} {'frames':>10} {'refused':>10} {'read':>10}"]
    for kind, tally in report.tallies.items():
        lines.append(f"{kind:22} {tally.frames:>10,} {tally.refused:>10,} {tally.read:>10,}")
    total = [sum(getattr(t, name) for t in report.tallies.values()) for name in ("frames", "refused", "read")]
    lines.append(f"{'all':22} " + " ".join(f"{number:>10,}" for number in total))
    return "\n".join(lines)


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--frames", type=int, default=1_000_000, help="how many mutants (default 1,000,000)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same frames (default 0)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--workers", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result to FILE")
    parser.add_argument(
        "--native", action="store_true", help="fuzz the native kernels alone: native/fuzz.cpp, ASan, UBSan"
    )
    parser.add_argument(
        "--sanitize", action="store_true", help="fuzz frames with the native library under ASan and UBSan"
    )
    parser.add_argument("--checksum", action="store_true", help="measure what the checksum costs")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    options = _arguments(given)
    if options.checksum:
        torch.set_num_threads(1)
    facts = {"seed": options.seed, "commit": commit(), "hardware": hardware(CPU), "date": today()}
    if options.checksum:
        rows = checksum_costs(RESNET50, repeats=31)
        _print_costs(rows)
        _write(options.json, {"numel": RESNET50, "repeats": 31, "load": os.getloadavg(), "rows": rows, **facts})
        return 0
    with tempfile.TemporaryDirectory(prefix="thinwire-sanitized-") as name:
        folder, library = Path(name), ""
        if (options.native or options.sanitize) and (reason := why_no_sanitizers(folder)):
            print(f"skipped: {reason}")
            return 0
        if options.native:
            try:
                seen = run_native(build_native(folder), options.frames, options.seed, options.seconds)
            except RuntimeError as error:
                print(error, file=sys.stderr)
                return 1
            print(
                f"{seen['inputs']:,} inputs in {seen['seconds']:.1f} s under ASan and UBSan: {seen['edges']} edges of "
                f"the library reached, {seen['seeds_kept']} seeds, nothing found"
            )
            _write(options.json, {"native": True, **seen, **facts})
            return 0
        if options.sanitize:
            path, runtime = build_sanitized_library(folder)
            library = str(path)
            os.environ["LD_PRELOAD"] = runtime  # of the workers
            os.environ["ASAN_OPTIONS"] = "detect_leaks=0:allocator_may_return_null=1"
        begin = time.monotonic()
        report = fuzz(options.frames, options.seed, options.seconds, options.workers, library)
        seconds = time.monotonic() - begin
    print(_table(report))
    names = " and ".join(module.__name__.rpartition(".")[2] for module in homes())
    print(
        f"{report.frames:,} frames, each in {names}, in {seconds:.0f} s ({report.frames / max(seconds, 1e-9):,.0f}/s, "
        f"{1e6 * report.cpu_seconds / max(report.frames, 1):.0f} us of processor each); {report.sealed:,} with a right "
        f"checksum; {len(report.sentences)} different refusals; {report.features} features, {report.seeds_kept} seeds "
        f"kept; largest allocation {report.largest_allocation:,} B, at most {report.largest_ratio:.0f} times its "
        f"frame; {len(report.findings)} findings"
    )
    for finding in report.findings[:5]:
        print(json.dumps(finding), file=sys.stderr)
    _write(
        options.json,
        {
            "frames": report.frames, "seconds": round(seconds, 1), "frames_a_second": round(report.frames / seconds, 1),
            "cpu_seconds": round(report.cpu_seconds, 1), "workers": options.workers, "homes": names.split(" and "),
            "sanitized": options.sanitize, "sealed": report.sealed, "features": report.features,
            "seeds_kept": report.seeds_kept, "refusals": sorted(report.sentences),
            "largest_allocation": report.largest_allocation, "largest_ratio": round(report.largest_ratio, 1),
            "grown_kib": report.grown_kib, "mutations": dict(report.mutations),
            "decoders": {kind: asdict(tally) for kind, tally in report.tallies.items()},
            "findings": report.findings, **facts,
        },
    )  # fmt: skip
    return 1 if report.findings else 0


def _write(path: Path | None, result: dict[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
