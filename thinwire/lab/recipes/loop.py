"""The training loop of every recipe: a plain DDP loop with one added line, and reports on how it goes.

What a step costs beyond a plain loop is two clock readings (on a GPU, two events). Everything else, all that waits for
the GPU or for other ranks, happens at checks, about four times per second.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.lab import peers
from thinwire.lab.recipes.base import Batch, Recipe, samples_in
from thinwire.lab.recipes.checkpoints import Checkpoints
from thinwire.lab.recipes.events import Breakdown, Epoch, Halted, Outcome, ProgressEvent, Report, Steps
from thinwire.lab.recipes.histograms import GradientTap, histograms
from thinwire.lab.recipes.tally import Tally, TrainingClock, tally
from thinwire.transport import GroupNet, TorchNet
from thinwire.transport.failures import FailureDetector

CHECK_EVERY_S = 0.25
NUM_LINES = 100  # "steps" lines of a run, or fewer: they are at least LEAST_LINE_STEPS apart
LEAST_LINE_STEPS = 10
HISTOGRAM_EVERY = 10  # in "steps" lines


# torch 2.13 renamed this argument and warns about the old name; older versions know only that one.
_ARGUMENTS = inspect.signature(DistributedDataParallel.__init__).parameters
_NAME = "forward_sync_buffers" if "forward_sync_buffers" in _ARGUMENTS else "broadcast_buffers"
NO_BUFFER_BROADCAST: dict[str, Any] = {_NAME: False}


class Stopped(Exception):
    """The run was asked to stop and did, between two steps, with a checkpoint."""

    def __init__(self, halted: Halted) -> None:
        super().__init__(f"stopped at step {halted.step}")
        self.halted = halted


@dataclasses.dataclass(frozen=True)
class TrainingPlan:
    """What is the same for all methods of a run, and for all ranks."""

    epochs: int
    seed: int
    checkpoint_every: int = 1  # epochs; with `checkpoints` given
    histograms: bool = False


class Training:
    """One method's training from the recipe's initial parameters; every rank of the net makes one.

    Only rank 0 reports, under the name ``spec``; ``method`` says in full what that is, where a run is resumed. The same
    seed gives every method the same initial parameters, data order and augmentation.
    """

    def __init__(
        self, recipe: Recipe, spec: str, plan: TrainingPlan, net: GroupNet, report: Report, method: str | None = None
    ) -> None:
        self.recipe, self.spec, self.plan, self.net, self.report = recipe, spec, plan, net, report
        self.method = recipe.adapted(peers.parse(spec if method is None else method))
        self.lr_factor = recipe.lr_factor(self.method)
        torch.manual_seed(plan.seed)
        self.module = recipe.placed(recipe.model())
        self.model = self._distributed()
        torch.manual_seed(plan.seed * 1_000_003 + 1 + net.rank)  # dropout differs between ranks
        self.optimizer = recipe.optimizer(self.model.parameters(), self.lr_factor)
        self.num_batches = recipe.num_batches(net.size)
        self.method = self.method.in_steps(self.num_batches)
        self.num_steps = plan.epochs * self.num_batches
        self.schedule = recipe.schedule(self.optimizer, self.num_steps)
        self.wire = self._attached()

        self.epoch, self.step = 1, 0
        # (2,) sums of losses: of this epoch so far, and since the last "steps" line
        self.losses = torch.zeros(2, device=recipe.device)
        self.metric: float | None = None
        self.loss_mean = self.bytes_mean = 0.0
        self.before = Tally()  # until this process took over
        self.at_line = Tally()
        self.clock, self.samples, self.first_step = TrainingClock(recipe.device), 0, 0
        self.line_every = max(LEAST_LINE_STEPS, round(self.num_steps / NUM_LINES))
        self.next_check, self.last_check = 1, (0, 0.0)
        self._carried: tuple[dict[str, Any], list[Tensor]] | None = None

    def _distributed(self) -> nn.Module:
        """What the loss is called with."""
        # Buffers need no broadcast at every step: what training itself reads of them is each rank's own.
        return DistributedDataParallel(self.module, **NO_BUFFER_BROADCAST)

    def _attached(self) -> Any:
        assert isinstance(self.model, DistributedDataParallel)
        wire = thinwire.attach(self.model, self.optimizer, self.method)
        self._use(wire.failure_detector)
        return wire

    def _use(self, failure_detector: FailureDetector | None) -> None:
        """Who is missing shall also be known where the workers agree on anything but gradients."""
        if isinstance(self.net, TorchNet):
            self.net.failure_detector = failure_detector

    # ---------------------------------------------------------------------------------------------- going through

    def run(
        self, checkpoints: Checkpoints | None, index: int, outcomes: list[Outcome], stop: Callable[[], bool]
    ) -> Outcome:
        """Train to the end, or raise Stopped when any rank's ``stop()`` says so and a checkpoint was made.

        ``index`` and ``outcomes`` (of the methods before this one) go into the checkpoints.
        """

        def save() -> None:
            if checkpoints is not None:
                finished = [dataclasses.asdict(outcome) for outcome in outcomes]
                others = {"spec": self.spec, "outcomes": finished}
                checkpoints.save((index, self.step), lambda: {**self.state_dict(), **others})

        while self.epoch <= self.plan.epochs:
            wanted = self._train_epoch(stop)
            done = self.step == self.epoch * self.num_batches
            if done:
                self._finish_epoch()
            if wanted or (done and (self.epoch - 1) % self.plan.checkpoint_every == 0):
                save()
            if wanted:
                raise Stopped(Halted(self.spec, min(self.epoch, self.plan.epochs), self.step, self.num_steps))
        return self._outcome()

    def _train_epoch(self, stop: Callable[[], bool]) -> bool:
        """Train to the end of the epoch, or until a rank wants to stop, and say whether one does."""
        self.model.train()
        batches = self.recipe.train_batches(self.epoch, seed=self.plan.seed, rank=self.net.rank, world=self.net.size)
        end = self.epoch * self.num_batches
        for _ in range(self.step - (end - self.num_batches)):
            next(batches)  # done before the interruption
        self._restore_carried()
        self.clock.start()
        try:
            while self.step < end:
                self._train_step(batches)
                is_due = self.step in (self.next_check, end) or self.step % self.line_every == 0
                if is_due and self._check(stop()):
                    return True
        finally:
            self.clock.stop()
        return False

    def _gradients(self, batches: Iterator[Batch]) -> tuple[Tensor, int]:
        """The gradient of the next batch, averaged over the ranks, in .grad; its loss and how many samples it has."""
        batch = next(batches)
        self.optimizer.zero_grad()
        self.clock.forward()
        loss = self.recipe.loss(self.model, batch)
        loss.backward()
        self.clock.backward_done()
        return loss.detach(), samples_in(batch)

    def _train_step(self, batches: Iterator[Batch]) -> None:
        tap = None
        if self.plan.histograms and self.step % (HISTOGRAM_EVERY * self.line_every) == 0:
            tap = GradientTap(self.module)
        loss, num_samples = self._gradients(batches)
        if tap is not None:
            self._report_histograms(tap)
        self.recipe.clip(self.model.parameters(), self.method)
        self.optimizer.step()
        self.schedule.step()
        self.step += 1
        self.samples += num_samples * self.net.size
        self.losses += loss

    def _report_histograms(self, tap: GradientTap) -> None:
        tap.close()
        found = histograms(self.spec, self.wire.reducer, self.module, tap, self.step)
        if found is not None:
            self.report(found)

    @property
    def tally(self) -> Tally:
        """The run so far, over interruptions; waits for what is under way."""
        stats = self.wire.snapshot(residual_norm=False)
        return self.before + tally(self.clock, stats, self.step - self.first_step, self.samples)

    def _check(self, wants_stop: bool) -> bool:
        """Tell how it goes, and return whether any rank wants to stop. Collective, at the same steps on every rank."""
        self.net.stage = "progress"
        in_epoch = self.step - (self.epoch - 1) * self.num_batches
        epoch_loss, line_loss = self.losses.tolist()  # waits for the GPU
        so_far = self.tally
        line = so_far - self.at_line
        steps_since, seconds_since = self.step - self.last_check[0], so_far.seconds - self.last_check[1]
        mine = [wants_stop, seconds_since / steps_since, epoch_loss / in_epoch, line_loss / max(1, line.steps)]
        mine += [so_far.bytes_sent, *dataclasses.astuple(line.breakdown)]
        stop, step_s, self.loss_mean, line_loss, self.bytes_mean, *parts = mean_over_workers(self.net, *mine)
        self.last_check = (self.step, so_far.seconds)
        self.next_check = self.step + max(1, round(CHECK_EVERY_S / step_s))
        is_line = self.step % self.line_every == 0 or self.step == self.num_steps
        if is_line:
            self.at_line = so_far
            self.losses[1] = 0
        if self.net.rank == 0:
            self.report(
                ProgressEvent(
                    spec=self.spec,
                    epoch=self.epoch,
                    epochs=self.plan.epochs,
                    step=self.step,
                    num_steps=self.num_steps,
                    loss=self.loss_mean,
                    metric=self.metric,
                    samples_per_s=so_far.samples / so_far.seconds,
                    bytes_sent=self.bytes_mean,
                    ratio=so_far.ratio,
                )
            )
            if is_line:
                self.report(
                    Steps(
                        spec=self.spec,
                        epoch=self.epoch,
                        step=self.step,
                        loss=line_loss,
                        seconds=so_far.seconds,
                        bytes_sent=self.bytes_mean,
                        breakdown=Breakdown(*parts),
                    )
                )
        return stop > 0

    def _finish_epoch(self) -> None:
        self.net.stage = "evaluation"
        self.metric = evaluate(self.recipe, self.module, self.method, self.net, lambda: self.wire.averaged())
        so_far = self.tally
        if self.net.rank == 0:
            self.report(
                Epoch(
                    spec=self.spec,
                    epoch=self.epoch,
                    step=self.step,
                    loss=self.loss_mean,
                    metric=self.metric,
                    lr=float(self.optimizer.param_groups[0]["lr"]),
                    seconds=so_far.seconds,
                    samples_per_s=so_far.samples / so_far.seconds,
                    bytes_sent=self.bytes_mean,
                    ratio=so_far.ratio,
                )
            )
        self.epoch += 1
        self.losses[0] = 0

    def _outcome(self) -> Outcome:
        so_far = self.tally
        assert self.metric is not None
        most = torch.tensor(float(so_far.bytes_sent), dtype=torch.float64, device=self.net.device)
        self.net.all_reduce(most, largest=True)
        outcome = Outcome(
            spec=self.spec,
            metric=self.metric,
            loss=self.loss_mean,
            steps=self.step,
            seconds=so_far.seconds,
            samples_per_s=so_far.samples / so_far.seconds,
            bytes_sent=self.bytes_mean,
            bytes_sent_max=float(most),
            ratio=so_far.ratio,
            link_ratio=so_far.link_ratio(self.net.size),
            lr_factor=self.lr_factor,
            method=str(self.method),
            breakdown=Breakdown(*mean_over_workers(self.net, *dataclasses.astuple(so_far.breakdown))),
        )
        self._use(None)
        self.wire.detach()
        return outcome

    # --------------------------------------------------------------------------------------- going on after a stop

    def state_dict(self) -> dict[str, Any]:
        """Everything of this rank that a later process needs to go on as if nothing had happened."""
        device = self.recipe.device
        return {
            "epoch": self.epoch,
            "step": self.step,
            "model": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "wire": self.wire.state_dict(),
            "recipe": self.recipe.state_dict(),
            "rng": [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])],
            "losses": self.losses,
            "numbers": {"metric": self.metric, "loss_mean": self.loss_mean, "bytes_mean": self.bytes_mean},
            "tally": dataclasses.asdict(self.tally),
            "at_line": dataclasses.asdict(self.at_line),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.step = state["epoch"], state["step"]
        self.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.wire.load_state_dict(state["wire"])
        self.losses = state["losses"]
        self.metric = state["numbers"]["metric"]
        self.loss_mean, self.bytes_mean = state["numbers"]["loss_mean"], state["numbers"]["bytes_mean"]
        self.before, self.at_line = Tally(**state["tally"]), Tally(**state["at_line"])
        self.first_step, self.next_check = self.step, self.step + 1
        self.last_check = (self.step, self.before.seconds)
        self._carried = (state["recipe"], state["rng"])

    def _restore_carried(self) -> None:
        """What passing over the finished batches would disturb."""
        if self._carried is None:
            return
        carried, rng = self._carried
        self._carried = None
        if self.step % self.num_batches:
            self.recipe.load_state_dict(carried)
        torch.set_rng_state(rng[0].cpu())
        if len(rng) > 1:
            torch.cuda.set_rng_state(rng[1].cpu(), self.recipe.device)


@torch.no_grad()
def evaluate(
    recipe: Recipe,
    module: nn.Module,
    method: thinwire.Method,
    net: GroupNet,
    averaged: Callable[[], AbstractContextManager[None]],
) -> float:
    """The recipe's metric on the whole test set, every rank judging its part; ``averaged`` is the wire's."""
    module.eval()
    if method.outer_rule is None:  # else averaged() has those of all ranks
        share_batch_statistics(module, net)
    # Where replicas drift apart between averagings their mean counts; where none is ever made, everybody's own.
    totals = torch.zeros(recipe.num_scores, dtype=torch.float64)
    with averaged() if method.averaging_interval else nullcontext():
        for batch in recipe.test_batches(rank=net.rank, world=net.size):
            totals += torch.tensor(recipe.score(module, batch), dtype=torch.float64)
    totals = totals.to(net.device)
    net.all_reduce(totals)
    return recipe.judge(*totals.tolist())


def share_batch_statistics(module: nn.Module, net: GroupNet) -> None:
    """Give all ranks rank 0's running means and variances, the ones that DDP would have given them at every step."""
    for part in module.modules():
        if isinstance(part, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)):
            for buffer in part.buffers():
                net.broadcast(buffer, 0)


def mean_over_workers(net: GroupNet, *values: float) -> tuple[float, ...]:
    """The mean of each value over the ranks of the net."""
    sums: Tensor = torch.tensor(values, dtype=torch.float64, device=net.device)
    net.all_reduce(sums)
    return tuple((sums / net.size).tolist())
