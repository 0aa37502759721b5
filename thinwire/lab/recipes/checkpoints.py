"""Checkpoints of a run: every rank keeps its own parts, and a part counts when all ranks have theirs.

A part is written under another name, synced and moved; a mark is put beside it when all ranks have moved theirs. The
one before stays, and those before that go when all ranks have put their marks. Whatever ends a run, on whichever host:
the newest checkpoint that has a mark on every rank can be resumed. Nothing travels between the ranks but the news that
it is done, so hosts need no common disk. A part begins with a line that has the hash of the rest.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from thinwire.transport import TorchNet
from thinwire.transport.groups import gather_texts

FORMAT = 2
MARK = ".done"  # behind a part's name
Place = tuple[int, int]  # which method of the run, and how many steps it has made


class CheckpointError(ValueError):
    """A checkpoint that cannot be written, or none to go on from; one sentence."""


class Checkpoints:
    """The checkpoints in one folder; every method is collective over the default group."""

    def __init__(self, folder: Path, net: TorchNet) -> None:
        self.folder, self.net = folder, net
        self._kept: list[Place] = []  # the one saved or loaded last, and the one before it

    def save(self, place: Place, state: Callable[[], dict[str, Any]]) -> None:
        """Add what ``state`` gives as a checkpoint and keep one before it, on all ranks or on none."""
        path = self._path(place)
        partial, mark, was_there = _partial(path), _mark(path), place in self._kept
        try:
            self._everywhere(path, lambda: _write(partial, *_packed(state())))
            self._everywhere(path, lambda: _move(partial, path))
            self._everywhere(path, lambda: _write(mark))
        except CheckpointError:
            for own in (partial, *(() if was_there else (mark, path))):
                _remove(own)
            raise
        self._kept = [*[old for old in self._kept if old != place][-1:], place]
        self._clean(self._kept)

    def _everywhere(self, path: Path, work: Callable[[], None]) -> None:
        """Do it on all ranks, or raise on all of them what went wrong on the first."""
        trouble = ""
        try:
            work()
        except (OSError, RuntimeError, MemoryError, ValueError) as error:
            trouble = f"the checkpoint '{path}' cannot be written: {_reason(error)}"
        if first := self._first(trouble):
            raise CheckpointError(f"{first}; the one before it is kept" if self._kept else first)

    def load(self, device: torch.device) -> tuple[Place, dict[str, Any]]:
        """The newest checkpoint that all ranks have, and this rank's part of it."""
        mine, trouble = list[Place](), ""
        try:
            mine = self._places()
        except OSError as error:
            trouble = f"the checkpoints in '{self.folder}' cannot be read: {_reason(error)}"
        if first := self._first(trouble):
            raise CheckpointError(first)
        everybody = [json.loads(text) for text in gather_texts(self.net, json.dumps(mine))]
        common = set.intersection(*({(index, step) for index, step in places} for places in everybody))
        if not common:
            raise CheckpointError(
                f"'{self.folder}' has no checkpoint of all {self.net.size} workers; the run ended before its first one"
            )
        kept = sorted(common)[-2:]
        place = kept[-1]
        path, state = self._path(place), dict[str, Any]()
        try:
            state = _read(path, device)
        except (OSError, RuntimeError, MemoryError, ValueError) as error:
            trouble = f"the checkpoint '{path}' cannot be read: {_reason(error)}"
        if first := self._first(trouble):
            older = f"delete that file to go on from the checkpoint of step {kept[0][1]}, the one before"
            raise CheckpointError(f"{first}; {older if len(kept) > 1 else 'there is no other, so begin the run anew'}")
        self._kept = kept
        return place, state

    def _first(self, trouble: str) -> str | None:
        """The first rank's trouble, of all ranks'."""
        return next((text for text in map(str.strip, gather_texts(self.net, trouble or " ")) if text), None)

    def clear(self) -> None:
        """Remove this rank's parts: the run is finished."""
        self._clean([])
        with contextlib.suppress(OSError):  # where another rank's are still there, that one removes the folder
            self.folder.rmdir()

    def _clean(self, kept: Sequence[Place]) -> None:
        """Remove all of this rank's files but those of these places, a mark before its part."""
        own = [self._path(place).name for place in kept]
        with contextlib.suppress(OSError):
            for path in sorted(self.folder.glob(f"*.rank{self.net.rank}of{self.net.size}.pt*"), reverse=True):
                if not any(path.name.startswith(name) for name in own):
                    _remove(path)

    def _path(self, place: Place) -> Path:
        return self.folder / f"{place[0]}-{place[1]}.rank{self.net.rank}of{self.net.size}.pt"

    def _places(self) -> list[Place]:
        """The checkpoints of which this rank has its part, with a mark."""
        pattern = re.compile(rf"(\d+)-(\d+)\.rank{self.net.rank}of{self.net.size}\.pt")
        names = {path.name for path in self.folder.iterdir()} if self.folder.is_dir() else set()
        parts = [pattern.fullmatch(name) for name in names if name + MARK in names]
        return sorted((int(part[1]), int(part[2])) for part in parts if part)


def has_checkpoint(folder: Path) -> bool:
    """Whether a checkpoint was ever whole in this folder, of any rank."""
    return any(folder.glob(f"*.pt{MARK}"))


def _packed(state: dict[str, Any]) -> tuple[bytes, memoryview]:
    data = io.BytesIO()
    torch.save({"format": FORMAT, **state}, data)
    return hashlib.sha256(data.getbuffer()).hexdigest().encode() + b"\n", data.getbuffer()


def _read(path: Path, device: torch.device) -> dict[str, Any]:
    with path.open("rb") as file:
        digest, data = file.readline(), file.read()
    if hashlib.sha256(data).hexdigest().encode() + b"\n" != digest:
        raise ValueError("it is damaged")
    state: dict[str, Any] = torch.load(io.BytesIO(data), map_location=device, weights_only=True)
    if state.pop("format", None) != FORMAT:
        raise ValueError("it is of another version of thinwire")
    return state


def _write(path: Path, *pieces: bytes | memoryview) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.writelines(pieces)
        file.flush()
        os.fsync(file.fileno())
    _sync(path.parent)


def _move(partial: Path, path: Path) -> None:
    partial.replace(path)
    _sync(path.parent)


def _sync(folder: Path) -> None:
    """Make the folder's names as lasting as its files."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def _mark(path: Path) -> Path:
    return path.with_name(path.name + MARK)


def _reason(error: BaseException) -> str:
    """Why, in one line: of the system's errors the system's own words."""
    text = error.strerror if isinstance(error, OSError) else str(error)
    return (text or type(error).__name__).strip().partition("\n")[0]


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):  # a disk in trouble: what cannot be removed is not worth another error
        path.unlink()


def world_net(device: torch.device) -> TorchNet:
    """The default group as a net, for small agreements between the workers."""
    group = dist.group.WORLD
    assert group is not None
    return TorchNet(group, device)
