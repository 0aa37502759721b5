"""Checkpoints of a run: every rank keeps its own part, and a part is either whole or not there.

A part is written under another name, synced and moved when all ranks have written theirs; the parts before it are
removed only when all ranks have moved theirs. Whatever ends a run, on whichever host: the newest checkpoint of which
every rank has its part can be resumed. Nothing travels between the ranks but the news that it is done, so hosts need no
common disk.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from thinwire.transport import TorchNet
from thinwire.transport.groups import gather_texts

FORMAT = 1
Place = tuple[int, int]  # which method of the run, and how many steps it has made


class CheckpointError(ValueError):
    """A checkpoint that cannot be written, or none to go on from; one sentence."""


class Checkpoints:
    """The checkpoints in one folder; every method is collective over the default group."""

    def __init__(self, folder: Path, net: TorchNet) -> None:
        self.folder, self.net = folder, net

    def save(self, place: Place, state: dict[str, Any]) -> None:
        """Replace the last checkpoint by this one, on all ranks or on none."""
        path = self._path(place)
        partial = path.with_name(f".{path.name}.partial")
        trouble = ""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            data = io.BytesIO()
            torch.save({"format": FORMAT, **state}, data)
            with partial.open("wb") as file:
                file.write(data.getbuffer())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            _remove(partial)
            trouble = f"the checkpoint '{path}' cannot be written: {error.strerror}"
        troubles = list(filter(None, gather_texts(self.net, trouble or " ")))
        if first := next((text for text in map(str.strip, troubles) if text), None):
            _remove(partial)
            raise CheckpointError(f"{first}; the one before it is kept" if self._places() else first)
        partial.replace(path)
        gather_texts(self.net, "moved")
        for old in self._places():
            if old != place:
                _remove(self._path(old))

    def load(self, device: torch.device) -> tuple[Place, dict[str, Any]]:
        """The newest checkpoint that all ranks have, and this rank's part of it."""
        everybody = [json.loads(text) for text in gather_texts(self.net, json.dumps(self._places()))]
        common = set.intersection(*({(index, step) for index, step in places} for places in everybody))
        if not common:
            raise CheckpointError(
                f"'{self.folder}' has no checkpoint of all {self.net.size} workers; the run ended before its first one"
            )
        place = max(common)
        state = torch.load(self._path(place), map_location=device, weights_only=True)
        if state.pop("format", None) != FORMAT:
            raise CheckpointError(f"the checkpoint '{self._path(place)}' is of another version of thinwire")
        return place, state

    def clear(self) -> None:
        """Remove this rank's parts: the run is finished."""
        for place in self._places():
            _remove(self._path(place))
        with contextlib.suppress(OSError):  # where another rank's are still there, that one removes the folder
            self.folder.rmdir()

    def _path(self, place: Place) -> Path:
        return self.folder / f"{place[0]}-{place[1]}.rank{self.net.rank}of{self.net.size}.pt"

    def _places(self) -> list[Place]:
        """The checkpoints of which this rank has its part."""
        pattern = re.compile(rf"(\d+)-(\d+)\.rank{self.net.rank}of{self.net.size}\.pt")
        names = [path.name for path in self.folder.iterdir()] if self.folder.is_dir() else []
        return sorted((int(m[1]), int(m[2])) for m in map(pattern.fullmatch, names) if m)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):  # a disk in trouble: what cannot be removed is not worth another error
        path.unlink()


def world_net(device: torch.device) -> TorchNet:
    """The default group as a net, for small agreements between the workers."""
    group = dist.group.WORLD
    assert group is not None
    return TorchNet(group, device)
