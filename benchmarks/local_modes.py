"""Gradient dropping with every way to use local gradients, averaged and never averaged, on small translators.

    python benchmarks/local_modes.py --data DIR [--network gru|transformer] [--seed 0] [--only 'sum*']

Half of Multi30k, 1,500 subwords, 0.43 or 0.34 million parameters, Adam, 4 workers of 32 sentence pairs as threads, 11
epochs (1,243 steps), on one core: some minutes a method. benchmarks/claims.py has the networks of full size.
"""

from __future__ import annotations

import argparse
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import nn
from which_stay_dense import compare

from thinwire.recipes.data.subwords import PAD
from thinwire.recipes.models.seq2seq_gru import GruTranslator
from thinwire.recipes.models.seq2seq_transformer import TransformerTranslator
from thinwire.recipes.multi30k import Multi30k
from thinwire.recipes.translation import MAX_PIECES

WORKERS, EPOCHS = 4, 11
DROP = "dropping:density=0.01,values=fp32,warmup=250"
NEVER = "sync_every=1000000"
METHODS = {
    "dense": "dense",
    "dropping": DROP,
    **{
        f"{mode}, {when}": f"{DROP},local={mode},{interval}"
        for mode in ("sum", "partial", "error")
        for when, interval in (("averaged every 300 steps", "sync_every=300"), ("never averaged", NEVER))
    },
}


class HalfOfMulti30k(Multi30k):
    """The first 14,500 training and 400 test pairs; a small network wants twice the learning rate."""

    epochs, batch_size, lr, num_pieces = EPOCHS, 32 * WORKERS, 2e-3, 1500

    def keep(self, train: tuple[list[str], list[str]], test: tuple[list[str], list[str]]) -> None:  # type: ignore[override]
        super().keep((train[0][:14_500], train[1][:14_500]), (test[0][:400], test[1][:400]))


class SmallGru(HalfOfMulti30k):
    name, summary = "multi30k-small-gru", "half of Multi30k, GRUs of 128 units"

    def model(self) -> nn.Module:
        return GruTranslator(len(self.subwords), width=64, units=128, dropout=0.1, pad=PAD)


class SmallTransformer(HalfOfMulti30k):
    name, summary = "multi30k-small-transformer", "half of Multi30k, a Transformer of width 64"

    def model(self) -> nn.Module:
        return TransformerTranslator(
            len(self.subwords), width=64, num_layers=2, num_heads=4, max_length=MAX_PIECES + 60, dropout=0.1, pad=PAD
        )


NETWORKS = {"gru": SmallGru, "transformer": SmallTransformer}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--network", choices=NETWORKS, default="gru")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="*", help="the rows to run, as a pattern of their names")
    options = parser.parse_args()
    torch.set_num_threads(1)
    methods = {name: method for name, method in METHODS.items() if fnmatchcase(name, options.only)}
    compare(NETWORKS[options.network](options.data), methods, WORKERS, EPOCHS, options.seed)


if __name__ == "__main__":
    main()
