"""A line about communication every so many steps."""

from __future__ import annotations

from collections.abc import Callable

from thinwire.stats import Stats


class StepLog:
    """Tells what happened since its last line; ``tell`` is None on the ranks that only measure."""

    def __init__(self, every: int, now: Stats, tell: Callable[[str], None] | None) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"log_every needs a number of steps of at least 1, not {every!r}")
        self.every, self._last, self._tell = every, now, tell
        self._told = 0  # the step of the last line: an exchange may follow that is no further step

    def measures(self, step: int) -> bool:
        """Whether the norms of this step's exchanges are wanted; not at most steps."""
        return (step + 1) % self.every == 0

    def after_step(self, step: int, snapshot: Callable[[], Stats]) -> None:
        """``step`` steps are done."""
        if step % self.every or self._tell is None or step == self._told:
            return
        self._told = step
        now = snapshot()
        recent, self._last = now.since(self._last), now
        norm = "" if now.gradient_norm is None else f"; gradient norm {now.gradient_norm:.3g}"
        self._tell(f"step {step}: {recent.sentence()}{norm}")
