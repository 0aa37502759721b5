"""CIFAR-10 in its official binary version: records of a label byte and 3,072 pixel bytes, planes R, G, B."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from thinwire.lab.recipes.data.files import Source, wrong_content

SOURCE = Source(
    title="CIFAR-10 (binary version)",
    folder="cifar-10-batches-bin",
    origin="unpack https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz there",
)
TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILES = ("test_batch.bin",)
PIXELS = 3 * 32 * 32


def read(data: Path | None, files: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    """(N, 3, 32, 32) uint8 images and (N,) int64 labels of the files, one after the other."""
    paths = [SOURCE.file(data, name) for name in files]
    records = []
    for path in paths:
        content = np.fromfile(path, dtype=np.uint8)
        if not content.size or content.size % (1 + PIXELS):
            raise wrong_content(path, f"holds {content.size:,} bytes, which are not records of {1 + PIXELS:,}")
        records.append(content.reshape(-1, 1 + PIXELS))
        if records[-1][:, 0].max() > 9:
            raise wrong_content(path, "has labels above 9")
    whole = torch.from_numpy(np.concatenate(records))  # (N, 3073)
    return whole[:, 1:].reshape(-1, 3, 32, 32).contiguous(), whole[:, 0].long()
