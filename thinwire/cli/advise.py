"""`thinwire advise`: which method to train with, from measurements here or from a few known numbers."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from torch import nn

from thinwire import ctrl_c
from thinwire.advisor.advice import Advice, advise_offline
from thinwire.advisor.advice import advise as advise_online
from thinwire.advisor.cost import Workload
from thinwire.advisor.microbench import DryNet
from thinwire.advisor.profile import measure_work
from thinwire.cli import _complaints
from thinwire.cli._job import split_specs
from thinwire.cli._json import checked_json, write_json
from thinwire.cli._text import room, wrapped
from thinwire.cli._workers import joined_world
from thinwire.lab import emulation
from thinwire.lab.bench.models import MODELS
from thinwire.lab.bench.rows import commit, hardware, today
from thinwire.lab.recipes import RECIPES
from thinwire.methods import parse_method

OPTIMIZERS = ("sgd", "adam", "adamw", "other")  # all but the first get the same advice
SHOWN_MODELS = [name for name in MODELS if name != "tiny"]
UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9}


def advise(
    params: Annotated[str | None, typer.Option(help="Parameters of the model, such as 25.6M.")] = None,
    compute_ms: Annotated[
        float | None, typer.Option(metavar="MS", help="One step on one host without communication, in milliseconds.")
    ] = None,
    hosts: Annotated[int | None, typer.Option(help="How many hosts; under torchrun: those that are there.")] = None,
    rate: Annotated[str | None, typer.Option(help="The rate of every link: 100mbit, 1Gb/s, 125MB/s.")] = None,
    latency_ms: Annotated[
        float, typer.Option(metavar="MS", help="From one host to another, one way: half a ping.")
    ] = 0.1,
    model: Annotated[str | None, typer.Option(help=f"Measure this model: {', '.join(SHOWN_MODELS)}.")] = None,
    recipe: Annotated[str | None, typer.Option(help=f"Measure this recipe's model: {', '.join(RECIPES)}.")] = None,
    optimizer: Annotated[
        str | None, typer.Option(help=f"{', '.join(OPTIMIZERS)}; sgd unless a recipe says otherwise.")
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Methods to compare with dense, separated by commas.",
            show_default="{compared}; without sgd {compared_without_sgd}",
        ),
    ] = None,
    more_hosts: Annotated[
        bool, typer.Option("--more-hosts", help="Also show 2, 4, 8 ... times as many hosts, up to 1024.")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the advice to FILE.")
    ] = None,
) -> None:
    """Predict the step time of every method, and recommend one, or none.

    On the machines themselves (half a minute, more where steps take seconds): torchrun ... -m thinwire advise
    --model vgg16, or
    thinwire cluster --hosts 4 --rate 100mbit -- thinwire advise --model vgg16

    For machines that are not here: thinwire advise --params 25.6M --compute-ms 120 --hosts 64 --rate 1gbit
    """
    specs = _specs(methods) if methods is not None else None
    checked_json(json_file)
    if optimizer not in (None, *OPTIMIZERS):
        raise _complaints.Complaint(_complaints.unknown("optimizer", str(optimizer), OPTIMIZERS))
    if model is not None and model not in MODELS:
        raise _complaints.Complaint(_complaints.unknown("model", model, SHOWN_MODELS))
    if recipe is not None and recipe not in RECIPES:
        raise _complaints.Complaint(_complaints.unknown("recipe", recipe, RECIPES))
    if model is not None and recipe is not None:
        raise _complaints.Complaint("--model and --recipe exclude each other; give one of them.")
    world = joined_world()
    if world is not None:
        advice = _online(model, recipe, optimizer, specs, world, given=(params, compute_ms, hosts, rate))
    else:
        advice = _offline(params, compute_ms, hosts, rate, latency_ms, model, recipe, optimizer, specs)
    if not ctrl_c.is_silent():
        for line in advice.text(room(), more_hosts=more_hosts).splitlines():
            typer.echo(line if line == f"    {advice.line}" else wrapped(line, room()))  # to be copied in one piece
        write_json(
            json_file,
            {**advice.as_dict(), "hardware": hardware(torch.device("cpu")), "commit": commit(), "date": today()},
        )


def _specs(text: str) -> list[str]:
    specs = split_specs("dense", text)
    for spec in specs:
        try:
            parse_method(spec)
        except ValueError as error:
            raise _complaints.Complaint(f"--methods: {error}.") from error
    return specs


def _online(
    model: str | None, recipe: str | None, optimizer: str | None, specs: list[str] | None, world: int,
    given: tuple[object, ...],
) -> Advice:  # fmt: skip
    if any(value is not None for value in given):
        raise _complaints.Complaint(
            f"this process is one of {world} that were started together: step, hosts and link are measured; "
            "leave --params, --compute-ms, --hosts and --rate out."
        )
    if world < 2:
        raise _complaints.Complaint("advice is about at least 2 processes, and one was started.")
    if model is None and recipe is None:
        raise _complaints.Complaint(f"say what to measure: --model {'|'.join(SHOWN_MODELS)}, or --recipe NAME.")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("gloo")
    try:
        module, step, usual = _workload(model, recipe)
        return advise_online(module, step, methods=specs, optimizer_is_sgd=(optimizer or usual) == "sgd")
    except ValueError as error:
        raise _complaints.Complaint(f"{error}.") from error
    finally:
        dist.destroy_process_group()


def _offline(
    params: str | None, compute_ms: float | None, hosts: int | None, rate: str | None, latency_ms: float,
    model: str | None, recipe: str | None, optimizer: str | None, specs: list[str] | None,
) -> Advice:  # fmt: skip
    missing = [name for name, value in (("--hosts", hosts), ("--rate", rate)) if value is None]
    if model is None and recipe is None:
        missing = [n for n, v in (("--params", params), ("--compute-ms", compute_ms)) if v is None] + missing
    if missing:
        raise _complaints.Complaint(
            f"{_listed(missing)} {'is' if len(missing) == 1 else 'are'} missing: no group of processes was started, so "
            "nothing can be measured (thinwire advise --params 25.6M --compute-ms 120 --hosts 64 --rate 1gbit)."
        )
    assert hosts is not None and rate is not None
    if hosts < 2:
        raise _complaints.Complaint(f"--hosts {hosts}: advice is about at least 2 hosts.")
    if latency_ms < 0:
        raise _complaints.Complaint(f"--latency-ms {latency_ms:g} is not possible.")
    if compute_ms is not None and compute_ms <= 0:
        raise _complaints.Complaint(f"--compute-ms {compute_ms:g}: a step takes longer than that.")
    try:
        bits = emulation.parse_rate(rate)
    except ValueError as error:
        raise _complaints.Complaint(f"--rate: {error}.") from error
    if params is not None and (model is not None or recipe is not None):
        raise _complaints.Complaint("--params and a model exclude each other; give one of them.")
    usual = "sgd"
    if params is not None:
        assert compute_ms is not None
        work = Workload.of_size(count_of(params), compute_ms / 1e3)
    else:
        module, step, usual = _workload(model, recipe)
        work = measure_work(DryNet(1), dict(module.named_parameters()), step)
        if compute_ms is not None:
            work = work.at(compute_ms / 1e3)
    sgd = (optimizer or usual) == "sgd"
    try:
        return advise_offline(
            work, hosts=hosts, rate_bits=bits, latency_s=latency_ms / 1e3, methods=specs, optimizer_is_sgd=sgd
        )
    except ValueError as error:
        raise _complaints.Complaint(f"{error}.") from error


def count_of(text: str) -> int:
    """25.6M -> 25,600,000."""
    match = re.fullmatch(r"\s*([0-9][0-9_.]*)\s*([a-zA-Z]?)\s*", text)
    unit = match[2].lower() if match else ""
    try:
        count = round(float(match[1].replace("_", "")) * UNITS[unit]) if match else 0
    except (ValueError, KeyError):
        count = 0
    if count < 1:
        raise _complaints.Complaint(f"--params '{text}' is not a number of parameters such as 25.6M or 117000.")
    return count


def _workload(model: str | None, recipe: str | None) -> tuple[nn.Module, Callable[[], None], str]:
    """A module, a function that runs forward and backward on one batch, and which optimizer it is trained with."""
    torch.manual_seed(0)
    if model is not None:
        spec = MODELS[model]
        module, inputs, labels = spec.make(), spec.inputs(), spec.labels()
        return module, lambda: spec.loss(module, inputs, labels).backward(), "sgd"
    assert recipe is not None
    try:
        there = RECIPES[recipe]()
    except ValueError as error:
        raise _complaints.Complaint(f"{error}.") from error
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    module = there.model()
    batch = next(iter(there.train_batches(0, seed=0, rank=rank, world=world)))
    usual = "sgd" if isinstance(there.optimizer(module.parameters(), 1.0), torch.optim.SGD) else "other"
    return module, lambda: there.loss(module, batch).backward(), usual


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
