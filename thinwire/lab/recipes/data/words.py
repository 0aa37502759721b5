"""Texts of words split by blanks, as Penn Treebank and WikiText-2 come, as one stream of numbers."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from thinwire.lab.recipes.data.files import Source, wrong_content

PTB = Source(
    title="Penn Treebank (Mikolov's preparation)",
    folder="ptb",
    origin="the folder simple-examples/data of http://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz, renamed",
)
WIKITEXT2 = Source(
    title="WikiText-2 (word level)",
    folder="wikitext-2",
    origin="the files wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens of wikitext-2-v1.zip, "
    "renamed to train.txt, valid.txt and test.txt",
)
UNKNOWN, END = "<unk>", "<eos>"


def read(source: Source, data: Path | None, train: str, test: str) -> tuple[Tensor, Tensor, list[str]]:
    """Streams (N,) int64 of the training and the test text, and the vocabulary: the words of the training text.

    Every line ends with `<eos>`; a word of the test text that was never seen is `<unk>`.
    """
    train_words, test_words = (_words(source.file(data, name)) for name in (train, test))
    vocabulary = list(dict.fromkeys([UNKNOWN, END, *train_words]))
    number = {word: index for index, word in enumerate(vocabulary)}
    streams = [torch.tensor([number.get(word, 0) for word in words]) for words in (train_words, test_words)]
    return streams[0], streams[1], vocabulary


def _words(path: Path) -> list[str]:
    words = [word for line in path.read_text(encoding="utf-8").splitlines() for word in (*line.split(), END)]
    if not words:
        raise wrong_content(path, "is empty")
    return words
