"""CMU AN4 as cepstral coefficients: short spoken addresses, dates, numbers and commands.

frames.npy       (13, all frames) MFCCs at 100 frames per second, one utterance after the other
lengths.npy      (utterances,) frames of each
transcripts.tsv  a line an utterance in the same order: "train" or "test", its name, its words, split by tabs
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from thinwire.lab.recipes.data.files import Source, wrong_content

SOURCE = Source(
    title="AN4 (13 MFCCs an utterance)",
    folder="an4",
    origin="compute frames.npy, lengths.npy and transcripts.tsv from http://www.speech.cs.cmu.edu/databases/an4/ "
    "as the docstring of thinwire.lab.recipes.data.an4 describes them",
)
NUM_COEFFICIENTS = 13


@dataclass(frozen=True)
class Utterance:
    frames: Tensor  # (T, 13) float32
    text: str


def read(data: Path | None) -> tuple[list[Utterance], list[Utterance]]:
    """The utterances for training and for testing, in the order of the files."""
    paths = [SOURCE.file(data, name) for name in ("frames.npy", "lengths.npy", "transcripts.tsv")]
    try:
        frames, lengths = np.load(paths[0]), np.load(paths[1])
    except ValueError as error:
        raise wrong_content(paths[0], "or lengths.npy is not a NumPy array") from error
    rows = [line.split("\t") for line in paths[2].read_text(encoding="utf-8").splitlines()]
    if frames.shape != (NUM_COEFFICIENTS, lengths.sum()):
        raise wrong_content(paths[0], f"has the shape {frames.shape} where lengths.npy adds up to {lengths.sum():,}")
    if len(rows) != len(lengths) or any(len(row) != 3 or row[0] not in ("train", "test") for row in rows):
        raise wrong_content(paths[2], f"is not {len(lengths):,} lines of part, name and words")
    parts: dict[str, list[Utterance]] = {"train": [], "test": []}
    pieces = torch.from_numpy(frames.T.astype(np.float32)).split([int(length) for length in lengths])
    for (part, _, text), piece in zip(rows, pieces, strict=True):
        parts[part].append(Utterance(piece, text))
    return parts["train"], parts["test"]
