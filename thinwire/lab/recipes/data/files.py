"""Where a data set's files are expected, and the sentence for the one that is missing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from thinwire.lab.recipes.base import MissingData


@dataclass(frozen=True)
class Source:
    """A data set as the public knows it: the folder that it lies in, below the user's data folder."""

    title: str  # "CIFAR-10"
    folder: str  # "cifar-10-batches-bin"
    origin: str  # how to get it, to go after "get it: "

    def file(self, data: Path | None, name: str) -> Path:
        """The path of one file of the set, which is there; else MissingData."""
        if data is None:
            raise MissingData(
                f"{self.title} is not part of the package: name a folder that holds {self.folder}/{name} with "
                f"--data DIR; get it: {self.origin}"
            )
        path = Path(data) / self.folder / name
        if not path.is_file():
            raise MissingData(f"{self.title} is expected at '{path}', which is not there; get it: {self.origin}")
        return path


def wrong_content(path: Path, problem: str) -> ValueError:
    """The error for a file that is there and is not what its name says."""
    return ValueError(f"'{path}' {problem}; it may be damaged or of another format, so fetch it again")
