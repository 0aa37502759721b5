"""How a global batch is shared out, and where its random numbers come from: the same for any number of workers."""

from __future__ import annotations

import torch

from thinwire.lab.recipes.base import Recipe


def part_of_batch(recipe: Recipe, rank: int, world: int) -> slice:
    """This rank's samples of a global batch of `recipe.batch_size`; what cannot be shared out evenly is left."""
    check_share(recipe.name, recipe.batch_size, world)
    share = recipe.batch_size // world
    return slice(rank * share, (rank + 1) * share)


def check_share(recipe: str, batch_size: int, world: int) -> None:
    """A ValueError where a global batch has not a sample for every worker."""
    if batch_size < world:
        raise ValueError(
            f"recipe {recipe!r} has a global batch_size of {batch_size}, too few for {world} workers; "
            f"start fewer workers or set a larger batch_size"
        )


def epoch_generator(seed: int, epoch: int) -> torch.Generator:
    """Random numbers of an epoch that every rank draws alike, on the CPU: the same for any kind of device."""
    return torch.Generator().manual_seed(seed * 1_000_003 + epoch)


def seed_dropout(seed: int, epoch: int, rank: int) -> None:
    """Give torch's global generators a state of their own for each rank and epoch.

    With one seed for all, dropout would leave out the same units on every rank.
    """
    torch.manual_seed((seed * 1_000_003 + epoch) * 65_537 + rank + 1)
