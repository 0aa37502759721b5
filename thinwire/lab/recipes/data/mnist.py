"""MNIST in the IDX format: a big-endian header of magic number and sizes, then bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from thinwire.lab.recipes.data.files import Source, wrong_content

SOURCE = Source(
    title="MNIST (IDX files, not compressed)",
    folder="MNIST/raw",
    origin="unpack the four .gz files of https://storage.googleapis.com/cvdf-datasets/mnist/ there, "
    "which is also what torchvision.datasets.MNIST(DIR, download=True) does",
)


def read(data: Path | None, part: str) -> tuple[Tensor, Tensor]:
    """(N, 1, 28, 28) uint8 images and (N,) int64 labels of part "train" or "t10k"."""
    image_path, label_path = (
        SOURCE.file(data, f"{part}-images-idx3-ubyte"),
        SOURCE.file(data, f"{part}-labels-idx1-ubyte"),
    )
    images, labels = _idx(image_path, 3), _idx(label_path, 1)
    if images.shape[1:] != (28, 28) or len(images) != len(labels):
        raise wrong_content(image_path, f"holds {images.shape} pixels for {len(labels)} labels")
    return torch.from_numpy(images).unsqueeze(1), torch.from_numpy(labels).long()


def _idx(path: Path, num_dims: int) -> np.ndarray:
    """The array of unsigned bytes in an IDX file."""
    content = np.fromfile(path, dtype=np.uint8)
    header = content[: 4 + 4 * num_dims]
    if bytes(header[:4]) != bytes((0, 0, 8, num_dims)):
        raise wrong_content(path, f"does not begin as an IDX file of {num_dims} dimensions")
    shape = tuple(int(size) for size in header[4:].view(">u4"))
    body = content[4 + 4 * num_dims :]
    if body.size != np.prod(shape):
        raise wrong_content(path, f"holds {body.size:,} bytes where its header says {shape}")
    return body.reshape(shape)
