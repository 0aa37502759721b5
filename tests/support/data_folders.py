"""Small data folders in the public formats, with random content, for tests of the recipes."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from thinwire.lab.recipes import RECIPES, Recipe

WORDS = ("the", "a", "dog", "man", "woman", "runs", "sits", "on", "in", "grass", "house", "red", "blue", "two", "big")
GERMAN = ("der", "ein", "Hund", "Mann", "Frau", "läuft", "sitzt", "auf", "im", "Gras", "Haus", "rot", "blau", "zwei")
SPOKEN = ("YES", "GO", "STOP", "ENTER", "ONE", "TWO", "THREE", "RUBOUT", "HELP", "ERASE")


def write_all(folder: Path) -> Path:
    """Every data set that a recipe reads, tiny."""
    rng = np.random.default_rng(5)
    cifar10(folder / "cifar-10-batches-bin", rng)
    mnist(folder / "MNIST" / "raw", rng)
    text(folder / "ptb", ("ptb.train.txt", "ptb.valid.txt", "ptb.test.txt"), rng)
    text(folder / "wikitext-2", ("train.txt", "valid.txt", "test.txt"), rng)
    multi30k(folder / "multi30k", rng)
    an4(folder / "an4", rng)
    return folder


def cifar10(folder: Path, rng: np.random.Generator) -> None:
    folder.mkdir(parents=True)
    for name in (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"):
        records = rng.integers(0, 256, (10, 3073), dtype=np.uint8)
        records[:, 0] %= 10
        (folder / f"{name}.bin").write_bytes(records.tobytes())


def mnist(folder: Path, rng: np.random.Generator) -> None:
    folder.mkdir(parents=True)
    for part, count in (("train", 40), ("t10k", 15)):
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = rng.integers(0, 10, count, dtype=np.uint8)
        head = struct.pack(">4I", 0x803, count, 28, 28)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(head + images.tobytes())
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 0x801, count) + labels.tobytes())


def sentence(words: tuple[str, ...], rng: np.random.Generator) -> str:
    return " ".join(rng.choice(words, rng.integers(3, 9)))


def text(folder: Path, names: tuple[str, ...], rng: np.random.Generator) -> None:
    folder.mkdir(parents=True)
    for name, lines in zip(names, (1200, 20, 40), strict=True):
        (folder / name).write_text("".join(f" {sentence(WORDS, rng)} \n" for _ in range(lines)), encoding="utf-8")


def multi30k(folder: Path, rng: np.random.Generator) -> None:
    folder.mkdir(parents=True)
    for part, lines in (("train", 40), ("test_2016_flickr", 9)):
        for language, words in (("en", WORDS), ("de", GERMAN)):
            content = "".join(f"{sentence(words, rng).capitalize()}.\n" for _ in range(lines))
            (folder / f"{part}.{language}").write_text(content, encoding="utf-8")


def an4(folder: Path, rng: np.random.Generator) -> None:
    folder.mkdir(parents=True)
    lengths = rng.integers(60, 120, 31).astype(np.int32)
    np.save(folder / "frames.npy", rng.standard_normal((13, lengths.sum()), dtype=np.float32))
    np.save(folder / "lengths.npy", lengths)
    parts = ["train"] * 24 + ["test"] * 7
    rows = (f"{part}\tan{n}\t{' '.join(rng.choice(SPOKEN, 2))}\n" for n, part in enumerate(parts))
    (folder / "transcripts.tsv").write_text("".join(rows), encoding="utf-8")


def small(name: str, folder: Path, batch_size: int = 8) -> Recipe:
    """The recipe on the small folder, with a batch that fits it."""
    recipe = RECIPES[name](folder)
    recipe.set("batch_size", str(batch_size))
    return recipe
