"""Telling a loop that clips gradients after the exchange, as it did before thinwire, that this loses gradient.

What lies in .grad after an exchange of a method with residuals has waited for many steps and may hold momentum. Clipped
there it is not kept anywhere; given to the method (``clip_norm``), the threshold acts before anything is accumulated.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from thinwire.engine.shards import local_of
from thinwire.monitor.user_warning import warn_user
from thinwire.torch_private import after_backward, backward_is_running, version_of

STEPS = 3  # optimizer steps that are looked at: a loop that writes into gradients does so at every one
ROUNDING = 1e-4  # relative, of a norm whose scale was taken out
WRITING = 100  # where it does, a threshold may be reached later
SENTENCE = (
    "thinwire: gradients are changed between backward and optimizer.step(). If that is clip_grad_norm_ or "
    "clip_grad_value_, take it out of the loop and give the norm to the method ({}:clip_norm=...): what lies in .grad "
    "after an exchange has waited for many steps, and what is clipped off it there is lost"
)


class ClipAfterExchangeWarning:
    """Compares the gradients' norms after the backward pass and before the optimizer's step, where torch's version
    counters say that something was written.

    Warns once, and only looks at the first steps, so it costs nothing later on.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = list(parameters)
        self._seen: list[tuple[Tensor, int]] = []
        self._norms: list[Tensor] = []
        self._last = STEPS
        self._steps = 0

    @property
    def ended(self) -> bool:
        """Whether it has looked at enough steps."""
        return self._steps >= self._last

    def restart(self) -> None:
        """Another method goes on: look at its first steps, unless it has been said."""
        if self._last:
            self._steps, self._last = 0, STEPS

    def after_backward(self) -> None:
        """Called inside the backward pass, by its last bucket: DDP writes the gradients behind everything, in a
        callback of the engine that is queued after this one's and before the one that this one queues."""
        if self.ended or not backward_is_running():  # or a rank without inputs
            return
        after_backward(lambda: after_backward(self._note))

    def _note(self) -> None:
        self._seen = [(p.grad, version_of(p.grad)) for p in self._parameters if p.grad is not None]
        self._norms = self._norms_now()

    def _norms_now(self) -> list[Tensor]:
        with torch.no_grad():
            return list(torch._foreach_norm([local_of(grad) for grad, _ in self._seen], 2)) if self._seen else []

    def before_step(self, method: Any, scale: float = 1.0) -> None:
        """Called before the optimizer's step with the wire's method, and the loss's scale, which may be taken out of
        the gradients meanwhile."""
        if self.ended:
            return
        self._steps += 1
        clips = [one.name for one in method.members if hasattr(one, "clip_norm")]
        if clips and any(_may_be_written(grad, version) for grad, version in self._seen):
            self._last = WRITING
            now, then = torch.stack(self._norms_now()), torch.stack(self._norms)
            as_it_was = now == then
            if scale != 1.0:  # of several optimizers each has its own gradients unscaled
                as_it_was |= torch.isclose(now, then / scale, rtol=ROUNDING, atol=0)
            passed_over = not bool(then.isfinite().all())  # any factor makes something else of an infinity
            if not passed_over and not bool(as_it_was.all()):
                self._last = 0
                warn_user(SENTENCE.format(clips[0]))
        self.after_step()

    def after_step(self) -> None:
        """Called behind the optimizer's step: what a closure's pass left is used, and may be cleared in any way."""
        self._seen, self._norms = [], []


def _may_be_written(grad: Tensor, version: int) -> bool:
    """A DTensor's counter does not tell of what is done to several at once."""
    return local_of(grad) is not grad or version_of(grad) != version
