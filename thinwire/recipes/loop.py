"""The training loop of every recipe: a plain DDP loop with one added line, and reports on how it goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.recipes.base import Recipe, samples_in

REPORT_EVERY_S = 0.1


@dataclass(frozen=True)
class Progress:
    """Where a run stands, seen from rank 0."""

    spec: str
    epoch: int  # from 1
    epochs: int
    step: int  # finished optimizer steps
    num_steps: int
    loss: float  # mean over this epoch so far, on rank 0
    samples_per_s: float  # all workers together, evaluation not counted
    bytes_sent: int  # by rank 0
    ratio: float | None


@dataclass(frozen=True)
class Epoch:
    """One line of metrics.jsonl; means over all workers."""

    spec: str
    epoch: int
    step: int
    loss: float
    metric: float
    lr: float
    seconds: float
    samples_per_s: float
    bytes_sent: float
    ratio: float | None


@dataclass(frozen=True)
class Outcome:
    """What a finished run came to."""

    spec: str
    metric: float
    loss: float
    steps: int
    seconds: float  # training alone, without evaluation
    samples_per_s: float
    bytes_sent: float  # over a worker's link, mean
    bytes_sent_max: float  # over the busiest worker's link
    ratio: float | None  # dense fp32 bytes / bytes of frames handed to the transport
    link_ratio: float | None  # bytes of a dense fp32 ring all-reduce / bytes over the link
    lr_factor: float


Event = Progress | Epoch | Outcome
Report = Callable[[Event], None]


def method_name(spec: str) -> str:
    """The part of a method spec before its options: "dgc" of "dgc:density=0.01"."""
    return spec.partition(":")[0]


def train(recipe: Recipe, spec: str, *, epochs: int, seed: int, report: Report) -> Outcome:
    """Train one method from the recipe's initial parameters; every rank of the default group calls this.

    Only rank 0 reports. The same seed gives every method the same initial parameters, data order and
    augmentation.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    method = recipe.adapted(thinwire.parse_method(spec))
    lr_factor = recipe.lr_factor(method_name(spec))
    torch.manual_seed(seed)
    model = DistributedDataParallel(recipe.model())
    optimizer = recipe.optimizer(model.parameters(), lr_factor)
    num_batches = recipe.num_batches(world)
    num_steps = epochs * num_batches
    schedule = recipe.schedule(optimizer, num_steps)
    wire = thinwire.attach(model, optimizer, method)

    step, samples, seconds, last_report_s = 0, 0, 0.0, 0.0
    loss_mean = metric = 0.0
    for epoch in range(1, epochs + 1):
        model.train()
        loss_sum = torch.zeros(())
        start_s = time.perf_counter()
        for in_epoch, batch in enumerate(recipe.train_batches(epoch, seed=seed, rank=rank, world=world), start=1):
            optimizer.zero_grad()
            loss = recipe.loss(model, batch)
            loss.backward()
            recipe.clip(model.parameters(), method)
            optimizer.step()
            schedule.step()
            step += 1
            samples += samples_in(batch) * world
            loss_sum += loss.detach()
            now_s = time.perf_counter()
            if rank == 0 and (now_s - last_report_s > REPORT_EVERY_S or step == num_steps):
                last_report_s, stats = now_s, wire.stats
                report(
                    Progress(
                        spec=spec,
                        epoch=epoch,
                        epochs=epochs,
                        step=step,
                        num_steps=num_steps,
                        loss=float(loss_sum) / in_epoch,
                        samples_per_s=samples / (seconds + now_s - start_s),
                        bytes_sent=stats.bytes_sent,
                        ratio=stats.ratio,
                    )
                )
        seconds += time.perf_counter() - start_s
        metric = evaluate(recipe, model, method, rank, world)
        stats = wire.stats
        loss_mean, bytes_mean = mean_over_workers(float(loss_sum) / num_batches, stats.bytes_sent)
        if rank == 0:
            report(
                Epoch(
                    spec=spec,
                    epoch=epoch,
                    step=step,
                    loss=loss_mean,
                    metric=metric,
                    lr=float(optimizer.param_groups[0]["lr"]),
                    seconds=seconds,
                    samples_per_s=samples / seconds,
                    bytes_sent=bytes_mean,
                    ratio=stats.ratio,
                )
            )
    most = torch.tensor(float(stats.bytes_sent), dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    outcome = Outcome(
        spec=spec,
        metric=metric,
        loss=loss_mean,
        steps=step,
        seconds=seconds,
        samples_per_s=samples / seconds,
        bytes_sent=bytes_mean,
        bytes_sent_max=float(most),
        ratio=stats.ratio,
        link_ratio=stats.link_ratio,
        lr_factor=lr_factor,
    )
    wire.detach()
    if rank == 0:
        report(outcome)
    return outcome


@torch.no_grad()
def evaluate(recipe: Recipe, model: DistributedDataParallel, method: thinwire.Method, rank: int, world: int) -> float:
    """The recipe's metric on the whole test set, every rank judging its part."""
    module: nn.Module = model.module
    module.eval()
    # Methods that apply local gradients let replicas drift apart between averagings; what counts is the mean.
    totals = torch.zeros(recipe.num_scores, dtype=torch.float64)
    with averaged(module, world) if method.averaging_interval else nullcontext():
        for batch in recipe.test_batches(rank=rank, world=world):
            totals += torch.tensor(recipe.score(module, batch), dtype=torch.float64)
    dist.all_reduce(totals)
    return recipe.judge(*totals.tolist())


@contextmanager
def averaged(module: nn.Module, world: int) -> Iterator[None]:
    """The module with the mean of all ranks' parameters, for the time of the block."""
    own = [parameter.clone() for parameter in module.parameters()]
    for parameter in module.parameters():
        dist.all_reduce(parameter.data)
        parameter.div_(world)
    try:
        yield
    finally:  # in place: others may hold these tensors
        for parameter, before in zip(module.parameters(), own, strict=True):
            parameter.copy_(before)


def mean_over_workers(*values: float) -> tuple[float, ...]:
    """The mean of each value over the ranks of the default group."""
    sums: Tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(sums)
    return tuple((sums / dist.get_world_size()).tolist())
