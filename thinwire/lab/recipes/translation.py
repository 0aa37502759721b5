"""What translation recipes have in common: subwords, batches of sentence pairs, greedy decoding, BLEU."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.lab.recipes.base import Batch, Metric, Recipe
from thinwire.lab.recipes.data.subwords import BEGIN, END, PAD, Subwords
from thinwire.lab.recipes.sharing import epoch_generator, part_of_batch, seed_dropout

NGRAMS = 4
TEST_BATCH = 256
MAX_PIECES = 100  # of a sentence; what is longer is cut
MORE_PIECES = 20  # a translation may be so much longer than its source
LABEL_SMOOTHING = 0.1


class TranslationRecipe(Recipe):
    """A model that translates. A subclass reads the data with `keep`, and gives the model and the optimizer.

    The model is called with source and target; for decoding it has `encode` and `next_logits`.
    """

    metric = Metric(name="BLEU", unit="", difference_unit="", higher_is_better=True)
    num_scores = 2 * NGRAMS + 2  # n-grams that were right, n-grams there were, words here and in the references
    num_pieces: ClassVar[int]

    def keep(self, train: tuple[Sequence[str], Sequence[str]], test: tuple[Sequence[str], Sequence[str]]) -> None:
        """Learn the subwords from the training sentences, and put all sentences on the device as numbers."""
        if importlib.util.find_spec("sacrebleu") is None:
            raise ValueError(
                f"recipe {self.name!r} judges with BLEU, which needs sacrebleu: pip install 'thinwire[lab]'"
            )
        self.subwords = Subwords([*train[0], *train[1]], self.num_pieces)
        self.sources, self.source_lengths = self._numbers(train[0])
        self.targets, self.target_lengths = self._numbers(train[1])
        self.test_sources, self.test_lengths = self._numbers(test[0])
        self.references = list(test[1])

    def _numbers(self, sentences: Sequence[str]) -> tuple[Tensor, Tensor]:
        """(N, L) int64 on the device: BEGIN, pieces, END, PAD ...; and (N,) the lengths without PAD, on the host."""
        rows = [[BEGIN, *self.subwords.encode(sentence)[:MAX_PIECES], END] for sentence in sentences]
        lengths = torch.tensor([len(row) for row in rows])
        numbers = torch.full((len(rows), int(lengths.max())), PAD)
        for row, values in zip(numbers, rows, strict=True):
            row[: len(values)] = torch.tensor(values)
        return numbers.to(self.device), lengths

    def num_batches(self, world: int) -> int:
        return len(self.source_lengths) // self.batch_size

    def train_batches(self, epoch: int, *, seed: int, rank: int, world: int) -> Iterator[Batch]:
        seed_dropout(seed, epoch, rank)
        part = part_of_batch(self, rank, world)
        order = torch.randperm(len(self.source_lengths), generator=epoch_generator(seed, epoch))
        used = (part.stop - part.start) * world  # samples of a batch that some rank has
        for step in range(self.num_batches(world)):
            batch = order[step * self.batch_size :][:used]
            mine = batch[part]
            num_words = int((self.target_lengths[batch] - 1).sum())  # predictions of all ranks
            on_device = mine.to(self.device)
            target = self.targets[on_device, : int(self.target_lengths[mine].max())]
            yield (
                self.sources[on_device, : int(self.source_lengths[mine].max())],
                target[:, :-1],
                target[:, 1:],
                torch.tensor(world / num_words).to(self.device),
            )

    def test_batches(self, *, rank: int, world: int) -> Iterator[Batch]:
        for mine in torch.arange(rank, len(self.references), world).split(TEST_BATCH):
            if len(mine):
                longest = int(self.test_lengths[mine].max())
                yield self.test_sources[mine.to(self.device), :longest], mine

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        source, target, following, weight = batch
        logits = model(source, target)
        total = F.cross_entropy(
            logits.flatten(0, 1),
            following.flatten(),
            ignore_index=PAD,
            reduction="sum",
            label_smoothing=LABEL_SMOOTHING,
        )
        # With this weight the mean over workers is the mean over the words of the global batch, whoever has how many.
        return total * weight

    def score(self, model: nn.Module, batch: Batch) -> tuple[float, ...]:
        source, chosen = batch
        numbers = greedy(model, source, max_length=source.shape[1] + MORE_PIECES)
        limits = (source != PAD).sum(dim=1) + MORE_PIECES  # a sentence's own, whoever it shares the batch with
        sentences = [
            self.subwords.decode(row[:limit]) for row, limit in zip(numbers.tolist(), limits.tolist(), strict=True)
        ]
        return bleu_counts(sentences, [self.references[number] for number in chosen.tolist()])

    def judge(self, *totals: float) -> float:
        return bleu(totals)


def greedy(model: Any, source: Tensor, max_length: int) -> Tensor:
    """(B, up to max_length) the most probable token each time, until all sentences have ended."""
    memory = model.encode(source)
    tokens = torch.full((len(source), 1), BEGIN, device=source.device)
    ended = torch.zeros(len(source), dtype=torch.bool, device=source.device)
    state = None
    while tokens.shape[1] <= max_length and not ended.all():
        logits, state = model.next_logits(tokens, memory, state)
        following = logits.argmax(dim=-1)  # (B,)
        tokens = torch.cat([tokens, following[:, None]], dim=1)
        ended |= following == END
    return tokens[:, 1:]


def bleu_counts(sentences: Sequence[str], references: Sequence[str]) -> tuple[float, ...]:
    """What BLEU is made of: n-grams that are right and all n-grams, for n = 1 to 4; words, words of the references.

    These can be added up, over batches and workers, where BLEU itself cannot.
    """
    from sacrebleu.metrics.bleu import BLEU

    score = BLEU().corpus_score(list(sentences), [list(references)])
    return (*score.counts, *score.totals, score.sys_len, score.ref_len)


def bleu(totals: Sequence[float]) -> float:
    """BLEU in 0..100 from added-up counts, as sacrebleu computes it by default."""
    from sacrebleu.metrics.bleu import BLEU

    counts = [int(total) for total in totals]
    right, all_ngrams, (num_words, num_reference_words) = counts[:NGRAMS], counts[NGRAMS:-2], counts[-2:]
    return BLEU.compute_bleu(right, all_ngrams, num_words, num_reference_words, smooth_method="exp").score
