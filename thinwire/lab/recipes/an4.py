"""`an4-gru`: speech recognition with CTC, the kind of experiment of DGC's Figure 3 (c) and (d)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from thinwire.lab.recipes import rates
from thinwire.lab.recipes.base import Batch, Metric, Recipe
from thinwire.lab.recipes.data import an4
from thinwire.lab.recipes.models.ctc_gru import CtcGru
from thinwire.lab.recipes.sharing import epoch_generator, part_of_batch, seed_dropout

BLANK = 0
CHARACTERS = " 'ABCDEFGHIJKLMNOPQRSTUVWXYZ"  # their numbers begin at 1
TEST_BATCH = 64


class An4Gru(Recipe):
    """Three GRUs in both directions over 13 cepstral coefficients; Nesterov SGD with clipping, as in DGC.

    948 utterances for training and 130 for testing; greedy decoding, no language model.
    """

    name = "an4-gru"
    summary = "AN4 speech, 3 bidirectional GRU layers with CTC, 1.9 million parameters (DGC's Figure 3)"
    metric = Metric(name="word error rate", unit="%", difference_unit="points", higher_is_better=False)
    epochs = 80
    batch_size = 32
    needs_data = True
    lr: float = 0.1
    momentum: float = 0.9
    clip_norm: float = 1.0
    settings = ("batch_size", "lr", "momentum", "clip_norm")
    sign_lr_factor = 0.005
    default_method = "dgc:density=0.006,warmup=116"  # 4 epochs; on average 0.6 % was within a point of dense

    def __init__(self, data: Path | None = None, device: torch.device | None = None) -> None:
        super().__init__(data, device)
        train, test = an4.read(data)
        everything = torch.cat([utterance.frames for utterance in train])  # (all training frames, 13)
        self.mean, self.std = everything.mean(dim=0), everything.std(dim=0)
        self.frames, self.lengths = self._frames(train)
        self.texts, self.text_lengths = _numbers([utterance.text for utterance in train], self.device)
        self.test_frames, self.test_lengths = self._frames(test)
        self.test_texts = [utterance.text for utterance in test]

    def _frames(self, utterances: Sequence[an4.Utterance]) -> tuple[Tensor, Tensor]:
        """(N, longest, 13) float32 on the device, zeros behind the end; (N,) lengths on the host."""
        pieces = [(utterance.frames - self.mean) / self.std for utterance in utterances]
        lengths = torch.tensor([len(piece) for piece in pieces])
        return nn.utils.rnn.pad_sequence(pieces, batch_first=True).to(self.device), lengths

    def model(self) -> nn.Module:
        return CtcGru(an4.NUM_COEFFICIENTS, len(CHARACTERS) + 1, width=256, units=192, num_layers=3, dropout=0.3)

    def optimizer(self, parameters: Iterable[nn.Parameter], lr_factor: float) -> torch.optim.Optimizer:
        nesterov = self.momentum > 0
        return torch.optim.SGD(parameters, self.lr * lr_factor, self.momentum, nesterov=nesterov)

    def schedule(self, optimizer: torch.optim.Optimizer, num_steps: int) -> LRScheduler:
        return rates.cosine(optimizer, num_steps, warmup=0.05)

    def num_batches(self, world: int) -> int:
        return len(self.lengths) // self.batch_size

    def train_batches(self, epoch: int, *, seed: int, rank: int, world: int) -> Iterator[Batch]:
        seed_dropout(seed, epoch, rank)
        part = part_of_batch(self, rank, world)
        order = torch.randperm(len(self.lengths), generator=epoch_generator(seed, epoch))
        used = (part.stop - part.start) * world  # utterances of a batch that some rank has
        for step in range(self.num_batches(world)):
            batch = order[step * self.batch_size :][:used]
            mine = batch[part]
            weight = world / int(self.text_lengths[batch].sum())
            on_device = mine.to(self.device)
            yield (
                self.frames[on_device, : int(self.lengths[mine].max())],
                self.lengths[mine].to(self.device),
                self.texts[on_device, : int(self.text_lengths[mine].max())],
                self.text_lengths[mine].to(self.device),
                torch.tensor(weight).to(self.device),
            )

    def test_batches(self, *, rank: int, world: int) -> Iterator[Batch]:
        for mine in torch.arange(rank, len(self.test_texts), world).split(TEST_BATCH):
            if len(mine):
                longest = int(self.test_lengths[mine].max())
                yield (
                    self.test_frames[mine.to(self.device), :longest],
                    self.test_lengths[mine].to(self.device),
                    mine,
                )

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        frames, lengths, texts, text_lengths, weight = batch
        log_probabilities, lengths = model(frames, lengths)
        total = F.ctc_loss(
            log_probabilities.transpose(0, 1), texts, lengths, text_lengths, BLANK, reduction="sum", zero_infinity=True
        )
        # With this weight the mean over workers is the mean over the characters of the global batch.
        return total * weight

    def score(self, model: nn.Module, batch: Batch) -> tuple[float, ...]:
        frames, lengths, chosen = batch
        log_probabilities, lengths = model(frames, lengths)
        best = log_probabilities.argmax(dim=-1).tolist()  # (B, T')
        edits = words = 0
        for row, length, number in zip(best, lengths.tolist(), chosen.tolist(), strict=True):
            said = self.test_texts[number].split()
            edits += edit_distance(greedy_text(row[:length]).split(), said)
            words += len(said)
        return edits, words

    def judge(self, *totals: float) -> float:
        edits, words = totals
        return 100.0 * edits / words


def _numbers(texts: Sequence[str], device: torch.device) -> tuple[Tensor, Tensor]:
    """(N, longest) int64 on the device, zeros behind the end; (N,) lengths on the host."""
    try:
        rows = [torch.tensor([CHARACTERS.index(character) + 1 for character in text]) for text in texts]
    except ValueError:
        raise ValueError(f"an AN4 transcript has a character other than {CHARACTERS!r}") from None
    return nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device), torch.tensor([len(row) for row in rows])


def greedy_text(path: Sequence[int]) -> str:
    """The text of a CTC path: repetitions are one character, blanks are none."""
    kept = [number for before, number in zip([BLANK, *path], path, strict=False) if number not in (before, BLANK)]
    return "".join(CHARACTERS[number - 1] for number in kept)


def edit_distance(found: Sequence[str], wanted: Sequence[str]) -> int:
    """The least number of insertions, deletions and substitutions that lead from one to the other."""
    row = list(range(len(wanted) + 1))
    for at, item in enumerate(found, start=1):
        diagonal, row[0] = row[0], at
        for column, want in enumerate(wanted, start=1):
            diagonal, row[column] = row[column], min(row[column] + 1, row[column - 1] + 1, diagonal + (item != want))
    return row[-1]
