"""`thinwire train`: run a recipe with a method, beside others, and show accuracy and bytes."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Annotated

import typer

from thinwire.cli import _complaints, _workers
from thinwire.cli._display import display_for, show_table
from thinwire.cli._folder import RunFolder
from thinwire.cli._job import Job, split_specs
from thinwire.recipes import RECIPES
from thinwire.recipes.loop import Event, Outcome


def train(
    recipe: Annotated[str, typer.Option(help=f"What to train: {', '.join(RECIPES)}.")] = "digits",
    method: Annotated[str, typer.Option(help="A method with its options, such as dgc:density=0.01,warmup=72.")] = "dgc",
    compare: Annotated[str, typer.Option(help="More methods to train from the same start, separated by commas.")] = "",
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Local worker processes; 4 unless told. Under torchrun: those that torchrun started."),
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Epochs; the recipe's own unless told.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of initial parameters, data order and augmentation.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write config.json, metrics.jsonl and summary.json to.")
    ] = None,
) -> None:
    """Train a recipe with one method, and with others to compare, and show accuracy, bytes and ratio."""
    job = Job.checked(recipe=recipe, specs=split_specs(method, compare), epochs=epochs, seed=seed)
    joined = _workers.joined_world()
    if joined is not None and workers not in (None, joined):
        raise _complaints.Complaint(f"--workers {workers} does not fit the {joined} processes that were started.")
    num_workers = joined or workers or 4
    shows = joined is None or os.environ["RANK"] == "0"  # this process owns the terminal and the run folder

    folder = RunFolder(out, {**dataclasses.asdict(job), "workers": num_workers}) if out and shows else None
    outcomes: list[Outcome] = []
    display = display_for(job) if shows else None

    def on_event(event: Event) -> None:
        if display is not None:
            display.show(event)
        if folder is not None:
            folder.add(event)
        if isinstance(event, Outcome):
            outcomes.append(event)

    try:
        if joined is not None:
            _workers.join(job, on_event)
        else:
            _workers.launch(job, num_workers, on_event)
    finally:
        if display is not None:
            display.close()
    if folder is not None:
        folder.finish(outcomes)
    if shows:
        show_table(job, outcomes, num_workers)
        if out:
            typer.echo(f"Written to {out}.")
