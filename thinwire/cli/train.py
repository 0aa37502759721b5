"""`thinwire train`: run a recipe with a method, beside others, and show accuracy and bytes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from thinwire import ctrl_c
from thinwire.cli import _complaints, _workers
from thinwire.cli._display import display_for, show_table
from thinwire.cli._environment import num_cores
from thinwire.cli._folder import RunFolder
from thinwire.cli._job import Job, split_specs
from thinwire.cli._tensorboard import EventFiles
from thinwire.cli._text import counted, room, wrapped
from thinwire.lab import peers
from thinwire.lab.recipes import RECIPES
from thinwire.lab.recipes.events import Event, Outcome, Started

KEPT_WITH_RESUME = ("resume", "timeout", "workers")


def train(
    context: typer.Context,
    recipe: Annotated[str, typer.Option(help=f"What to train: {', '.join(RECIPES)}.")] = "digits",
    method: Annotated[
        str | None,
        typer.Option(
            help="A method with its options, such as dgc:density=0.01,warmup=72; the recipe's own unless told. "
            "There are {methods}."
        ),
    ] = None,
    compare: Annotated[
        str,
        typer.Option(
            help=f"More methods to train from the same start, separated by commas; also {', '.join(peers.PEERS)}."
        ),
    ] = "",
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Local worker processes; 4 unless told. Under torchrun: those that torchrun started."),
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Epochs; the recipe's own unless told.")] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Seed of initial parameters, data order and augmentation.")
    ] = 0,
    device: Annotated[
        str, typer.Option(help="cpu, cuda, or auto: a GPU where there is one. Workers may share a GPU.")
    ] = "auto",
    data: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the recipe's data.")] = None,
    settings: Annotated[
        str, typer.Option("--set", metavar="NAME=VALUE,...", help="Settings of the recipe, such as lr=0.1.")
    ] = "",
    out: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Folder to write configuration, metrics, summary and checkpoints to."),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Go on with an interrupted run; it says all the rest.")
    ] = None,
    checkpoint_every: Annotated[
        int, typer.Option(min=1, metavar="EPOCHS", help="How often a run with --out saves a checkpoint.")
    ] = 1,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write event files for TensorBoard into the run folder.")
    ] = False,
    in_process: Annotated[
        bool,
        typer.Option(
            "--in-process",
            help="Workers as threads of one process: same losses and bytes, many runs on one GPU, no checkpoints; "
            "the seconds are not those of real workers.",
        ),
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", help="How long a worker waits for the others before it gives up.")
    ] = 300.0,
) -> None:
    """Train a recipe with one method, and with others to compare, and show accuracy, bytes and ratio.

    Ctrl-C saves a checkpoint in the folder RUN of --out; thinwire train --resume RUN goes on from there.
    """
    joined = _workers.joined_world()
    if resume is not None:
        _check_alone(context)
        job, num_workers = Job.resumed(resume, timeout_s=timeout)
        if workers not in (None, num_workers) or joined not in (None, num_workers):
            raise _complaints.Complaint(
                f"the run in '{resume}' has {counted(num_workers, 'worker')}, and they can only go on as {num_workers}."
            )
    else:
        if recipe in RECIPES and method is None:
            method = RECIPES[recipe].default_method
        job = Job.checked(
            recipe=recipe, specs=split_specs(method or "", compare), epochs=epochs, seed=seed, device=device, data=data,
            settings=settings, out=out, checkpoint_every=checkpoint_every, tensorboard=tensorboard,
            in_process=in_process, timeout_s=timeout,
        )  # fmt: skip
        num_workers = joined or workers or 4
        job.check_workers(num_workers)
    if joined is not None and job.in_process:
        raise _complaints.Complaint(f"--in-process makes its own workers, but {joined} processes were started.")
    if joined is not None and workers not in (None, joined):
        raise _complaints.Complaint(f"--workers {workers} does not fit the {joined} processes that were started.")
    shows = not ctrl_c.is_silent()  # this process owns the terminal and the run folder
    folder = RunFolder(job, num_workers) if job.out and shows else None
    _run(job, num_workers, joined is not None, shows, folder)


def _run(job: Job, num_workers: int, is_joined: bool, shows: bool, folder: RunFolder | None) -> None:
    outcomes: list[Outcome] = []
    display = display_for(job) if shows else None
    boards = EventFiles(folder.path, RECIPES[job.recipe].metric) if folder and job.tensorboard else None

    def on_event(event: Event) -> None:
        for taker in (folder, boards):
            if taker is not None:
                taker.add(event)
        if display is not None:
            display.show(event)
        if isinstance(event, Outcome):
            outcomes.append(event)
        elif isinstance(event, Started) and shows and not job.in_process:
            _warn_about_cores(job, _workers.local_workers(num_workers) if is_joined else num_workers)

    try:
        if job.in_process:
            _workers.run_threads(job, num_workers, on_event)
        elif is_joined:
            _workers.join(job, on_event)
        else:
            _workers.launch(job, num_workers, on_event, on_stop=display.saving if display else lambda: None)
    except BaseException as error:
        if folder is not None:
            folder.discard()
            told = job.how_to_go_on
            ended = isinstance(error, (_complaints.Failure, _complaints.Interrupted))
            if ended and folder.can_resume() and told not in str(error):
                raise type(error)(f"{str(error).rstrip('.')}; {told}") from error
        raise
    finally:
        if display is not None:
            display.close()
        if boards is not None:
            boards.close()
    if folder is not None:
        folder.finish(outcomes)
    if shows:
        show_table(job, outcomes, num_workers)
        if folder is not None:
            typer.echo(f"Written to {os.path.relpath(folder.path)}.")


def _check_alone(context: typer.Context) -> None:
    """--resume takes everything from the run's own configuration: other options would contradict it in silence."""
    for parameter in context.command.params:
        source: Any = context.get_parameter_source(parameter.name or "")
        if parameter.name not in KEPT_WITH_RESUME and source is not None and source.name == "COMMANDLINE":
            raise _complaints.Complaint(f"--resume goes on as the run began; leave out {parameter.opts[0]}.")


def _warn_about_cores(job: Job, num_local: int) -> None:
    cores = num_cores()
    if job.device == "cpu" and num_local > cores:
        sentence = (
            f"thinwire: {num_local} workers share {counted(cores, 'core')} and take turns: "
            f"their seconds are not those of {num_local} machines."
        )
        print(wrapped(sentence, room(sys.stderr)), file=sys.stderr, flush=True)
