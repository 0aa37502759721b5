"""Is what is kept back running away? Numbers about the residuals every few steps, a warning, and a way back.

Three numbers describe a compressed training. With x what should be sent at a step and e what remains of it:

- ``residual_to_gradient``: |e| / |g|, how many gradients' worth is waiting.
- ``compression_error``: |e| / |x|, the share that was not sent; its square is the 1 - delta of a delta-approximate
  compressor (dist-EF-blockSGDM, section 2): 0 sends everything, 1 nothing.
- ``staleness``: |e|_1 / (|x|_1 - |e|_1) steps, how long gradient waits on average ("outdated or stale", DGC section
  2.3): what is in store divided by what leaves at a step, which is Little's law, L = lambda W.

None of them alone tells a bad run from a good one: while residuals fill up all three rise for hundreds of steps, and
when training converges gradients become small beside a residual that is still to be sent. What does tell is growth of
both in absolute terms: error feedback keeps |e| below a multiple of the largest |g| (dist-EF-blockSGDM, Lemma 2), so
in a stable run neither can grow without end. A run therefore counts as running away when the medians of the last
``WINDOW`` measurements, of the gradient and of the residual where the method has one, stand above ``BOUND`` times the
medians of everything before and are higher than those of the ``WINDOW`` before them. Medians, because single batches
have large gradients in healthy runs too; measurements above the bound do not count as what is usual.

All numbers are sums over the ranks, added up in rank order, so every rank decides the same at the same step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch

from thinwire.engine.norms import Norms
from thinwire.methods import Method
from thinwire.transport import Net, overhead

MODES = (None, "warn", "densify")
WINDOW, BOUND = 3, 5.0
KEPT = 1000  # measurements that say what is usual
FACTOR = 4.0  # by which the density is raised


@dataclass(frozen=True)
class Health:
    """What one measurement found, for all ranks together; None where the method keeps no residual."""

    step: int
    gradient_norm: float
    residual_norm: float | None
    compression_error: float | None
    staleness: float | None

    @property
    def residual_to_gradient(self) -> float | None:
        if self.residual_norm is None or not self.gradient_norm:
            return None
        return self.residual_norm / self.gradient_norm


def check_watched(method: Method, guard: object, check_replicas_every: object, every: object = 1) -> None:
    """Raise when a method cannot be watched in these ways."""
    if guard not in MODES:
        raise ValueError(f'guard must be None, "warn" or "densify", not {guard!r}')
    for option, value in (("guard_every", every), ("check_replicas_every", check_replicas_every)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{option} must be a number of steps of at least 1, not {value!r}")
    if guard == "densify" and not any(hasattr(one, "density") for one in method.members):
        raise ValueError(f'guard="densify" needs a method with a density, which {method} has not; use guard="warn"')
    if check_replicas_every is not None and method.replicas_drift and method.averaging_interval is None:
        raise ValueError(
            f"check_replicas_every: with {method} every rank goes its own way, so there is nothing to check"
        )


def measured_health(step: int, norms: Norms, net: Net) -> Health:
    """Put the ranks' numbers of one step together; collective."""
    with overhead(net):
        rows = [frame.cpu().clone().view(torch.float64) for frame in net.all_gather(norms.as_bytes())]
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return _health(step, *total.tolist())


class Guard:
    """Asks for the norms of every ``every``-th step and judges the numbers that come back."""

    def __init__(self, mode: str, every: int) -> None:
        self.mode, self.every = mode, every
        self.density_factor = 1.0
        self.runaways = 0  # measurements at which the run was found running away
        self._sentence: str | None = None
        self._usual: list[Health] = []  # measurements below the bound
        self._recent: list[Health] = []  # the last ones since the last decision
        self._warned = False

    def measures(self, step: int) -> bool:
        """Whether the norms of this step's exchanges are wanted; not at most steps."""
        return (step + 1) % self.every == 0

    def restart(self) -> None:
        """Forget what was measured: another method follows, or another run."""
        self._usual, self._recent, self._warned, self.density_factor = [], [], False, 1.0

    def conclude(self, health: Health, density: float | None) -> None:
        """Judge a measurement and decide; ``density`` is the one of its step, None where there is none."""
        self._recent = [*self._recent, health][-2 * WINDOW :]
        high = len(self._usual) >= WINDOW and _exceeds([health], self._usual, BOUND)
        if not high:
            self._usual = [*self._usual, health][-KEPT:]
        if len(self._usual) < 2 * WINDOW or not _exceeds(self._recent[-WINDOW:], self._usual, BOUND):
            self._warned = False
            return
        if len(self._recent) < 2 * WINDOW or not _exceeds(self._recent[WINDOW:], self._recent[:WINDOW], 1.0):
            return
        self.runaways += 1
        self._recent = []
        what = self._describe(health)
        if self.mode == "densify" and density is not None and density < 1.0:
            self.density_factor *= FACTOR
            self._sentence = f"{what}; the density is raised from {density:.3g} to {min(1.0, density * FACTOR):.3g}"
        elif not self._warned:
            self._sentence = f"{what}; lower the learning rate, give a warm-up, or send more"
        self._warned = True

    def _describe(self, now: Health) -> str:
        gradient, residual = (max(usual, 1e-30) for usual in _medians(self._usual))
        text = f"thinwire: the training runs away at step {now.step}: gradients are {now.gradient_norm / gradient:.3g}"
        if now.residual_norm is None or now.compression_error is None or now.staleness is None:
            return f"{text} times what they were"
        return (
            f"{text} and residuals {now.residual_norm / residual:.3g} times what they were, "
            f"{now.compression_error:.1%} of what should be sent stays behind, for {now.staleness:.3g} steps on average"
        )

    def take_sentence(self) -> str | None:
        """Return what there is to warn of, once."""
        sentence, self._sentence = self._sentence, None
        return sentence


def _medians(some: Sequence[Health]) -> tuple[float, float]:
    """Of the gradients' and the residuals' norms."""
    return median(one.gradient_norm for one in some), median(one.residual_norm or 0.0 for one in some)


def _exceeds(some: Sequence[Health], others: Sequence[Health], factor: float) -> bool:
    """Whether gradients and residuals are more than ``factor`` times the others; residuals where there are any."""
    (g, e), (usual_g, usual_e) = _medians(some), _medians(others)
    return g > factor * usual_g and (e > factor * usual_e or some[-1].residual_norm is None)


def _health(step: int, g2: float, x2: float, x1: float, e2: float, e1: float) -> Health:
    if not x2:
        return Health(step, g2**0.5, None, None, None)
    return Health(step, g2**0.5, e2**0.5, (e2 / x2) ** 0.5, e1 / (x1 - e1) if x1 > e1 else float("inf"))
