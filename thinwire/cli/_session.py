"""One worker's part of a job: joins the group, takes its device, and trains every method of the job."""

from __future__ import annotations

import copy
import dataclasses
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from thinwire.cli._environment import num_cores
from thinwire.cli._folder import CHECKPOINTS, leave_config
from thinwire.cli._job import Job
from thinwire.errors import ReplicaError
from thinwire.lab.emulation import keeper
from thinwire.lab.recipes import RECIPES, Recipe
from thinwire.lab.recipes.checkpoints import CheckpointError, Checkpoints, world_net
from thinwire.lab.recipes.events import Breakdown, Outcome, Resumed, Started
from thinwire.lab.recipes.joint import JointStep
from thinwire.lab.recipes.loop import Report, Training, TrainingPlan
from thinwire.lab.recipes.threads import ThreadTraining
from thinwire.transport import ThreadNet, ThreadWorld
from thinwire.transport.groups import gather_texts


class BadJob(ValueError):
    """What the job asks for is not there or not possible; found only where the data is read."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Which worker this is, of all and of those on its machine."""

    rank: int
    world: int
    local_rank: int
    local_world: int


def train_all(job: Job, place: Place, report: Report, stop: Callable[[], bool], **rendezvous: Any) -> None:
    """Every method of the job, one after the other, in this process and its group."""
    device, backend = device_of(job.device, place)
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, num_cores() // place.local_world))  # workers share the cores
    dist.init_process_group(backend, timeout=timedelta(seconds=job.timeout_s), **rendezvous)
    try:
        if job.out is not None and place.local_rank == 0:
            leave_config(job, place.world)
        _train_all(job, device, report, stop)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def device_of(name: str, place: Place) -> tuple[torch.device, str]:
    """This worker's device, and the backend: NCCL where every worker has a GPU of its own, else Gloo."""
    if name == "cpu":
        return torch.device("cpu"), "gloo"
    count = torch.cuda.device_count()
    device = torch.device("cuda", place.local_rank % count)
    torch.cuda.set_device(device)
    own = place.local_world <= count and keeper.MARK not in os.environ  # emulated hosts share this machine's GPUs
    return device, "nccl" if own and dist.is_nccl_available() else "gloo"


def _train_all(job: Job, device: torch.device, report: Report, stop: Callable[[], bool]) -> None:
    net = world_net(device)
    recipe = _recipe(job, device, net.size)
    hosts = list(dict.fromkeys(gather_texts(net, socket.gethostname())))
    if net.rank == 0:
        name = _device_name(device)
        settings = {setting: getattr(recipe, setting) for setting in recipe.settings}
        report(Started(hosts=hosts, device=name, backend=dist.get_backend(), settings=settings))
    checkpoints = Checkpoints(Path(job.out) / CHECKPOINTS, net) if job.out is not None else None
    plan = TrainingPlan(job.epochs, job.seed, job.checkpoint_every, job.tensorboard)
    first, outcomes, state = 0, [], None
    if job.resume:
        assert checkpoints is not None
        first, state = _last_state(checkpoints, device)
        outcomes = [_outcome(fields) for fields in state["outcomes"]]
        if net.rank == 0:
            report(Resumed(first, job.specs[first], state["step"]))
            for outcome in outcomes:
                report(outcome)
    for index in range(first, len(job.specs)):
        training = Training(recipe, job.specs[index], plan, net, report, job.methods[index])
        if state is not None:
            _take_up(training, state, job)
            state = None
        outcomes.append(training.run(checkpoints, index, outcomes, stop))
        if net.rank == 0:
            report(outcomes[-1])
        del training
    if checkpoints is not None:
        dist.barrier()
        checkpoints.clear()


def _last_state(checkpoints: Checkpoints, device: torch.device) -> tuple[int, dict[str, Any]]:
    """Which method of the run to go on with, and this worker's state of it."""
    try:
        (index, _), state = checkpoints.load(device)
    except CheckpointError as error:
        raise BadJob(str(error)) from error
    return index, state


def _take_up(training: Training, state: dict[str, Any], job: Job) -> None:
    try:
        training.load_state_dict(state)
    except (ValueError, ReplicaError) as error:
        raise BadJob(f"the checkpoint in '{job.out}' does not fit: {error}") from error


def train_in_threads(job: Job, num_workers: int, report: Report) -> None:
    """Every method of the job, one after the other, with workers that are threads."""
    device = torch.device(job.device)
    recipe = _recipe(job, device, num_workers)
    if job.out is not None:
        leave_config(job, num_workers)
    if recipe.fixed_shapes:
        torch.backends.cudnn.benchmark = True
    settings = {setting: getattr(recipe, setting) for setting in recipe.settings}
    name = _device_name(device)
    report(Started(hosts=[socket.gethostname()], device=name, backend="threads", settings=settings))
    world = ThreadWorld(num_workers, job.timeout_s, one_at_a_time=True)
    plan = TrainingPlan(job.epochs, job.seed, job.checkpoint_every, job.tensorboard)
    outcomes: list[Outcome] = []
    for index, spec in enumerate(job.specs):
        recorded = device.type == "cuda" and recipe.fixed_shapes and not job.tensorboard
        joint = JointStep(world) if recorded else None

        def work(net: ThreadNet, index: int = index, spec: str = spec, joint: JointStep | None = joint) -> Outcome:
            own = copy.copy(recipe)  # the data is shared, what is carried from batch to batch is not
            training = ThreadTraining(own, spec, plan, net, report, joint)
            return training.run(None, index, outcomes, stop=lambda: False)

        outcomes.append(world.run(work)[0])
        report(outcomes[-1])


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _recipe(job: Job, device: torch.device, world: int) -> Recipe:
    try:
        recipe = RECIPES[job.recipe](Path(job.data) if job.data is not None else None, device)
        for setting in job.settings:
            name, _, text = setting.partition("=")
            recipe.set(name.strip(), text.strip())
    except ValueError as error:
        raise BadJob(str(error)) from error
    if recipe.num_batches(world) < 1:
        few = f"the training data of recipe '{job.recipe}' does not fill one batch of {recipe.batch_size}"
        raise BadJob(f"{few}; set a smaller batch_size")
    return recipe


def _outcome(fields: dict[str, Any]) -> Outcome:
    return Outcome(**{**fields, "breakdown": Breakdown(**fields["breakdown"])})
