"""What watches a reducer's training, together: health, replicas, stragglers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from thinwire.engine.norms import UNMEASURED, Measured, Norms
from thinwire.methods.running_method import RunningMethod
from thinwire.monitor.health import Guard, Health, measured_health
from thinwire.monitor.ranks_differ import RanksDiffer
from thinwire.monitor.replicas import GO_BACK, check_replicas
from thinwire.monitor.step_log import StepLog
from thinwire.monitor.stragglers import StragglerMonitor
from thinwire.monitor.user_warning import warn_user
from thinwire.transport import overhead
from thinwire.transport.reducer_nets import Nets


class Monitors:
    """All ranks call every method alike; nothing of this takes part in a result.

    ``replicas`` gives the parameters that should be equal on all ranks, or None while they cannot be.
    """

    def __init__(
        self,
        nets: Nets,
        guard: Guard | None,
        check_replicas_every: int | None,
        replicas: Callable[[], Mapping[str, Tensor] | None],
    ) -> None:
        self.guard, self.stragglers, self.replicas = guard, StragglerMonitor(), replicas
        self._ranks_differ = RanksDiffer()
        self.health: Health | None = None  # what the last measurement found
        self.log: StepLog | None = None
        self._nets, self.check_every = nets, check_replicas_every
        self._checked = 0  # passes at the last check of the replicas
        self._norms: tuple[int, Norms] = (-1, Norms.nothing())  # of the exchanges of a measured step so far

    def norms(self, step: int, gradients: Sequence[Tensor] = ()) -> Measured:
        """What the exchanges of this step have added up so far and these gradients, where it is measured."""
        if not any(one is not None and one.measures(step) for one in (self.guard, self.log)):
            return UNMEASURED
        last, norms = self._norms
        return (norms if last == step else Norms.nothing()).of_gradients(gradients)

    def add(self, step: int, norms: Measured) -> None:
        if isinstance(norms, Norms):
            self._norms = step, norms

    def step_exchanged(self, step: int, running: RunningMethod) -> None:
        """After the last exchange of a step: the same decision about the density on all ranks."""
        norms = self.norms(step)
        if not isinstance(norms, Norms):
            return
        self._norms = -1, Norms.nothing()  # another pass of this step has its own
        self.health = measured_health(step, norms, self._nets.own)
        if self.guard is not None and self.guard.measures(step):
            self.guard.conclude(self.health, running.density(step))
            running.density_factor = self.guard.density_factor

    def compares_ranks(self, running: RunningMethod) -> bool:
        """Whether the ranks compare their pace and their numbers, every SAMPLE_EVERY passes."""
        # With NCCL the host does not wait inside a collective, so it has nothing to compare.
        return self._nets.waits_on_host and running.method.communicates

    def compare_ranks(self, numbers: Sequence[float]) -> None:
        """Their pace, and these numbers (``ranks_differ.numbers_of``)."""
        nets = self._nets
        waited_s = sum(net.traffic.seconds for net in nets.all)
        handed, links = nets.between.traffic.handed, nets.inside is None
        self._ranks_differ.judge(self.stragglers.sample(nets.own, waited_s, handed, links, numbers))

    def after_optimizer_step(self, passes: int, optimizer_steps: int, equal: bool) -> None:
        """Warn of what was measured, and compare the replicas where they should be ``equal`` at all."""
        self.warn()
        if not self.checks_replicas(passes, equal):
            return
        parameters = self.replicas()
        if parameters is not None:
            self._checked = passes
            with overhead(self._nets.own):
                when = f"after optimizer step {optimizer_steps}"
                check_replicas(parameters, self._nets.own, when, GO_BACK)

    def warn(self) -> None:
        """Say once what a measurement found, on one rank."""
        sentence = self.guard.take_sentence() if self.guard is not None else None
        for one in (sentence, *self._ranks_differ.take_sentences()):
            if one is not None and self._nets.own.rank == 0:
                warn_user(one)

    def checks_replicas(self, passes: int, equal: bool) -> bool:
        return self.check_every is not None and equal and passes - self._checked >= self.check_every

    def restart(self, density_factor: float = 1.0) -> None:
        """Forget what was measured: another method follows, or another run."""
        self.health = None
        if self.guard is not None:
            self.guard.restart()
            self.guard.density_factor = density_factor
